"""Both roles behind the engine's one hook protocol: any engine can prefill and decode at once."""

from collections.abc import Sequence

from pdkv.connectors.base import Finished, TransferKey, TransferOutcome
from pdkv.decode.role import DecodeRole
from pdkv.engine.request import Request
from pdkv.prefill.role import PrefillRole
from pdkv.wire.messages import RouterToEngine


class Roles:
    """Implements pdkv.engine.hooks.RoleHooks by delegation."""

    def __init__(self, prefill: PrefillRole, decode: DecodeRole) -> None:
        self.prefill = prefill
        self.decode = decode

    def may_start(self, request: Request, num_blocks: int) -> bool:
        return self.prefill.may_start(request, num_blocks)

    def may_load(self, request: Request, num_blocks: int, num_others: int) -> bool:
        return self.decode.may_load(request, num_blocks, num_others)

    def declines(self, request: Request, num_missing: int) -> bool:
        return self.decode.declines(request, num_missing)

    def load_allocated(self, request: Request, start: int, stop: int, ticket: bytes | None) -> None:
        self.decode.load_allocated(request, start, stop, ticket)

    def load_ended(self, request: Request, ok: bool, outcome: TransferOutcome) -> bool:
        return self.decode.load_ended(request, ok, outcome)

    def handed_off(self, request: Request, block_ids: Sequence[int], finished: Finished, now: float) -> None:
        self.prefill.handed_off(request, block_ids, finished, now)

    def sending_ended(self, key: TransferKey, ok: bool, outcome: TransferOutcome) -> None:
        self.prefill.sending_ended(key, ok, outcome)

    def handle(self, router_id: str, message: RouterToEngine) -> bool:
        return self.prefill.handle(router_id, message)

    def holds(self, key: TransferKey) -> bool:
        return self.prefill.holds(key)

    def router_left(self, router_id: str) -> None:
        self.prefill.router_left(router_id)

    def expire(self, now: float) -> None:
        self.prefill.expire(now)

    def next_deadline(self) -> float | None:
        return self.prefill.next_deadline()
