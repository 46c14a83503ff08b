"""One request on one of the kit's engines."""

from typing import Literal

from pdkv.base.block_keys import HASH_BLOCK_SIZE, extend_keys, root_key
from pdkv.connector_kit.rig.content import Text, token_ids
from pdkv.connectors.base import RequestView, TransferKey
from pdkv.wire.kv import KVHandoff, KVLayout


class Request:
    """Counters and blocks. `num_prompt` tokens of the text are the prompt; one output token may follow."""

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
        self.text = text
        self.content = (
            list(text) if has_content else []
        )  # the text computed for it; empty: arbitrary content, which is faster
        self.num_prompt = num_prompt
        self.kv = kv
        self.transfer_id = transfer_id
        self.request_id = f"request-{transfer_id}"
        self.attempt = attempt
        self.handoff: KVHandoff | None = None
        self.ticket: bytes | None = None
        self.kv_ready: bool | None = None
        self.has_output = False
        self.block_tables: list[list[int]] = [[] for _ in range(layout.num_groups)]  # -1: given up, or never needed
        self.num_local_hit = 0
        self.num_confirmed = 0
        self.num_reported = 0
        self._num_published = 0
        self._block_size = layout.block_size
        self._root = root_key(model="conformance", layout=layout.identity)
        self._keys: list[bytes] = []

    @property
    def block_ids(self) -> list[int]:
        """The request's blocks, of all KV groups."""
        return self.blocks_from(0)

    def blocks_from(self, first: int) -> list[int]:
        """The blocks of its tables' entries from `first` on."""
        return [block for table in self.block_tables for block in table[first:] if block >= 0]

    @property
    def transfer_key(self) -> TransferKey:
        """The name of the transfer that it hands off or loads."""
        return TransferKey(self.transfer_id, self.attempt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known."""
        return self.num_prompt + self.has_output

    @property
    def num_wanted(self) -> int:
        """As the engine counts: the next token is computed here."""
        if self.kv == "await_peer" and not self.has_output:
            return self.num_prompt
        return self.num_tokens - 1

    def view(self) -> RequestView:
        """The RequestView that the connector is shown."""
        return RequestView(
            request_id=self.request_id, attempt=self.attempt, transfer_id=self.transfer_id, kv=self.kv,
            num_tokens=self.num_tokens, num_wanted=self.num_wanted,
            block_keys=self.keys(max(self.num_wanted, self.num_confirmed)), handoff=self.handoff, ticket=self.ticket,
            kv_ready=self.kv_ready, num_local_hit=self.num_local_hit,
        )  # fmt: skip

    def keys(self, num_tokens: int) -> list[bytes]:
        """Keys of the full hash blocks of the first tokens."""
        if num_tokens // HASH_BLOCK_SIZE > len(self._keys):
            extend_keys(self._keys, self._root, token_ids(self.text, num_tokens))
        return self._keys[: num_tokens // HASH_BLOCK_SIZE]

    def take_full_blocks(self) -> list[tuple[int, list[bytes]]]:
        """Blocks of the first KV group that became full and confirmed since the last call, with their keys."""
        num_full = self.num_confirmed // self._block_size
        keys = self.keys(num_full * self._block_size)
        per_block = self._block_size // HASH_BLOCK_SIZE
        table = self.block_tables[0]
        blocks = [
            (table[i], keys[i * per_block : (i + 1) * per_block])
            for i in range(self._num_published, num_full)
            if table[i] >= 0
        ]
        self._num_published = max(num_full, self._num_published)
        return blocks

    def lose_blocks(self) -> None:
        """Forget everything computed, and the blocks, as after a preemption."""
        self.block_tables = [[] for _ in self.block_tables]
        self.num_local_hit = self._num_published = 0
