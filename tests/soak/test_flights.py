"""KV that is damaged on its way is found on its arrival; and the trials would notice if it were not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from flights import MAY_END_WELL, RANKS, WAYS, Way, damages_of, flights

from pdkv.connector_kit.rig.processes import Zygote

NUM_TRIALS = 4  # of each kind of damage; `python -m soak.damage` has a thousand


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("zygote")) as zygote:
        yield zygote


@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("memory pull", (1, 1)),
        ("memory push", (1, 1)),
        ("shared_memory", (2, 1)),
        *(pytest.param("p2p unix", ranks, marks=pytest.mark.slow if ranks != (2, 1) else ()) for ranks in RANKS),
        ("p2p tcp", (1, 1)),
    ],
)
def test_damage_on_the_way_is_found(zygote: Zygote, tmp_path: Path, way: str, ranks: tuple[int, int]) -> None:
    with flights(way, ranks, zygote=zygote, directory=tmp_path, seed=1) as flight:
        for damage in damages_of(WAYS[way]):
            report = flight.run(damage, NUM_TRIALS)
            assert report.violations == []
            assert report.num_trials == NUM_TRIALS
            assert report.num_sound > 0
            assert report.num_found + report.num_right == NUM_TRIALS
            assert report.num_found == NUM_TRIALS or damage in MAY_END_WELL


@pytest.mark.parametrize("damage", ["flip", "swap", "foreign", "lost"])
def test_who_compares_nothing_is_found_out(
    zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    way = Way("credulous:Credulous", {"mode": "push"}, one_process=True)
    monkeypatch.setitem(WAYS, "credulous", way)  # type: ignore[arg-type]
    with flights("credulous", (1, 1), zygote=zygote, directory=tmp_path, seed=1) as flight:
        report = flight.run(damage, NUM_TRIALS)
    assert any("values are wrong" in text for text in report.violations)
    assert not report.found
