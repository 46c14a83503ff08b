"""Seeded sampling gives the tokens of an independent float64 draw over transformers' logits, on any topology (F3)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deployments import Running
from equality import (
    AGGREGATED,
    CHUNKED,
    NUM_OUTPUT,
    PREEMPTING,
    SMALL_DECODE_POOL,
    TOPOLOGIES,
    Workload,
    check_decode_computed_nothing,
    check_undisturbed,
    deployed,
    run_all,
    run_until_preempted,
    until_preempted,
)
from oracle import greedy, oracle
from prompt_set import forty_prompts
from reference_sampler import SeededChooser, threefry4x32_13
from serving_checks import Books, complete_all, serve_directory
from small_models import FEATURES

CHOOSERS = (
    SeededChooser(seed=1),
    SeededChooser(seed=-7, temperature=0.8, top_p=0.9),
    SeededChooser(seed=2**63 - 1, temperature=1.3, top_k=20),
    SeededChooser(seed=2**40 + 5, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3),
    SeededChooser(
        seed=99,
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=-0.4,
        logit_bias={10: 2.5, 11: -3.0},
    ),
)


@pytest.fixture(scope="module")
def model_dir(hf_model: Callable[..., Path]) -> Path:
    return hf_model("qwen3", initializer_range=0.2, **FEATURES["qwen3"])


@pytest.fixture(scope="module")
def workload(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    path = serve_directory(model_dir, tmp_path_factory.mktemp("seeded"))
    bodies = [*(chooser.body() for chooser in CHOOSERS), {"temperature": 0}]
    return Workload(path, forty_prompts(model_dir, NUM_OUTPUT, (*CHOOSERS, greedy)), bodies)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(AGGREGATED, id="aggregated", marks=pytest.mark.slow),
        pytest.param((*TOPOLOGIES["1P1D"], *CHUNKED), id="1P1D-chunked", marks=pytest.mark.slow),
        pytest.param((*TOPOLOGIES["2P4D"], *CHUNKED), id="2P4D-chunked", marks=pytest.mark.slow),
    ],
)
def deployment(request: pytest.FixtureRequest, workload: Workload) -> Iterator[Running]:
    with deployed(workload, *request.param) as running:
        yield running


def test_the_references_threefry_gives_the_published_answers() -> None:
    """Random123's known answers for threefry4x32, 13 rounds."""
    pi = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344
    zeros, ones, more = (0,) * 4, (0xFFFFFFFF,) * 4, (0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89)
    assert threefry4x32_13(zeros, zeros) == (0x531C7E4F, 0x39491EE5, 0x2C855A92, 0x3D6ABF9A)
    assert threefry4x32_13(ones, ones) == (0xC4189358, 0x1C9CC83A, 0xD5881C67, 0x6A0A89E0)
    assert threefry4x32_13(pi, more) == (0x4AA71D8F, 0x734738C2, 0x431FC6A8, 0xAE6DEBF1)


def test_seeded_tokens(deployment: Running, workload: Workload) -> None:
    first, replay = (run_all(deployment, workload) for _ in range(2))
    for books in (first, replay):
        check_undisturbed(books)
        if "decode" in books.roles:
            check_decode_computed_nothing(books)
    # Each prompt's full blocks are in some cache now.
    assert computed(replay) < computed(first) / 2


def computed(books: Books) -> int:
    """Prompt tokens that no cache had."""
    return sum(books.sources(role)["computed"] for role in books.roles)


@pytest.mark.parametrize(
    "flags",
    [pytest.param(AGGREGATED, id="aggregated", marks=pytest.mark.slow), pytest.param(TOPOLOGIES["2P1D"], id="2P1D")],
)
def test_seeded_tokens_under_preemption(workload: Workload, model_dir: Path, flags: tuple[str, ...]) -> None:
    aggregated = flags == AGGREGATED
    with deployed(workload, *flags, *(SMALL_DECODE_POOL if aggregated else PREEMPTING)) as deployment:
        if aggregated:
            until_preempted(lambda: run_all(deployment, workload), "any")
        else:
            run_until_preempted(deployment, workload)
        check_choices(deployment, workload, model_dir)


def test_each_choice_draws_by_its_own_number(deployment: Running, workload: Workload, model_dir: Path) -> None:
    check_choices(deployment, workload, model_dir)


def check_choices(deployment: Running, workload: Workload, model_dir: Path) -> None:
    """Four choices of one prompt, each of which must be clear."""
    chooser = CHOOSERS[1]
    model = oracle(model_dir)
    prompt = next(
        e.prompt for e in workload.expected
        if all(model.generate(e.prompt, 12, replace(chooser, choice=i)) is not None for i in range(4))
    )  # fmt: skip
    expected = [model.generate(prompt, 12, replace(chooser, choice=i)) for i in range(4)]
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "n": 4, **chooser.body()}
    [reply] = complete_all(deployment, [body])
    assert [choice["token_ids"] for choice in reply["choices"]] == expected
    assert len(set(map(tuple, expected))) == 4  # type: ignore[arg-type]
