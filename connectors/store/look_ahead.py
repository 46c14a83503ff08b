"""Prefetches the values that the first waiting requests will load into the fast tier, and keeps them there.

CachedAttention's scheduler-aware fetching and eviction (USENIX ATC '24, section 3.3). The window is limited by the
memory that the fast tier may reserve.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from pdkv.connectors.base import TransferKey
from pdkv.connectors.store.plan import StoreAhead, StoreCut, Value
from pdkv.wire.kv import KVTerms


class LookAhead:
    """The scheduler side's window over the waiting requests. Used only by the step thread."""

    def __init__(
        self, cut: StoreCut, max_bytes: int, name: str, found: Callable[[Sequence[bytes]], int | None]
    ) -> None:
        """`max_bytes`: limit of a rank's values in the window; `name`: prefix of the orders' names; `found`: how many
        of a chain's first tokens are stored; None while this is being looked up.
        """
        self._cut = cut
        self._max_tokens = max_bytes // cut.layout.token_bytes
        self._name = name
        self._found = found
        self._numbers = count()
        self._window: dict[bytes, StoreAhead] = {}  # by a request's last key
        self._num_users: Counter[bytes] = Counter()  # of a value
        self._num_tokens = 0

    def update(
        self, waiting: Sequence[Sequence[bytes]], terms: Sequence[KVTerms | None] = ()
    ) -> tuple[list[StoreAhead], list[StoreAhead]]:
        """The values to prefetch, and those no longer wanted.

        Args:
            waiting: block keys of the first waiting requests, in queue order.
            terms: the requests' terms; empty: none has any.
        """
        if not waiting and not self._window:
            return [], []
        chains = {keys[-1]: keys for keys in waiting if keys}
        left = [self._leave(last) for last in [*self._window] if last not in chains]
        of_chains = {keys[-1]: kv_terms for keys, kv_terms in zip(waiting, terms, strict=False) if keys}
        return self._enter(chains, of_chains), [ahead for ahead in left if ahead is not None]

    def _enter(
        self, chains: Mapping[bytes, Sequence[bytes]], terms: Mapping[bytes, KVTerms | None]
    ) -> list[StoreAhead]:
        """Admit requests that fit; only one larger than the window is overtaken."""
        entered: list[StoreAhead] = []
        for last, keys in chains.items():
            if last in self._window:
                continue
            stop = self._found(keys)
            if stop is None:
                continue
            values = self._cut.values_to_load(keys, 0, stop) if stop else []
            new = [value for value in values if value.key not in self._num_users]
            num_tokens = sum(value.num_tokens for value in new)
            if num_tokens > self._max_tokens:
                values, new, num_tokens = [], [], 0  # never: nothing is prefetched for it, and others pass
            elif self._num_tokens + num_tokens > self._max_tokens:
                break
            self._num_tokens += num_tokens
            self._num_users.update(value.key for value in values)
            self._window[last] = StoreAhead(TransferKey(self._name, 0, part=next(self._numbers)), values)
            if new:
                entered.append(StoreAhead(self._window[last].key, new, terms.get(last)))
        return entered

    def _leave(self, last: bytes) -> StoreAhead | None:
        ahead = self._window.pop(last)
        if not ahead.values:
            return None
        unused: list[Value] = []
        for value in ahead.values:
            self._num_users[value.key] -= 1
            if not self._num_users[value.key]:
                del self._num_users[value.key]
                self._num_tokens -= value.num_tokens
                unused.append(value)
        return StoreAhead(ahead.key, unused)
