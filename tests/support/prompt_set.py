"""Forty prompts of 1 to 600 tokens with what transformers makes of them: the workload of the equality tests."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from oracle import Chooser, Expected, greedy, oracle

BLOCK = 16
FIRST_ORDINARY_TOKEN = 2  # behind BOS and EOS

LENGTHS = (
    600, 1, 512, 2, 400, BLOCK - 1, 300, BLOCK, 257, BLOCK + 1, 256, 31, 255, 32, 200, 33, 129, 47, 128, 48, 127, 49,
    100, 80, 64,
)  # fmt: skip
"""Of unrelated prompts; long and short ones alternate."""

SHARED_PREFIXES = ((40, (1, 8, 9, 24, 57)), (160, (1, 15, 16, 17, 90)))
"""(tokens in common, tokens behind them): two blocks and a half, and ten blocks."""

NUM_REPEATS = 5
AT_ONCE = 9
"""So many prompts of similar lengths go through the model together."""
MAX_DRAWS = 50
NUM_PROMPTS = len(LENGTHS) + sum(len(tails) for _, tails in SHARED_PREFIXES) + NUM_REPEATS
assert NUM_PROMPTS == 40


def forty_prompts(
    model_dir: Path, num_output: int, choosers: Sequence[Chooser] = (greedy,), *, seed: int = 0
) -> list[Expected]:
    """The prompts and their continuations; number i is continued by choosers[i % len(choosers)].

    Exactly a block, a block and one more or less, shared prefixes, and repeats are among them.
    """
    if tuple(choosers) == (greedy,):
        return list(_greedy_prompts(model_dir, num_output, seed))
    return _make_prompts(model_dir, num_output, choosers, seed)


@cache
def _greedy_prompts(model_dir: Path, num_output: int, seed: int) -> list[Expected]:
    """Made once: several files of tests use the same ones."""
    return _make_prompts(model_dir, num_output, (greedy,), seed)


def _make_prompts(model_dir: Path, num_output: int, choosers: Sequence[Chooser], seed: int) -> list[Expected]:
    model = oracle(model_dir)
    rng = random.Random(seed)

    def draw(length: int) -> list[int]:
        return rng.choices(range(FIRST_ORDINARY_TOKEN, model.vocab_size), k=length)

    shapes: list[tuple[int, list[int]]] = [(length, []) for length in LENGTHS]
    for num_shared, tails in SHARED_PREFIXES:
        prefix = draw(num_shared)
        shapes += [(tail, prefix) for tail in tails]
    found: dict[int, Expected] = {}
    for _ in range(MAX_DRAWS):
        rest = sorted(set(range(len(shapes))) - found.keys(), key=lambda i: shapes[i][0] + len(shapes[i][1]))
        for group in (rest[i : i + AT_ONCE] for i in range(0, len(rest), AT_ONCE)):
            prompts = [[*shapes[i][1], *draw(shapes[i][0])] for i in group]
            outputs = model.generate_all(prompts, num_output, [choosers[i % len(choosers)] for i in group])
            found |= {
                i: Expected(prompt, output)
                for i, prompt, output in zip(group, prompts, outputs, strict=True)
                if output is not None
            }
    assert len(found) == len(shapes), f"no clear output in {MAX_DRAWS} prompts"
    expected = [found[i] for i in range(len(shapes))]
    for i in range(NUM_REPEATS):  # of one that the same chooser continued
        same = range(len(expected) % len(choosers), len(LENGTHS), len(choosers))
        expected.append(expected[same[3 * i % len(same)]])
    return expected
