"""An engine of LMCache, made of its own code and transformers' model: it stores prompts' KV, or looks it up.

    lmcache_peer.py put|get HOST PORT MODEL_DIR HASH PROMPTS   (PROMPTS: a JSON list of texts)

Its keys are those of LMCache's ChunkedTokenDatabase, its transport LMCServerConnector into a LocalCPUBackend. `put`
computes the prompts' KV. `get` says for each chunk how far what it finds is from what transformers computes, or null.
"""

# ruff: noqa: E402

import asyncio
import json
import sys
from types import ModuleType
from typing import Any

import torch

sys.modules.setdefault("aiofile", ModuleType("aiofile"))  # which only its backend for GPUDirect uses
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.token_database import ChunkedTokenDatabase
from transformers import AutoModelForCausalLM, AutoTokenizer

CHUNK = 256


def kv_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """(2, num_layers, num_tokens, num_kv_heads * head_size): LMCache's KV_2LTD."""
    with torch.inference_mode():
        cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    planes = [torch.stack([layer[i].transpose(0, 1).flatten(1) for layer in layers]) for i in range(2)]
    return torch.stack(planes)


async def main() -> None:
    """What the command line says; the result is the last line."""
    action, host, port, model_dir, hash_name, prompts = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    numbers = model.config
    dtype = next(model.parameters()).dtype
    head_size = getattr(numbers, "head_dim", None) or numbers.hidden_size // numbers.num_attention_heads
    shape = (numbers.num_hidden_layers, 2, CHUNK, numbers.num_key_value_heads, head_size)
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, pre_caching_hash_algorithm=hash_name)
    metadata = LMCacheMetadata("the-model", 1, 1, 0, 0, dtype, shape)
    database = ChunkedTokenDatabase(config, metadata)
    backend = LocalCPUBackend(config, metadata, "cpu", memory_allocator=AdHocMemoryAllocator("cpu"))
    connector = LMCServerConnector(host, int(port), asyncio.get_running_loop(), backend)
    said = []
    for prompt in json.loads(prompts):
        tokens = tokenizer.encode(prompt)
        kv = kv_of(model, tokens)
        for start, stop, key in database.process_tokens(tokens):
            chunk = kv[:, :, start:stop].contiguous()
            if stop - start == CHUNK and action == "put":
                stored = backend.allocate(chunk.shape, dtype, MemoryFormat.KV_2LTD)
                stored.tensor.copy_(chunk)
                await connector.put(key, stored)
                said.append(await connector.exists(key))
            elif stop - start == CHUNK:
                found = await connector.get(key)
                said.append(None if found is None else (found.tensor - chunk).abs().max().item())
    print(json.dumps(said))


asyncio.run(main())
