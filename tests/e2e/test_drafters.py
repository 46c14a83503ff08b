"""A draft model's KV over hand-offs: decode's drafter computes no prompt, or all of it where the KV is not its own."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lying_drafters
import pytest
from deployments import Running, launches, link_text_model
from equality import (
    CHUNKED,
    SMALL_POOL_BLOCKS,
    SMALL_POOL_TOKENS,
    TOPOLOGIES,
    Workload,
    deployed,
    greedy_workload,
    run_all,
    run_twice,
    run_until_preempted,
)
from kills import check_that_no_client_notices, right_answers
from matrix_rows import BACKENDS
from nixl_rig import needs_nixl

AMPLE = ("--kv-cache-memory", str(64 << 20))
CARRYING = [
    "shared_memory",
    pytest.param("nixl pull", marks=[needs_nixl, pytest.mark.slow]),
    pytest.param("nixl pull ucx", marks=needs_nixl),
    "store tiers",
    pytest.param("store tiers layerwise", marks=pytest.mark.slow),
    pytest.param("multi", marks=pytest.mark.slow),
]
COLD = "the drafter starts cold"


@pytest.fixture(scope="module")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("served"), 14)


@pytest.fixture(scope="module")
def drafter(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of other layers and heads than the served model."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}
    return link_text_model(hf_model("llama", initializer_range=0.2, **shape), tmp_path_factory.mktemp("drafter"))


def guessing(model: Path, role: str = "", method: str = "draft_model") -> tuple[str, ...]:
    config = (f"method={method}", f"model={model}", "num_speculative_tokens=3", "adaptive=false")
    return f"--{role}speculative-config", *config


@contextmanager
def over(backend: str, workload: Workload, folder: Path, *flags: str) -> Iterator[Running]:
    with (
        BACKENDS[backend.removesuffix(" layerwise")](directory=folder) as chosen,
        deployed(
            workload,
            *TOPOLOGIES["1P1D"],
            *CHUNKED,
            *AMPLE,
            *chosen.flags,
            *(("load=layerwise", "layer_groups=2") if backend.endswith("layerwise") else ()),
            *flags,
        ) as deployment,
    ):
        yield deployment


def drafted(deployment: Running, role: str = "decode") -> dict[str, int]:
    """Prompt tokens of the role's drafters by where their KV came from."""
    found = dict[str, int]()
    for line in deployment.get("/metrics").text.splitlines():
        if line.startswith("pdkv_engine_drafter_prompt_tokens_total{") and f'role="{role}"' in line:
            source = line.partition('source="')[2].partition('"')[0]
            found[source] = found.get(source, 0) + int(float(line.split()[-1]))
    return found


def acceptance(deployment: Running) -> float:
    lines = deployment.get("/metrics").text.splitlines()
    accepted, guessed = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:spec_decode_num_{name}_total{{"))
        for name in ("accepted_tokens", "draft_tokens")
    )
    return accepted / guessed


@pytest.mark.parametrize("backend", CARRYING)
def test_equal_drafters(backend: str, workload: Workload, drafter: Path, tmp_path: Path) -> None:
    with over(backend, workload, tmp_path, *guessing(drafter)) as deployment:
        passes = run_twice(deployment, workload)
        assert drafted(deployment) == {"computed": 0, "found": 2 * workload.num_prompt_tokens}
        computed = sum(books.sources("prefill")["computed"] for books in passes)
        assert drafted(deployment, "prefill")["computed"] == computed
        assert COLD not in deployment.log


@pytest.mark.parametrize("backend", ["shared_memory", "store tiers"])
def test_what_arrives_is_what_was_computed(backend: str, workload: Workload, tmp_path: Path) -> None:
    """The model guesses for itself, and is right."""
    with over(backend, workload, tmp_path, *guessing(workload.path)) as deployment:
        run_twice(deployment, workload)
        assert drafted(deployment)["computed"] == 0
        assert acceptance(deployment) > 0.97


@pytest.mark.parametrize(
    ("backend", "who"),
    [
        ("shared_memory", "other"),
        ("shared_memory", "decode"),
        pytest.param("shared_memory", "prefill", marks=pytest.mark.slow),
        pytest.param("nixl pull", "decode", marks=[needs_nixl, pytest.mark.slow]),
        pytest.param("nixl pull ucx", "other", marks=needs_nixl),
        pytest.param("nixl pull ucx", "prefill", marks=[needs_nixl, pytest.mark.slow]),
        pytest.param("store tiers", "other", marks=pytest.mark.slow),
        ("store tiers", "decode"),
        pytest.param("store tiers", "prefill", marks=pytest.mark.slow),
        pytest.param("p2p", "other", marks=pytest.mark.slow),
    ],
)
def test_unequal_drafters(backend: str, who: str, workload: Workload, drafter: Path, tmp_path: Path) -> None:
    flags: tuple[str, ...] = guessing(drafter, "decode-") if who != "prefill" else ()
    flags += guessing(workload.path, "prefill-") if who != "decode" else ()
    with over(backend, workload, tmp_path, *flags) as deployment:
        run_twice(deployment, workload)
        assert drafted(deployment, "prefill").get("computed", 0) == 0  # it would be for no engine
        counts = drafted(deployment)
        assert counts["found"] == 0
        assert (counts["computed"] > 0) == (who != "prefill")
        assert deployment.log.count(COLD) == (who != "prefill")


def test_a_connector_that_carries_none(workload: Workload, drafter: Path, tmp_path: Path) -> None:
    with over("p2p", workload, tmp_path, *guessing(drafter)) as deployment:
        run_twice(deployment, workload)
        assert drafted(deployment)["found"] == drafted(deployment, "prefill")["computed"] == 0
        assert deployment.log.count(COLD) == 1


def test_after_a_preemption(workload: Workload, drafter: Path, tmp_path: Path) -> None:
    room = SMALL_POOL_BLOCKS * workload.block_bytes * 5 // 3  # three layers, and two for the drafter
    small = ("--decode-kv-cache-memory", str(room), "--decode-max-model-len", SMALL_POOL_TOKENS)
    with over("shared_memory", workload, tmp_path, *guessing(drafter), *small) as deployment:
        num_passes = run_until_preempted(deployment, workload, "decode")
        assert drafted(deployment)["found"] > num_passes * workload.num_prompt_tokens


def test_a_hit_without_it_is_taken(workload: Workload, drafter: Path, tmp_path: Path) -> None:
    """Prompts that engines without a drafter have stored."""
    with over("store tiers", workload, tmp_path) as deployment:
        run_all(deployment, workload)
    with over("store tiers", workload, tmp_path, *guessing(drafter)) as deployment:
        first = run_all(deployment, workload)
        assert first.sources("prefill")["store"] > workload.num_prompt_tokens / 2
        assert first.sources("decode")["computed"] == 0
        assert drafted(deployment)["computed"] > 0
        assert drafted(deployment)["found"] + drafted(deployment)["computed"] <= workload.num_prompt_tokens


def test_damaged_values_of_it_are_no_misses(workload: Workload, drafter: Path, tmp_path: Path) -> None:
    """In a file store's files: the drafter's parts are the smaller ones."""
    backend = ("--connector", "store", "--connector-config", f"url=file://{tmp_path}/kv")
    flags = (*TOPOLOGIES["1P1D"], *CHUNKED, *AMPLE, *backend, *guessing(drafter))
    with deployed(workload, *flags) as deployment:
        run_all(deployment, workload)
        before = drafted(deployment)
        assert before["computed"] == 0
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    sizes = sorted({path.stat().st_size for path in files if path.stat().st_size > 4096})
    assert len(sizes) == 2, sizes
    for path in files:
        if path.stat().st_size == sizes[0]:
            path.write_bytes(bytes(sizes[0]))
    with deployed(workload, *flags) as deployment:
        later = run_all(deployment, workload)
        assert later.sources("prefill")["store"] > workload.num_prompt_tokens / 2
        assert later.sources("decode")["computed"] == 0


def test_engines_that_hand_nothing_off_have_no_room_for_it(workload: Workload, drafter: Path) -> None:
    sizes = []
    for flags in (("--prefill", "0", "--decode", "1"), TOPOLOGIES["1P1D"]):
        with deployed(workload, *flags, *CHUNKED, *guessing(drafter)) as deployment:
            layout = deployment.get("/topology").json()["engines"][0]["kv_layout"]
            assert layout["layers"] == 3
            sizes.append(layout["block_bytes"])
    assert sizes == [workload.block_bytes, workload.block_bytes * 5 // 3]


@pytest.mark.parametrize("lie", ["Noise", "NaN"])
def test_a_peer_that_lies(lie: str, workload: Workload, tmp_path: Path) -> None:
    """It names the drafter, and sends what that has not computed."""
    shutil.copy(lying_drafters.__file__, tmp_path)
    lying = guessing(workload.path, "prefill-", f"lying_drafters:{lie}")
    flags = (*TOPOLOGIES["1P1D"], *CHUNKED, *AMPLE, *guessing(workload.path, "decode-"), *lying)
    with launches(workload.path) as launch:
        deployment = launch(*flags, environment={"PYTHONPATH": str(tmp_path)})
        run_twice(deployment, workload)
        assert drafted(deployment) == {"computed": 0, "found": 2 * workload.num_prompt_tokens}
        assert acceptance(deployment) < 0.9


@pytest.mark.slow
def test_a_killed_decode_engine(workload: Workload, drafter: Path) -> None:
    flags = (*TOPOLOGIES["2P2D"], *CHUNKED, *AMPLE, *guessing(drafter))
    with deployed(workload, *flags) as deployment:
        check_that_no_client_notices(deployment, right_answers(deployment), "decode-0")
        assert drafted(deployment)["found"] > 0
