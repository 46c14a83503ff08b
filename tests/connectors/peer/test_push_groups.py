"""Pushes of models with windows: of a window's layers only the blocks are sent that the receiver's next token sees."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from engines import at_rest, make_core, of_type, output_of, submit
from oracle import oracle
from peer_groups import ALL_WINDOW, FULL_AND_WINDOW, TWO_WINDOWS, engines_of, layer_windows, meet, run_to_rest, settle
from state_machine.standin import expected_tokens

from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.engine.core import EngineCore
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.sampling_params import SamplingParams
from pdkv.wire.messages import (
    Allocated,
    Continue,
    EngineToRouter,
    HandedOff,
    KVGroup,
    KVTicket,
    Loaded,
    Release,
    Submit,
)


def push(
    prefill: EngineCore, decode: EngineCore, request: Submit, *, late_ticket: bool = False
) -> list[EngineToRouter]:
    """One request, decode's blocks first. Returns decode's messages. `late_ticket`: it comes when prefill is over."""
    decode.handle("r", msgspec.structs.replace(request, kv="await_peer"), 0.0)
    decode.step(0.0)
    messages = [m for _, batch in decode.take_messages(0.0) for m in batch]
    (allocated,) = of_type(messages, Allocated)
    assert isinstance(allocated, Allocated)
    handed = msgspec.structs.replace(request, kv="handoff", until="first_token")
    if not late_ticket:
        handed = msgspec.structs.replace(handed, ticket=allocated.ticket)
    prefill.handle("r", handed, 0.0)
    sent = run_to_rest([prefill])
    assert of_type(sent, HandedOff)
    if late_ticket:
        assert allocated.ticket is not None
        prefill.handle("r", KVTicket(request.request_id, 0, allocated.ticket), 0.0)
    decode.handle("r", Continue(request.request_id, 0, output_of(sent, request.request_id)), 0.0)
    messages += run_to_rest([decode], others=[prefill])
    prefill.handle("r", Release(request.transfer_id, 0), 0.0)
    settle(prefill)
    return messages


@pytest.mark.parametrize("groups", [FULL_AND_WINDOW, ALL_WINDOW, TWO_WINDOWS], ids=["full+window", "window", "two"])
@pytest.mark.parametrize("num_tokens", [3, 4, 24, 37])
@pytest.mark.parametrize(("chunk", "late_ticket"), [(64, False), (5, False), (64, True)])
def test_decode_goes_on_with_what_was_sent(
    groups: tuple[KVGroup, ...], num_tokens: int, chunk: int, late_ticket: bool
) -> None:
    names = [f"push-{role}-{num_tokens}-{len(groups)}-{groups[0].window}-{chunk}-{late_ticket}" for role in ("p", "d")]
    prefill, decode = (
        make_core(
            name=name, num_blocks=64, max_model_len=60, groups=groups, options={"mode": "push"},
            limits=SchedulerLimits(8, chunk),
        )
        for name in names
    )  # fmt: skip
    meet([prefill, decode])
    prompt = list(range(100, 100 + num_tokens))
    for name in ("first", "again"):
        messages = push(prefill, decode, submit(prompt, request_id=name, max_tokens=12), late_ticket=late_ticket)
        assert [m.ok for m in of_type(messages, Loaded)] == [True]  # type: ignore[attr-defined]
        assert output_of(messages, name) == expected_tokens(prompt, 12, layer_windows(groups))[1:]
    for core in (prefill, decode):
        assert at_rest(core)
        core.shutdown()


@pytest.mark.parametrize("connector", ["p2p", "nixl", "multi"])
@pytest.mark.parametrize(
    ("family", "overrides", "num_blocks"),
    [("mistral", {}, 2), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, 19 + 2 * 2)],
)
def test_tokens_and_bytes(
    hf_model: Callable[..., Path], family: str, overrides: dict[str, object], num_blocks: int, connector: str
) -> None:
    """The tokens are those of transformers. Bytes: a layer without a window takes 19 blocks, one of 24 tokens 2."""
    model = hf_model(family, sliding_window=24, initializer_range=0.2, max_position_embeddings=512, **overrides)
    options = {"nixl": {"mode": "push"}, "multi": {"connectors": "shared_memory,p2p"}}.get(connector, {})
    with engines_of(model, connector, options) as (prefill, decode):
        rng = random.Random(3)
        expected = oracle(model).expect(lambda: [rng.randrange(2, 258) for _ in range(300)], 12)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        request = Submit(request_id="a", transfer_id="t-a", attempt=0, prompt_token_ids=expected.prompt, params=params)
        messages = push(prefill, decode, request)
        assert [m.ok for m in of_type(messages, Loaded)] == [True]  # type: ignore[attr-defined]
        assert output_of(messages, "a") == expected.output[1:]
        layout = decode.card.layout
        assert num_blocks == sum(19 - first_seen_block(window, 300, 16) for window in layout.windows)
        assert decode.decode.counts().bytes_received == num_blocks * layout.block_bytes
        assert at_rest(decode)
