"""Which CUDA devices engines get, and how much of their memory."""

from pathlib import Path

import pytest

from pdkv.config import EngineConfig, HandoffConfig
from pdkv.connectors.plan import NO_PLAN
from pdkv.errors import ConfigError
from pdkv.launch import devices as devices_module
from pdkv.launch.devices import keep_devices, place_on_devices
from pdkv.launch.specs import EngineSpec


@pytest.fixture(autouse=True, name="num_devices")
def counted_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count = int(getattr(request, "param", 2))
    monkeypatch.setattr(devices_module, "count_cuda_devices", lambda: count)
    return count


def engine(name: str, device: str = "cuda", **options: object) -> EngineSpec:
    config = EngineConfig(device=device, **options)  # type: ignore[arg-type]
    return EngineSpec(
        name=name,
        role="any",
        epoch="",
        config=config,
        handoff=HandoffConfig(),
        connector=NO_PLAN,
        endpoint="",
        num_engines=1,
    )


def places(specs: list[EngineSpec]) -> dict[str, tuple[str | None, float | None]]:
    return {spec.name: (spec.config.devices, spec.config.gpu_memory_utilization) for spec in specs}


def test_each_rank_has_a_device_to_itself_where_there_are_enough() -> None:
    assert places(place_on_devices([engine("a"), engine("b")])) == {"a": ("0", 0.9), "b": ("1", 0.9)}
    assert places(place_on_devices([engine("a", tp=2)])) == {"a": ("0,1", 0.9)}


def test_engines_that_share_a_device_share_its_memory() -> None:
    placed = places(place_on_devices([engine("a"), engine("b"), engine("c", tp=2)]))
    assert placed == {"a": ("0", 0.45), "b": ("1", 0.45), "c": ("0,1", 0.45)}
    assert places(place_on_devices([engine(n, devices="1") for n in "abc"])) == {
        n: ("1", pytest.approx(0.3)) for n in "abc"
    }


def test_a_share_that_is_given_is_kept_and_the_others_have_the_rest() -> None:
    specs = [engine("a", devices="0", gpu_memory_utilization=0.6), engine("b", devices="0")]
    assert places(place_on_devices(specs)) == {"a": ("0", 0.6), "b": ("0", pytest.approx(0.3))}


def test_engines_on_the_cpu_have_none() -> None:
    assert places(place_on_devices([engine("a", device="cpu")])) == {"a": (None, None)}


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([engine("a", devices="0-2")], "devices: there are 2 CUDA devices, numbered from 0, and no 2"),
        ([engine("a", tp=3)], "a: tp=3 needs 3 CUDA devices, but there are 2"),
        ([engine(n, devices="0", gpu_memory_utilization=0.6) for n in "ab"], "a, b share CUDA device 0, and 120%"),
        ([engine("a", devices="0", gpu_memory_utilization=0.9), engine("b", devices="0")], "leaves nothing to the"),
    ],
)
def test_what_cannot_be_is_refused_by_name(specs: list[EngineSpec], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place_on_devices(specs)


def test_an_engine_that_is_added_goes_where_fewest_are_and_takes_nothing_from_them() -> None:
    running = place_on_devices([engine("a", gpu_memory_utilization=0.5), engine("b"), engine("c", devices="0")])
    assert places(running)["c"] == ("0", pytest.approx(0.4))
    with pytest.raises(ConfigError, match="b, d share CUDA device 1, and 90% of its memory is given away"):
        place_on_devices([engine("d")], running)
    added = place_on_devices([engine("d", gpu_memory_utilization=0.1)], running)
    assert places(added) == {"d": ("1", 0.1)}


def test_an_engine_that_is_started_anew_has_the_devices_that_it_had() -> None:
    before, _ = place_on_devices([engine("a"), engine("b")])
    assert places([keep_devices(engine("a", devices="0,1"), before)]) == {"a": ("0", 0.9)}


@pytest.mark.parametrize(("visible", "count"), [(None, 3), ("", 0), ("-1", 0), ("0,2", 2), ("GPU-1,GPU-2,-1,GPU-3", 2)])
def test_devices_are_counted_without_torch(
    visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdkv.host import cuda_devices

    for number in range(3):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    (tmp_path / "control").touch()
    monkeypatch.setattr(cuda_devices, "_CONTROL", tmp_path / "control")
    monkeypatch.setattr(cuda_devices, "_DEVICES", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda_devices.count_cuda_devices() == count
