"""Latent KV between engines: the tokens of transformers, and of each token one row for each layer, to the byte."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from oracle import oracle

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.peer.cards import check_compatible
from pdkv.errors import IncompatiblePeers
from pdkv.testing.engine import SideBySide, of_type, output_of, submit
from pdkv.wire.messages import Loaded

RANK, TURNED, NUM_LAYERS = 32, 16, 3


@pytest.mark.parametrize(
    ("connector", "options"),
    [
        ("shared_memory", {}),
        ("nixl", {"mode": "push"}),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("nixl", {}),
                ("p2p", {}),
                ("multi", {"connectors": "shared_memory,nixl"}),
                ("store", {"url": "memory://latent"}),
                ("store", {"url": "memory://latent", "codec": "cachegen"}),
            )
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_tokens_and_bytes(hf_model: Callable[..., Path], connector: str, options: dict[str, str], dtype: str) -> None:
    model = hf_model("deepseek_v3", initializer_range=0.2)
    rng = random.Random(3)
    expected = oracle(model).expect(lambda: [rng.randrange(2, 258) for _ in range(304)], 12)
    with SideBySide.of_model(model, connector, options, dtype=dtype) as engines:
        messages = engines.hand_over(submit(expected.prompt, max_tokens=12))
        assert [m.ok for m in of_type(messages, Loaded)] == [True]
        if dtype == "float32" and "codec" not in options:
            assert output_of(messages, "a") == expected.output[1:]
        row = (RANK + TURNED) * {"float32": 4, "bfloat16": 2}[dtype]
        decode = engines.decode.core
        assert decode.card.layout.token_bytes == row * NUM_LAYERS
        other = replace(decode.card, layout=replace(decode.card.layout, head_size=RANK + TURNED + 8))
        with pytest.raises(IncompatiblePeers, match=r"KV layout differs: .*head_size=48.*head_size=56"):
            check_compatible(ConnectorConfig(engine="e", epoch="1", layout=decode.card.layout, num_blocks=4), other)
        if connector != "store":  # whose values have envelopes
            assert decode.decode.counts().bytes_received == 304 * row * NUM_LAYERS
