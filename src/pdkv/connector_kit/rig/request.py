"""One request on one of the kit's engines: an engine's own, whose tokens are those of a text."""

from typing import Literal

from pdkv.base.block_keys import HASH_BLOCK_SIZE, root_key
from pdkv.connector_kit.rig.content import Text, token_ids
from pdkv.engine.request import Request
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import KVLayout
from pdkv.wire.messages import Submit

ROUTER = "kit"


class TextRequest(Request):
    """`num_prompt` tokens of the text are the prompt; one output token may follow."""

    def __init__(
        self,
        text: Text,
        num_prompt: int,
        *,
        kv: Literal["local", "handoff", "await_peer"],
        transfer_id: str,
        attempt: int,
        layout: KVLayout,
        has_content: bool = True,
    ) -> None:
        submit = Submit(
            request_id=f"request-{transfer_id}", transfer_id=transfer_id, attempt=attempt, kv=kv,
            prompt_token_ids=token_ids(text, num_prompt), params=SamplingParams(),
        )  # fmt: skip
        super().__init__(submit, ROUTER, root_key(model="conformance", layout=layout.identity), 0.0)
        self.update_hash_keys(num_prompt, HASH_BLOCK_SIZE)
        self.text = text
        self.content = list(text) if has_content else []  # computed for it; empty: anything, which is faster

    def draw(self) -> None:
        """Note that its first output token is known."""
        self.output_token_ids = [0]

    @property
    def block_ids(self) -> list[int]:
        """The request's blocks, of all KV groups."""
        return list(self.held_blocks())
