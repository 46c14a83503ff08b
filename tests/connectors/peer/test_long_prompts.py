"""A prompt of 160k tokens between pools in which no two of its blocks are adjacent: its lists fit, and it arrives."""

from typing import Any

import pytest
import torch
from nixl_rig import needs_nixl
from push_rig import make_layout, pushing, view

from pdkv.connectors.base import TransferKey
from pdkv.connectors.nixl.connector import NixlConnector
from pdkv.connectors.p2p.connector import P2PConnector

NUM_TOKENS = 160_000
NUM_BLOCKS = 1 << 17


@pytest.mark.parametrize(
    ("connector", "options"),
    [
        pytest.param(P2PConnector, {}, id="p2p"),
        pytest.param(NixlConnector, {"mode": "push"}, id="nixl", marks=needs_nixl),
    ],
)
def test_a_scattered_prompt_is_pushed(connector: Any, options: dict[str, str]) -> None:
    layout = make_layout(num_layers=1, num_heads=1, head_size=1)
    with pushing(connector, layout=layout, num_blocks=NUM_BLOCKS, **options) as (prefill, decode):
        source, target = (
            torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed))[: NUM_TOKENS // 16].tolist()
            for seed in (1, 2)
        )
        content = torch.rand(len(source), *prefill.pools[0].shape[1:])
        prefill.pools[0][source] = content
        ticket = decode.want(view("t", kv="await_peer", num_tokens=NUM_TOKENS), target)
        assert ticket is not None
        prefill.give(view("t", kv="handoff", num_tokens=NUM_TOKENS, ticket=ticket), source, NUM_TOKENS)
        assert decode.outcome("receiving", TransferKey("t", 1)).code == ""
        assert torch.equal(decode.pools[0][target], content)
        assert prefill.outcome("sending", TransferKey("t", 1)).code == ""
