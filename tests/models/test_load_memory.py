"""A load holds its weights once, and beside them no more than the layer that is being laid out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from pdkv.kernels.linear import available

CHILD = """
import json, sys
from pathlib import Path
import torch
from pdkv.engine.worker.host_memory import keep_freed_memory
from pdkv.host.malloc import give_back_freed
from pdkv.models import loader
from pdkv.models.config import load_model_config

torch.set_num_threads(1)
keep_freed_memory()  # as engines do
most = 0

def own_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10

def make_linear(*weight, make=loader.make_linear):
    global most
    layer = make(*weight)
    most = max(most, own_bytes())
    return layer

loader.make_linear = make_linear
path, found = Path(sys.argv[1]), {}
for dtype in ("float32", "bfloat16"):
    give_back_freed()
    before, most = own_bytes(), 0
    decoder = loader.load_decoder(
        path, load_model_config(path), dtype=getattr(torch, dtype), device=torch.device("cpu"), max_model_len=64
    )
    found[dtype] = most - before, own_bytes() - before
    del decoder
print(json.dumps(found))
"""
HIDDEN, NEURONS, LAYERS, VOCABULARY = 512, 1536, 6, 512
WEIGHTS = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * NEURONS) + 2 * VOCABULARY * HIDDEN
LARGEST = 2 * HIDDEN * NEURONS
SLACK = 6 << 20  # of it, 2 MiB are a huge page that is begun


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 M parameters, none of which is of bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=NEURONS, num_hidden_layers=LAYERS, vocab_size=VOCABULARY,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path


@pytest.mark.skipif(not available(), reason="no compiler when pdkv was installed")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc says how much memory a process has")
def test_packing_does_not_hold_the_weights_twice(model: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", CHILD, str(model)], check=True, capture_output=True, timeout=120.0)
    found: dict[str, tuple[int, int]] = json.loads(ran.stdout)
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        most_taken, taken = found[dtype]  # of the process's own memory, during the load and after it
        weights = WEIGHTS * itemsize
        most = weights + 2 * LARGEST * itemsize + SLACK  # a layer's parts put together, and on their way into the dtype
        assert weights * 0.9 < most_taken < most
        assert weights * 0.9 < taken < weights + SLACK
        assert most < 1.5 * weights, "the bound says something"


TO_A_DEVICE = """
import json, sys
from pathlib import Path
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from pdkv.models.config import load_model_config
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import TensorParallel
from pdkv.models.shard import Shard

class Watch(TorchDispatchMode):
    most = 0

    def __init__(self):
        super().__init__()
        self.alive = {}

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        found = op(*arguments, **(options or {}))
        for leaf in tree_leaves((arguments, options, found)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.alive[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        self.most = max(self.most, self.held())
        return found

    def held(self):
        self.alive = {storage: size for storage, size in self.alive.items() if not storage.expired()}
        return sum(self.alive.values())

path, device = Path(sys.argv[1]), torch.device(sys.argv[2])
one, found = TensorParallel(), []
for ranks in (1, 2):
    one.shard = Shard(ranks - 1, ranks)
    with Watch() as watch:
        decoder = load_decoder(
            path, load_model_config(path), dtype=torch.bfloat16, device=device, max_model_len=64, parallel=one,
            linears="torch", keep_quantized=True,
        )
    found.append((watch.most, watch.held()))
    del decoder
print(json.dumps(found))
"""


def loads_to(device: str, path: Path) -> list[tuple[int, int]]:
    """Bytes of the host's tensors: most during a load, and what it leaves; of one rank, and of one of two.

    The process's own memory would also hold what malloc keeps of what was freed, more or less on another host.
    """
    ran = warm.run([*warm.PYTHON, "-c", TO_A_DEVICE, str(path), device])
    assert ran.returncode == 0, ran.stderr
    return [(most, taken) for most, taken in json.loads(ran.stdout)]


def test_weights_go_to_their_device_tensor_by_tensor(model: Path) -> None:
    """The device "meta" takes what it is given and holds nothing: what is left is the host's."""
    for most, taken in loads_to("meta", model):
        assert 0 < most < LARGEST * 4 < WEIGHTS
        assert taken == 0


@pytest.fixture(scope="module")
def quantized(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with any numbers of 4 bits, of AWQ's format."""
    import torch
    from safetensors.torch import load_file, save_file

    path, tensors = tmp_path_factory.mktemp("quantized"), load_file(model / "model.safetensors")
    for key in [key for key in tensors if "_proj" in key]:
        outputs, inputs = tensors.pop(key).shape
        layer = key.removesuffix(".weight")
        for name, rows in (("qweight", inputs), ("qzeros", inputs // 128)):
            tensors[f"{layer}.{name}"] = torch.randint(-(1 << 31), 1 << 31, (rows, outputs // 8)).int()
        tensors[f"{layer}.scales"] = torch.rand(inputs // 128, outputs).half()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_packed_weights_are_never_all_dense(quantized: Path) -> None:
    """Where a device's memory is the host's: what stays, and a layer's numbers one by one in a few forms."""
    for ranks, (most, taken) in enumerate(loads_to("cpu", quantized), 1):
        packed = (WEIGHTS * 0.5 * (1 + 3 / 64) + VOCABULARY * HIDDEN * 2 * 2) / ranks
        assert 0.95 * packed < taken < packed
        assert taken < most < packed + 5 * LARGEST < WEIGHTS
