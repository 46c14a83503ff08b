"""Turns of a conversation over each connector: what any engine has of it is not computed again."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from deployments import Running, launches
from serving_checks import Books, complete_all, read_books, settled_books

BLOCK = 16
NUM_ANSWER = 100  # tokens of each answer
QUESTIONS = [
    random.Random(f"question {i}").choices(range(2, 258), k=count) for i, count in enumerate((200, 30, 45, 20))
]
CONNECTORS = {
    "shared_memory": ("--connector", "shared_memory"),
    "nixl": ("--connector", "nixl"),
    "nixl-push": ("--connector", "nixl", "--connector-config", "mode=push"),
    "p2p": ("--connector", "p2p", "--order", "concurrent"),
    "p2p-needs-peer-first": ("--connector", "p2p", "--order", "needs_peer_first"),
}


def ask(deployment: Running, prompt: Sequence[int]) -> tuple[list[int], Books]:
    """One turn: the answer, and what it added to the books of all engines when they are at rest."""
    before = read_books(deployment)
    [reply] = complete_all(deployment, [{"prompt": list(prompt), "max_tokens": NUM_ANSWER, "ignore_eos": True, "temperature": 0}])
    roles = [role for role in before.roles if role != "any"] or ["any"]
    books = settled_books(deployment, lambda now: all((now - before).total(r) >= len(prompt) for r in roles)) - before
    print(reply["usage"], {role: books.sources(role) for role in roles})
    return reply["choices"][0]["token_ids"], books

@pytest.mark.parametrize("connector", CONNECTORS)
def test_baseline(served_model: Path, connector: str) -> None:
    with launches(served_model) as launch:
        deployment = launch("--prefill", "1", "--decode", "1", "--kv-reuse", "always", *CONNECTORS[connector])
        history = []
        for q in QUESTIONS:
            history += q
            answer, books = ask(deployment, history)
            history += answer
            print(len(history))
