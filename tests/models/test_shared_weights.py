"""Weights that the engines of a host share: laid out once, and never half, changed or another's."""

import fcntl
import json
import logging
import mmap
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from other_weights import merge_adapter, rewrite
from warm import PYTHON, WarmPopen

from pdkv.host.held_file import HeldFile
from pdkv.host.huge_pages import can_share_huge_pages
from pdkv.kernels import linear
from pdkv.models import linear as linears
from pdkv.models import shared_weights
from pdkv.models.config import load_model_config
from pdkv.models.decoder import Decoder
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import TensorParallel
from pdkv.models.shard import Shard
from pdkv.models.shared_weights import shared_in
from pdkv.models.weight_files import WeightFile

pytestmark = [
    pytest.mark.skipif(not linear.available(), reason="no compiler when pdkv was installed"),
    pytest.mark.skipif(not can_share_huge_pages(), reason="the kernel gives memfds no huge pages"),
]

CHILD = """
import os, signal, sys
from pathlib import Path
import torch
from pdkv.kernels import linear
from pdkv.models.config import load_model_config
from pdkv.models.loader import load_decoder
from pdkv.models.shared_weights import shared_in
from pdkv.models.weight_files import WeightFile

WeightFile.is_settled = True  # the tests do not wait until files are old enough
path, directory, stops_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
library, packed = linear._library(), []

class Counted:
    def __getattr__(self, name):
        if name == "pdkv_linear_pack":
            packed.append(name)
            if len(packed) == stops_at:
                print("stopped", flush=True)
                sys.stdin.readline()
        return getattr(library, name)

counted = Counted()
linear._library = lambda: counted
shared_in.set([directory])
decoder = load_decoder(
    path, load_model_config(path), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64
)
print(len(packed), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model(hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that a test may change. The tests do not wait until its files are old enough."""
    monkeypatch.setattr(WeightFile, "is_settled", True)
    return Path(shutil.copytree(hf_model("llama", tie_word_embeddings=False), tmp_path / "model"))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where this process shares weights."""
    token = shared_in.set([tmp_path / "weights"])
    yield tmp_path / "weights"
    shared_in.reset(token)


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets an entry for each tensor that this process lays out or copies."""
    found: list[str] = []
    library = linear._library()

    class Counted:
        def __getattr__(self, name: str) -> object:
            if name == "pdkv_linear_pack":
                found.append(name)
            return getattr(library, name)

    counted = Counted()
    monkeypatch.setattr(linear, "_library", lambda: counted)
    return found


def load(path: Path, dtype: torch.dtype = torch.float32, shard: Shard | None = None, how: str | None = None) -> Decoder:
    config = load_model_config(path).quantized_at_load("int8" if how else None, path)
    parallel = TensorParallel() if shard is None else OneRank(shard)
    return load_decoder(path, config, dtype=dtype, device=torch.device("cpu"), max_model_len=64, parallel=parallel)


FAMILIES = ("llama", "qwen2", "deepseek_v3", "qwen3_moe", "gemma2")
"""Untied, tied or with biases, latent, of experts, tied."""


class OneRank(TensorParallel):
    """A rank that loads, and exchanges nothing."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard


def weights_of(decoder: Decoder) -> list[bytes]:
    """The bytes of all packed weights and tables that the decoder refers to."""
    found, seen, waiting = [], set[int](), [decoder]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, (str, int, float, type(None))):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found.append(each.contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(each, (list, tuple)):
            waiting += each
        elif type(each).__module__.startswith("pdkv"):
            waiting += [value for name, value in sorted(vars(each).items())]
    return found


def addresses(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.memfd"))


@pytest.mark.parametrize(
    ("family", "how"),
    [
        *((family, "") for family in FAMILIES),
        *(pytest.param(f, "int8", marks=() if f in ("llama", "qwen3_moe") else pytest.mark.slow) for f in FAMILIES),
    ],
)
def test_the_second_maps_all_and_lays_nothing_out(
    family: str, how: str, hf_model: Callable[..., Path], directory: Path, packs: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(WeightFile, "is_settled", True)
    path = hf_model(family)
    token = shared_in.set(())
    own = load(path, how=how)
    shared_in.reset(token)
    num_packed = len(packs)
    first = load(path, how=how)
    assert len(packs) == 2 * num_packed > 0
    second = load(path, how=how)
    assert len(packs) == 2 * num_packed
    assert weights_of(first) == weights_of(own) == weights_of(second)
    assert len(addresses(directory)) == 2
    del first
    assert len(addresses(directory)) == 1, "the memfd is given back with the weights"
    third = load(path, how=how)
    assert len(packs) == 2 * num_packed
    assert weights_of(third) == weights_of(own)
    del second, third
    assert not addresses(directory)


def test_what_differs_is_not_shared(
    model: Path, directory: Path, packs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "flags", frozenset)  # without AMX, where oneDNN multiplies bfloat16
    kinds: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16}, {"how": "int8"}]
    kinds += [{"shard": Shard(rank, 2)} for rank in range(2)]
    held = []
    for kind in kinds:
        before = len(packs)
        held.append(load(model, **kind))
        assert len(packs) > before + 10, kind
    original = weights_of(held[0])
    rewrite(model, merge_adapter)
    changed = load(model)
    assert weights_of(changed) != original == weights_of(held[0])
    shared_in.set(())
    assert weights_of(load(model)) == weights_of(changed)


def test_files_that_may_change_unseen_are_not_shared(
    hf_model: Callable[..., Path], tmp_path: Path, directory: Path
) -> None:
    """A second change within a tick of the file system's clock would not show."""
    young = Path(shutil.copytree(hf_model("llama"), tmp_path / "young", copy_function=shutil.copy))
    load(young)
    assert not directory.exists()


def test_a_file_that_changes_in_the_middle_leaves_nothing(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = linear.pack

    def pack(parts: list[torch.Tensor]) -> torch.Tensor:
        os.utime(model / "model.safetensors")
        return real(parts)

    monkeypatch.setattr(linear, "pack", pack)
    with pytest.raises(Exception, match="was changed while it was read"):
        load(model)
    assert not addresses(directory)


def test_shared_weights_cannot_be_written(model: Path, directory: Path) -> None:
    def maps() -> list[str]:
        return [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if "pdkv-weights" in line]

    decoders = [load(model)]
    assert maps() == ["r--s"], "of the process that laid them out"
    decoders.append(load(model))
    assert maps() == ["r--s"] * 2
    for path in addresses(directory):
        fd = msgspec.json.decode(path.read_bytes(), type=HeldFile).open(os.O_RDWR)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & shared_weights._SEALS == shared_weights._SEALS
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        os.close(fd)
    del decoders
    assert not maps()


@pytest.fixture
def child(model: Path, tmp_path: Path) -> Iterator[Callable[[int], "subprocess.Popen[str]"]]:
    """child(n) starts a process that shares the model, and stops before it lays out weight number n."""
    running: list[subprocess.Popen[str]] = []

    def start(stops_at: int) -> "subprocess.Popen[str]":
        command = [*PYTHON, "-c", CHILD, str(model), str(tmp_path / "weights"), str(stops_at)]
        running.append(WarmPopen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_other_processes_map_them_even_after_the_first_is_gone(
    model: Path, child: Callable[[int], "subprocess.Popen[str]"], directory: Path, packs: list[str]
) -> None:
    first = child(0)
    assert int(said(first)) > 0
    second = child(0)
    assert int(said(second)) == 0
    first.kill()
    first.wait()
    decoder = load(model)
    assert not packs
    second.kill()
    second.wait()
    token = shared_in.set(())
    assert weights_of(decoder) == weights_of(load(model)), "mapped memory outlives who laid it out"
    shared_in.reset(token)


def test_who_is_killed_while_it_lays_out_is_followed_by_the_next(
    model: Path, child: Callable[[int], "subprocess.Popen[str]"], directory: Path, packs: list[str]
) -> None:
    first = child(3)
    assert said(first) == "stopped"
    second = child(0)  # waits for it
    assert not addresses(directory)
    first.kill()
    first.wait()
    assert int(said(second)) > 3
    decoder = load(model)
    assert not packs
    token = shared_in.set(())
    assert weights_of(decoder) == weights_of(load(model))
    shared_in.reset(token)


def test_who_takes_too_long_is_not_waited_for(
    model: Path, child: Callable[[int], "subprocess.Popen[str]"], directory: Path, packs: list[str],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    first = child(3)
    assert said(first) == "stopped"
    monkeypatch.setattr(shared_weights, "_WAIT_BASE_S", 0.05)
    own = load(model)
    assert "takes too long" in caplog.text
    assert packs
    assert not addresses(directory)
    assert first.stdin is not None
    print(file=first.stdin, flush=True)
    assert int(said(first)) > 3
    shared = load(model)
    assert weights_of(shared) == weights_of(own)
    assert len(addresses(directory)) == 2


@pytest.mark.parametrize("limit", [0, 2 << 20], ids=["none", "one huge page"])
def test_without_room_weights_are_private(
    limit: int, hf_model: Callable[..., Path], directory: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """No file may grow beyond a limit: the kernel refuses what is asked for in advance, as without memory."""
    monkeypatch.setattr(WeightFile, "is_settled", True)
    path = hf_model("llama", vocab_size=8192, tie_word_embeddings=False)
    token = shared_in.set(())
    own = load(path)
    shared_in.reset(token)
    directory.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        decoder = load(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "weights are not shared: File too large" in caplog.text
    assert weights_of(decoder) == weights_of(own)
    assert not addresses(directory)


@pytest.mark.parametrize("damage", ["cut", "noise", "unsealed", "short", "gone", "no memfd", "negative", "padded"])
def test_what_cannot_be_trusted_is_not_used(
    damage: str, model: Path, directory: Path, packs: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    decoder = load(model)
    (path,) = addresses(directory)
    address = json.loads(path.read_bytes())
    memfd = os.memfd_create("pdkv-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "noise":
        path.write_bytes(os.urandom(200))
    elif damage == "gone":
        path.write_text(json.dumps(address | {"start_time": address["start_time"] + 1}))
    elif damage == "no memfd":
        path.write_text(json.dumps(address | {"fd": 0}))
    elif damage in ("negative", "padded"):  # sizes that fit only added up without a look at each
        more = [-1] if damage == "negative" else [1] * (os.fstat(address["fd"]).st_size // 64)
        path.write_text(json.dumps(address | {"sizes": address["sizes"] + more}))
    else:
        os.ftruncate(memfd, sum(address["sizes"]) * (2 if damage == "unsealed" else 1) // 2 * 2 - 4096)
        if damage == "short":
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, shared_weights._SEALS)
        path.write_text(json.dumps(address | {"fd": memfd, "inode": os.fstat(memfd).st_ino}))
    num_packed = len(packs)
    own = load(model)
    os.close(memfd)
    assert len(packs) == 2 * num_packed
    assert weights_of(own) == weights_of(decoder)
    is_gone = damage in ("gone", "no memfd")
    assert path.exists() != is_gone, "the address of what is gone is removed"
    assert ("are not used" in caplog.text) != is_gone
