"""Whatever the topology, chunking, preemption and cache: the tokens are those of transformers, and decode computes none
of the prompt (F1, F2).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from deployments import Running, launches
from oracle import Expected
from prompt_set import forty_prompts
from serving_checks import Books, complete_all, read_books, serve_directory, settled_books

NUM_OUTPUT = 40

# Blocks of 16 tokens and 3 layers x 2 (K and V) x 2 heads x 16 x 4 bytes = 12 KiB. The longest prompt and its output
# take 40 of them; all forty together ten times as many.
SMALL_POOL = str(44 * 16 * 3 * 2 * 2 * 16 * 4)
CHUNKS = ("--long-prefill-token-threshold", "48")
PREEMPT_PREFILL = ("--prefill-kv-cache-memory", SMALL_POOL, "--max-leased-fraction", "4", *CHUNKS)
PREEMPT_DECODE = ("--decode-kv-cache-memory", SMALL_POOL)

TOPOLOGIES = {"1P1D": ("--prefill", "1", "--decode", "1"), "2P4D": ("--prefill", "2", "--decode", "4")}


@dataclass(frozen=True)
class Model:
    """A served model and what is expected of it."""

    path: Path
    expected: list[Expected]

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts."""
        return sum(len(e.prompt) for e in self.expected)


@pytest.fixture(scope="module")
def make_model(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """By family; each is made once."""
    made: dict[str, Model] = {}

    def make(family: str) -> Model:
        if family not in made:
            directory = hf_model(family, initializer_range=0.2)  # the tokens then depend on the whole prompt
            path = serve_directory(directory, tmp_path_factory.mktemp(family))
            made[family] = Model(path, forty_prompts(directory, NUM_OUTPUT))
        return made[family]

    return make


@contextmanager
def deployment_of(model: Model, *flags: str) -> Iterator[Running]:
    with launches(model.path) as launch:
        yield launch(*flags)


def run_all(deployment: Running, model: Model) -> Books:
    """One pass over all prompts at once: the right tokens, each prompt counted once. Returns what it cost."""
    before = read_books(deployment)
    replies = complete_all(
        deployment,
        [
            {"prompt": e.prompt, "max_tokens": len(e.output), "temperature": 0, "ignore_eos": True}
            for e in model.expected
        ],
    )
    wrong = [
        (i, len(e.prompt), reply["choices"][0]["token_ids"], e.output)
        for i, (e, reply) in enumerate(zip(model.expected, replies, strict=True))
        if reply["choices"][0]["token_ids"] != e.output
    ]
    assert not wrong, f"{len(wrong)} of {len(replies)} (number, prompt length, got, expected): {wrong}"
    for e, reply in zip(model.expected, replies, strict=True):
        usage = reply["usage"]
        assert usage["prompt_tokens"] == len(e.prompt)
        assert usage["completion_tokens"] == len(e.output)
        assert usage["total_tokens"] == len(e.prompt) + len(e.output)
        assert usage["prompt_tokens_details"]["cached_tokens"] < len(e.prompt)

    def counted(books: Books) -> bool:
        new = books - before
        roles = {role for _, role, *_ in books.counts}
        return all(new.total(role) >= model.num_prompt_tokens for role in roles)

    books = settled_books(deployment, counted) - before
    for role in {role for _, role, *_ in books.counts}:
        assert books.total(role) == model.num_prompt_tokens, books
    assert books.of("kv_load_failures", "decode") == 0, books
    computed = sum(books.sources(role)[s] for role in ("prefill", "any") for s in ("computed", "recomputed"))
    cached = sum(reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies)
    assert cached == model.num_prompt_tokens - computed
    return books


def check_pair(books: Books, *, preempted: bool) -> None:
    """What must hold of every run over a prefill and a decode side."""
    decode = books.sources("decode")
    assert decode["computed"] == 0, books
    assert decode["remote"] > 0, books
    if not preempted:  # else a peer's cache may lose a block while prefill copies it
        assert books.of("kv_load_failures", "prefill") == 0, books
        assert decode["recomputed"] == 0, books
        assert books.sources("prefill")["recomputed"] == 0, books
        assert books.of("preemptions", "prefill") == books.of("preemptions", "decode") == 0, books


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tokens_without_preemption(make_model: Callable[[str], Model], topology: str, chunked: bool) -> None:
    model = make_model("llama")
    with deployment_of(model, *TOPOLOGIES[topology], *(CHUNKS if chunked else ())) as deployment:
        first = run_all(deployment, model)
        check_pair(first, preempted=False)
        replay = run_all(deployment, model)
        check_pair(replay, preempted=False)
        # Each prompt's full blocks are somewhere; only tails, and what lies on another engine, are computed.
        assert replay.sources("prefill")["computed"] < first.sources("prefill")["computed"] / 2


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tokens_under_preemption_on_both_sides(make_model: Callable[[str], Model], topology: str) -> None:
    model = make_model("llama")
    with deployment_of(model, *TOPOLOGIES[topology], *PREEMPT_PREFILL, *PREEMPT_DECODE) as deployment:
        for _ in range(2):
            books = run_all(deployment, model)
            check_pair(books, preempted=True)
            assert books.of("preemptions", "prefill") > 0, books
            assert books.of("preemptions", "decode") > 0, books


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tokens_under_preemption_on_decode_with_whole_prefills(
    make_model: Callable[[str], Model], topology: str
) -> None:
    model = make_model("llama")
    with deployment_of(model, *TOPOLOGIES[topology], *PREEMPT_DECODE) as deployment:
        for _ in range(2):
            books = run_all(deployment, model)
            check_pair(books, preempted=True)
            assert books.of("preemptions", "prefill") == 0, books
            assert books.sources("prefill")["recomputed"] == 0, books
            assert books.of("preemptions", "decode") > 0, books


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tokens_of_every_family(make_model: Callable[[str], Model], family: str, topology: str) -> None:
    model = make_model(family)
    preempting = (*PREEMPT_PREFILL, *PREEMPT_DECODE) if topology == "1P1D" else ()
    with deployment_of(model, *TOPOLOGIES[topology], *preempting) as deployment:
        for _ in range(2):
            books = run_all(deployment, model)
            check_pair(books, preempted=bool(preempting))
            if preempting:
                assert books.of("preemptions", "prefill") > 0, books
                assert books.of("preemptions", "decode") > 0, books


def test_tokens_of_aggregated_engines(make_model: Callable[[str], Model]) -> None:
    model = make_model("llama")
    with deployment_of(model, "--prefill", "0", "--decode", "2") as deployment:
        for _ in range(2):
            books = run_all(deployment, model)
            assert books.sources("any")["recomputed"] == books.sources("any")["remote"] == 0
