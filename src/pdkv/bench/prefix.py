"""How much of a data set repeats: what a prefix cache without bounds would find."""

from collections.abc import Sequence
from typing import Any, TextIO

from pdkv.bench.workload import Session, units

_Node = dict[Any, "_Node"]


def repeats(sessions: Sequence[Session], *, block: int, threshold: float, min_length: int) -> dict[str, Any]:
    """Walk through the prompts in their order.

    Args:
        block: only whole blocks of so many tokens (or words) count, as in a cache of such blocks.
        threshold: a prompt counts as a repeat if at least this share of it was there before.
        min_length: shorter repeats count as none.

    Returns:
        Counts, in tokens or words, and the longest prefixes that several sessions share, by how often they come.
    """
    root: _Node = {}
    seen: dict[int, tuple[int, int]] = {}  # by node: how many sessions end their repeat here, and its length
    totals = {"prompts": 0, "tokens": 0, "repeated_tokens": 0, "repeated_prompts": 0}
    for session in sessions:
        parts: list[Any] = []
        for turn in session.turns:
            parts = ([] if turn.is_whole else parts) + units(turn.prompt)
            length, node = _walk(root, parts, block)
            length = length if length >= min_length else 0
            totals["prompts"] += 1
            totals["tokens"] += len(parts)
            totals["repeated_tokens"] += length
            totals["repeated_prompts"] += bool(parts) and length >= threshold * len(parts) and length > 0
            if length and len(session.turns) == 1:
                count, _ = seen.get(id(node), (0, 0))
                seen[id(node)] = count + 1, length
    shared = sorted(seen.values(), key=lambda item: -item[0] * item[1])[:5]
    return {
        **totals,
        "share_of_tokens": totals["repeated_tokens"] / max(totals["tokens"], 1),
        "share_of_prompts": totals["repeated_prompts"] / max(totals["prompts"], 1),
        "shared_prefixes": [{"repeats": count, "length": length} for count, length in shared],
    }


def _walk(root: _Node, parts: Sequence[Any], block: int) -> tuple[int, _Node]:
    """The length that was there before, and the place where it ends; the rest is there from now on."""
    node, length, end = root, 0, root
    is_known = True
    for start in range(0, len(parts) - block + 1, block):
        key = tuple(parts[start : start + block])
        following = node.get(key)
        if following is None:
            is_known = False
            following = node[key] = {}
        elif is_known:
            length, end = start + block, following
        node = following
    return length, end


def print_repeats(found: dict[str, Any], unit: str, out: TextIO) -> None:
    """Some lines for people."""
    print(f"{found['prompts']} prompts, {found['tokens']} {unit}", file=out)
    print(f"repeated {unit}: {found['repeated_tokens']} ({found['share_of_tokens']:.1%})", file=out)
    print(f"prompts that repeat: {found['repeated_prompts']} ({found['share_of_prompts']:.1%})", file=out)
    for shared in found["shared_prefixes"]:
        print(f"  a prefix of {shared['length']} {unit} came {shared['repeats']} times more", file=out)
