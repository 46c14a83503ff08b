"""Several ranks compute what one computes, and a rank that does not come is an error with a type."""

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rank_threads import join_over_gloo, on_ranks
from torch.distributed import FileStore
from warm import PYTHON, WarmPopen

from pdkv.errors import RankError, RankGone, RankTimeout
from pdkv.models.config import load_model_config
from pdkv.models.decoder import Decoder
from pdkv.models.heads import Heads
from pdkv.models.linear import LinearKind, linear_kind, make_linear
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import ALONE, DeviceRanks, TensorParallel, join_ranks
from pdkv.models.parallel_layers import GatheredLinear, RowParallelLinear, VocabularyParallelEmbedding
from pdkv.models.rank_sockets import connect_ranks
from pdkv.models.shard import Shard
from tests.conftest import FAMILIES, HFModel

torch.set_num_threads(1)

CPU = torch.device("cpu")


def test_one_rank_meets_nobody_and_changes_nothing() -> None:
    parallel = join_ranks(Shard(), CPU, [], None, 1.0)
    assert parallel is ALONE
    x = torch.ones(2, 3)
    assert parallel.all_reduce(x) is x
    assert parallel.all_gather(x) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 9001])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("over_gloo", [False, True])
def test_sums_and_sides_are_the_same_on_all_ranks(size: int, rows: int, dtype: torch.dtype, over_gloo: bool) -> None:
    """Few rows go at once, many in several parts. Over Gloo: what goes over NCCL on CUDA."""
    base = (torch.arange(rows * 64) % 50).to(dtype).view(rows, 64)

    def run(parallel: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
        x = base + 10 * parallel.shard.rank
        return parallel.all_reduce(x.clone()), parallel.all_gather(x)

    for total, sides in on_ranks(size, run, over_gloo=over_gloo):
        assert torch.equal(total, size * base + 10 * sum(range(size)))
        assert torch.equal(sides, torch.cat([base + 10 * rank for rank in range(size)], dim=1))


def test_ids_of_another_rank_give_zeros_and_the_sum_has_all() -> None:
    """300 words on two ranks: [0, 150) and [150, 300)."""
    table, ids = torch.randn(300, 8), torch.tensor([0, 149, 150, 299, 7])
    partial: dict[int, torch.Tensor] = {}

    class Spy(TensorParallel):
        def __init__(self, real: TensorParallel) -> None:
            self.real, self.shard = real, real.shard

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            partial[self.shard.rank] = x.clone()
            return self.real.all_reduce(x)

    def run(parallel: TensorParallel) -> torch.Tensor:
        words = parallel.shard.padded_part(300)
        return VocabularyParallelEmbedding(table[words], words, Spy(parallel))(ids)

    for rows in on_ranks(2, run):
        assert torch.equal(rows, table[ids])
    assert torch.equal(partial[0], table[ids] * torch.tensor([1, 1, 0, 0, 1]).unsqueeze(1))
    assert torch.equal(partial[1], table[ids] * torch.tensor([0, 0, 1, 1, 0]).unsqueeze(1))


@pytest.mark.parametrize("kind", ["plain", "packed", linear_kind(torch.float32, CPU)])
def test_divided_layers_equal_the_whole_one(kind: LinearKind) -> None:
    x, weight, bias, residual = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6), torch.randn(5, 6)

    def run(parallel: TensorParallel) -> list[torch.Tensor]:
        columns = parallel.shard.part(8, "columns")
        own_bias = bias if parallel.shard.rank == 0 else None
        row = RowParallelLinear(make_linear(weight[:, columns].contiguous(), own_bias, kind), parallel)
        rows = parallel.shard.padded_part(6)
        head = GatheredLinear(make_linear(weight[rows].contiguous(), bias[rows], kind), 6, parallel)
        mine = x[:, columns].contiguous()
        return [row(mine), row.add(mine, residual), head(x), head.add(x, residual)]

    whole = F.linear(x, weight, bias)
    with torch.inference_mode():
        for outputs in on_ranks(2, run):
            for output, expected in zip(outputs, [whole, whole + residual] * 2, strict=True):
                torch.testing.assert_close(output, expected)


def forward(model: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits of all positions of one prompt, with attention that needs no cache."""
    heads, kv_heads = model.num_heads, model.num_kv_heads

    def attend(layer: int, qkv: torch.Tensor, passes: Heads | None) -> torch.Tensor:
        assert passes is not None
        passes.apply(qkv)
        q, k, v = (part.transpose(0, 1) for part in qkv.split([heads, kv_heads, kv_heads], dim=1))
        groups = heads // kv_heads
        k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)

    with torch.inference_mode():
        return model.logits(model.forward(token_ids, torch.arange(len(token_ids)), attend, None))


def check_logits(path: Path, size: int, *, over_gloo: bool = False) -> None:
    config = load_model_config(path)
    token_ids = torch.randint(2, config.vocab_size, (40,), generator=torch.Generator().manual_seed(size))

    def load(parallel: TensorParallel) -> Decoder:
        return load_decoder(path, config, dtype=torch.float32, device=CPU, max_model_len=64, parallel=parallel)

    expected = forward(load(ALONE), token_ids)
    results = on_ranks(size, lambda parallel: forward(load(parallel), token_ids), over_gloo=over_gloo)
    for logits in results:
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-4)
        assert torch.equal(logits, results[0]), "ranks that disagree in a bit would drift apart"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_one_rank(hf_model: HFModel, family: str, size: int) -> None:
    """Two KV heads: with 4 ranks each is held twice."""
    check_logits(hf_model(family), size)


@pytest.mark.parametrize(
    "overrides",
    [
        {"vocab_size": 387},
        {"tie_word_embeddings": True, "vocab_size": 385},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=["padded-vocabulary", "padded-tied", "mqa", "mha", "bias"],
)
def test_variants_equal_one_rank(hf_model: HFModel, overrides: dict[str, object]) -> None:
    check_logits(hf_model("llama", **overrides), 4)


def test_a_rank_that_never_comes_is_a_timeout() -> None:
    ours, theirs = connect_ranks(2)
    with pytest.raises(RankTimeout, match="rank 0 of 2: rank 1 did not come in time"):
        join_ranks(Shard(0, 2), CPU, ours, None, 0.2)
    theirs[0].close()


@pytest.mark.parametrize("over_gloo", [False, True])
@pytest.mark.parametrize("rows", [4, 1 << 17])
def test_a_rank_that_is_late_is_a_timeout_and_one_that_left_an_error(rows: int, over_gloo: bool) -> None:
    """The other rank sits the first sum out, then leaves; few rows and many, within the bound set last."""
    waited, left = threading.Event(), threading.Event()

    def run(parallel: TensorParallel) -> list[RankError]:
        parallel.set_timeout(0.5)
        if parallel.shard.rank == 1:
            waited.wait(30)
            parallel.close()
            left.set()
            return []
        errors = []
        for _ in range(2):
            with pytest.raises(RankError) as raised:
                parallel.all_reduce(torch.ones(rows))
            errors.append(raised.value)
            waited.set()
            left.wait(30)
        return errors

    first, second = on_ranks(2, run, over_gloo=over_gloo)[0]
    assert isinstance(first, RankTimeout)
    assert isinstance(second, RankError)


@pytest.mark.parametrize("rows", [1, 3, 257])
def test_odd_sizes_go_over_a_group(rows: int) -> None:
    def run(parallel: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(rows * 5, dtype=torch.bfloat16).view(rows, 5) + parallel.shard.rank
        strided = torch.cat([x, x], dim=1)[:, :5]
        return parallel.all_reduce(x.clone()), parallel.all_gather(strided)

    base = torch.arange(rows * 5, dtype=torch.bfloat16).view(rows, 5)
    for total, sides in on_ranks(3, run, over_gloo=True):
        torch.testing.assert_close(total, 3 * base + 3)
        assert torch.equal(sides, torch.cat([base + rank for rank in range(3)], dim=1))


def test_a_model_divided_over_a_group_has_the_same_bits_on_all_ranks(hf_model: HFModel) -> None:
    check_logits(hf_model("llama"), 2, over_gloo=True)


_ANOTHER_RANK = """
import sys, torch
from rank_threads import join_over_gloo
from torch.distributed import FileStore
from pdkv.models.shard import Shard
ranks = join_over_gloo(Shard(1, 2), FileStore(sys.argv[1], 2), 120.0)
ranks.all_reduce(torch.ones(3))
print("met", flush=True)
sys.stdin.read()
"""


def test_a_rank_whose_process_is_killed_is_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    command = [*PYTHON, "-c", _ANOTHER_RANK, path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with WarmPopen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        try:
            ours = join_over_gloo(Shard(0, 2), FileStore(path, 2), 120.0)
            assert torch.equal(ours.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
            assert other.stdout.readline() == "met\n"
            other.kill()
            other.wait(30)
            with pytest.raises(RankGone, match="rank 0 of 2 lost another one"):
                ours.all_reduce(torch.ones(3))
            ours.close()
            ours.close()
            with pytest.raises(RankGone, match="has left the others"):
                ours.all_gather(torch.ones(1, 3))
        finally:
            other.kill()


def test_the_group_itself_waits_longer_than_who_waits_for_the_step() -> None:
    """Else torch's watchdog would end the process before anybody said why."""
    timeouts: list[timedelta] = []

    class Group:
        def _set_default_timeout(self, timeout: timedelta) -> None:
            timeouts.append(timeout)

    DeviceRanks(Shard(0, 2), Group(), 30.0).set_timeout(5.0)
    assert timeouts == [timedelta(seconds=35)]
