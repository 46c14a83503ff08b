"""Fitted curves: what a known engine's times come to."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pdkv.simulate.fit import NUM_TOKENS, Times, as_toml, fit, solve
from pdkv.testing.paced import read_profile

H100 = read_profile(Path("paced:h100"))
OWN = replace(
    H100,
    step_s=0.004,
    row_s=1e-4,
    prompt_token_s=2e-4,
    context_token_s=1e-6,
    transfer_s=0.002,
    request_s=0.003,
    prompt_s=0.002,
)


def ask(prompts: Sequence[list[int]], num_tokens: int) -> Times:
    """An engine with the profile OWN."""
    count, length = len(prompts), len(prompts[0])
    step_s = OWN.seconds(count, 0, round(count * (length + num_tokens / 2)))
    first_s = OWN.request_s + OWN.prompt_s + OWN.seconds(0, length, length)
    last_s = first_s + (count > 1) * OWN.seconds(0, 0, 0) + (count - 1) * (OWN.prompt_s + length * OWN.prompt_token_s)
    return Times(first_s, last_s, step_s + OWN.transfer_s + length * OWN.transfer_token_s, step_s)


def test_a_fit_finds_the_curves_of_a_known_engine(tmp_path: Path) -> None:
    found = fit(ask, H100)
    for name in (
        "step_s",
        "row_s",
        "prompt_token_s",
        "context_token_s",
        "transfer_s",
        "transfer_token_s",
        "request_s",
        "prompt_s",
    ):
        assert getattr(found.profile, name) == pytest.approx(getattr(OWN, name), rel=0.02), name
    path = tmp_path / "own.toml"
    path.write_text("\n".join(as_toml(found, "a test")) + "\n")
    assert tomllib.loads(path.read_text())["kv_tokens"] == H100.kv_tokens
    assert read_profile(Path(f"paced:{path}")).step_s == pytest.approx(0.004, rel=0.02)


def test_a_fit_does_not_ask_for_more_than_the_engine_takes() -> None:
    lengths: list[int] = []

    def short(prompts: Sequence[list[int]], num_tokens: int) -> Times:
        lengths.extend(map(len, prompts))
        return ask(prompts, num_tokens)

    fit(short, replace(H100, max_model_len=600))
    assert max(lengths) <= 600 - NUM_TOKENS


def test_no_coefficient_is_negative() -> None:
    (constant, slope), errors = solve([((1.0, x), 5.0 - x) for x in (1.0, 2.0, 3.0)])
    assert slope == 0.0
    assert constant > 0
    assert len(errors) == 3
