"""The identity of a model: it differs for whatever changes KV, and for nothing else."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deployments import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from other_weights import CHANGES, WEIGHTS, Change, rewrite
from safetensors.torch import load_file, save_file

from pdkv.errors import ModelError
from pdkv.models import identity as module
from pdkv.models.config import load_model_config
from pdkv.models.identity import NEUTRAL_FIELDS, ModelSource, model_identity
from pdkv.models.loader import load_decoder
from pdkv.models.weight_files import INDEX_NAME, WeightFile
from tests.conftest import HFModel


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def edit_config(path: Path, **changes: Any) -> None:
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, **changes}))


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_of_the_same_shapes(model_dir: Path, change: Change) -> None:
    before = model_identity(model_dir)
    rewrite(model_dir, change)
    assert model_identity(model_dir) != before


@pytest.fixture(scope="module")
def flipped(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """A copy, its identity, and where its tensors begin."""
    path = Path(shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("flipped") / "model"))
    file = WeightFile(path / WEIGHTS)
    file.close()
    return path, model_identity(path), file.tensors[0].begin


@settings(max_examples=60)
@given(st.data())
def test_any_flipped_bit(flipped: tuple[Path, str, int], data: st.DataObject) -> None:
    path, identity, begin = flipped
    size = (path / WEIGHTS).stat().st_size
    offset = data.draw(st.integers(begin, size - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    with (path / WEIGHTS).open("r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ bit]), offset)
        assert model_identity(path) != identity
        os.pwrite(file.fileno(), bytes([byte]), offset)
    assert model_identity(path) == identity


def test_tensors_that_take_many_reads_have_the_same_digest(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    before = model_identity(model_dir)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1000)
    assert model_identity(model_dir) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 9999.0}, {"rms_norm_eps": 1e-3}, {"num_attention_heads": 8}, {"torch_dtype": "float16"},
        {"max_position_embeddings": 512}, {"eos_token_id": 5}, {"a_field_of_next_year": True},
    ],
)  # fmt: skip
def test_fields_of_the_configuration_count_unknown_ones_too(model_dir: Path, changes: dict[str, Any]) -> None:
    before = model_identity(model_dir)
    edit_config(model_dir, **changes)
    assert model_identity(model_dir) != before


def test_names_in_the_configuration_do_not_count(model_dir: Path) -> None:
    before = model_identity(model_dir)
    edit_config(model_dir, **dict.fromkeys(NEUTRAL_FIELDS, "another"))
    assert model_identity(model_dir) == before


def test_end_tokens_count_whichever_file_names_them(model_dir: Path) -> None:
    write_tokenizer(model_dir)
    identities = {model_identity(model_dir, load_model_config(model_dir))}
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    identities.add(model_identity(model_dir, load_model_config(model_dir)))
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    identities.add(model_identity(model_dir, load_model_config(model_dir)))
    assert len(identities) == 3


def test_the_format_of_kv_counts(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_identity(model_dir)
    monkeypatch.setattr(module, "KV_FORMAT_VERSION", module.KV_FORMAT_VERSION + 1)
    assert model_identity(model_dir) != before


def test_a_tensor_under_another_name_is_another_one(model_dir: Path) -> None:
    before = model_identity(model_dir)
    tensors = load_file(model_dir / WEIGHTS)
    one, two = (f"model.layers.{i}.input_layernorm.weight" for i in (0, 1))
    tensors[one], tensors[two] = tensors[two], tensors[one]
    save_file(tensors, model_dir / WEIGHTS, metadata={"format": "pt"})
    assert model_identity(model_dir) != before


def test_the_same_bytes_in_another_shape_or_dtype_are_another_tensor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    identities = set()
    values = torch.arange(12, dtype=torch.int16)
    for tensor in (values, values.reshape(3, 4), values.reshape(4, 3), values.view(torch.bfloat16)):
        save_file({"x": tensor}, tmp_path / WEIGHTS)
        identities.add(model_identity(tmp_path))
    assert len(identities) == 4


def test_copies_and_other_divisions_into_files_are_the_same_model(
    hf_model: HFModel, tiny_model_dir: Path, model_dir: Path
) -> None:
    before = model_identity(tiny_model_dir)
    assert model_identity(model_dir) == before
    sharded = hf_model("llama", max_shard_size="100KB")
    assert (sharded / INDEX_NAME).exists()
    assert model_identity(sharded) == before


def split_in_two(path: Path) -> None:
    """Two files that both have the head, with other values; the index says which one is read."""
    tensors = load_file(path / WEIGHTS)
    other = {**tensors, "lm_head.weight": tensors["lm_head.weight"] * 2}
    save_file(other, path / "b.safetensors", metadata={"format": "pt"})
    (path / WEIGHTS).rename(path / "a.safetensors")
    write_index(path, dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"})


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_an_index_that_names_another_file_is_another_model_and_is_followed(model_dir: Path) -> None:
    def logits() -> torch.Tensor:
        config = load_model_config(model_dir)
        decoder = load_decoder(model_dir, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
        return decoder.logits(torch.linspace(-1, 1, config.hidden_size)[None])

    split_in_two(model_dir)
    before, logits_before = model_identity(model_dir), logits()
    weight_map = json.loads((model_dir / INDEX_NAME).read_text())["weight_map"]
    write_index(model_dir, weight_map | {"lm_head.weight": "b.safetensors"})
    assert model_identity(model_dir) != before
    assert not torch.equal(logits(), logits_before)


def test_an_index_that_lies_is_an_error_that_names_it(model_dir: Path) -> None:
    split_in_two(model_dir)
    write_index(model_dir, {"nowhere": "a.safetensors"})
    with pytest.raises(ModelError, match=r"index\.json.*nowhere.*a\.safetensors"):
        model_identity(model_dir)


def test_it_is_the_same_in_another_process_without_torch(tiny_model_dir: Path) -> None:
    code = "import sys; from pathlib import Path; from pdkv.models.identity import model_identity\n"
    code += "print(model_identity(Path(sys.argv[1]))); assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-P", "-c", code, str(tiny_model_dir)], capture_output=True, text=True)
    assert run.stdout.strip() == model_identity(tiny_model_dir), run.stderr


# --- files that change, or are none -------------------------------------------------------------------------------


def replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy(path, other)
    other.replace(path)


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\1", path.stat().st_size - 1)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [(replace, "replaced"), (write_in_place, "changed"), (cut, "truncated|changed"), (Path.unlink, "removed")],
)
def test_a_file_that_changes_while_it_is_read_is_an_error_that_names_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], message: str
) -> None:
    """Once while the digests are taken, once between them and the end of the load."""
    began, changed = threading.Event(), threading.Event()
    read = ModelSource._read_digests

    def read_later(self: ModelSource, file: WeightFile) -> list[bytes]:
        began.set()
        assert changed.wait(20)
        return read(self, file)

    original = (model_dir / WEIGHTS).read_bytes()
    for when in ("meanwhile", "afterwards"):
        changed.clear() if when == "meanwhile" else changed.set()
        monkeypatch.setattr(ModelSource, "_read_digests", read_later)
        with ModelSource(model_dir) as source:
            if when == "meanwhile":
                assert began.wait(20)
            else:
                source.identity()
            change(model_dir / WEIGHTS)
            changed.set()
            with pytest.raises(ModelError, match=rf"{WEIGHTS}.*({message})"):
                source.identity()
        (model_dir / WEIGHTS).write_bytes(original)


def test_a_load_that_is_given_up_ends_the_reading(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()
    digest = ModelSource._digest

    def digest_late(self: ModelSource, *arguments: Any) -> bytes:
        began.set()
        assert self._thread.stopping.wait(20)
        return digest(self, *arguments)

    monkeypatch.setattr(ModelSource, "_digest", digest_late)
    source = ModelSource(model_dir)
    assert began.wait(20)
    source.close()
    assert not source._thread.is_alive
    assert source.files.files[0].fd == -1


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


U8 = {"dtype": "U8", "shape": [4]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header should have 0 bytes"),
        (b"not weights", "header should have"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "header should have"),
        (header() + b"x", "end at byte"),
        ((3).to_bytes(8, "little") + b"[1]", "broken"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "broken"),
        (header(a=U8 | {"data_offsets": [0, 4]}), "end at byte"),
        (header(a=U8 | {"data_offsets": [1, 5]}) + b"12345", "begins at"),
        (header(a=U8 | {"data_offsets": [0, 4]}, b=U8 | {"data_offsets": [2, 6]}) + b"123456", "begins at"),
        (header(a=U8 | {"data_offsets": [4, 0]}) + b"1234", "broken"),
        (header(a=U8 | {"data_offsets": [0, -4]}), "broken"),
        (header(a=U8 | {"data_offsets": [0, 4], "shape": [10**18] * 200_000}) + b"1234", "broken"),
        (header(a={"dtype": "U8", "shape": [1e3], "data_offsets": [0, 4]}) + b"1234", "broken"),
        (header(a={"dtype": 8, "shape": [4], "data_offsets": [0, 4]}) + b"1234", "broken"),
        (header(a="U8"), "broken"),
    ],
)
def test_what_is_no_safetensors_file_is_an_error_that_names_it(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(ModelError, match=rf"{WEIGHTS}.*{message}"):
        model_identity(tmp_path)


def test_a_tensor_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    entry = '"a": {"dtype": "U8", "shape": [4], "data_offsets": [%d, %d]}'
    text = ("{" + entry % (0, 4) + "," + entry % (4, 8) + "}").encode()
    (tmp_path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + b"12345678")
    with pytest.raises(ModelError, match="twice"):
        model_identity(tmp_path)


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=rf"{WEIGHTS}.*regular"):
        model_identity(tmp_path)


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="safetensors"):
        model_identity(tmp_path)
