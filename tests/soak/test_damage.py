"""The fuzzer of stored values: no token is wrong, every damaged value that is read is counted; and it would notice."""

from collections.abc import Callable
from pathlib import Path

import pytest
from damage_subjects import KINDS
from soak.damage import DamageReport, foreign_model, fuzz

from pdkv.connectors.store.envelope import Check

NUM_MUTATIONS = 16  # of each kind of store
HERE = ("memory://", "redis", "tiers", "memory")
"""Every damage to a value of every kind is in `tests/connectors/store/test_damage.py`, and in `make matrix` here."""

Fuzz = Callable[..., DamageReport]


@pytest.fixture(scope="module")
def models(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model = hf_model("llama", initializer_range=0.2)
    return model, foreign_model(model, tmp_path_factory.mktemp("foreign") / "model")


@pytest.fixture
def run(models: tuple[Path, Path], tmp_path: Path) -> Fuzz:
    def fuzz_kind(kind: str, num_mutations: int = NUM_MUTATIONS) -> DamageReport:
        return fuzz(kind, num_mutations, model=models[0], foreign=models[1], directory=tmp_path, seed=1)

    return fuzz_kind


@pytest.mark.parametrize("kind", [k if k in HERE else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_no_damaged_value_makes_a_token_wrong_or_stays_uncounted(run: Fuzz, kind: str) -> None:
    """Attack 2, B9."""
    report = run(kind)
    assert report.violations == []
    assert report.num_counted == report.num_read >= NUM_MUTATIONS
    assert report.num_sound > 0
    assert len(report.applied) >= 5


def test_a_connector_that_believes_its_store_is_found_out(run: Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Check, "is_whole", lambda self: True)
    report = run("memory://")
    assert any(" wrong in " in text for text in report.violations)
    assert any("damaged values read" in text for text in report.violations)
