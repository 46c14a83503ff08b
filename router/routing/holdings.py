"""How much of a prompt each engine has or can load, and what that is worth in tokens that it need not compute.

A token of an engine's own cache is worth one. Tokens that it would load, from a tier below the caches or from another
engine, are worth their number less the tokens that it could compute during the load (engines/speeds.py).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

from pdkv.base.block_keys import HASH_BLOCK_SIZE, root_key
from pdkv.config import Reuse
from pdkv.router.engines.fleet import Fleet
from pdkv.router.engines.members import FEW
from pdkv.router.engines.speeds import Costs, saved_tokens
from pdkv.router.request import GenerateRequest, Offer
from pdkv.router.routing.decision import Choice
from pdkv.router.routing.prefix_index import Match, PrefixIndex
from pdkv.router.routing.tier_index import Reach, TierIndex
from pdkv.wire.kv import EngineCard


class PromptKV:
    """The known KV of one prompt at one time; looked up on demand, once."""

    def __init__(self, request: GenerateRequest, keys: Sequence[bytes], known: "Holdings", now: float) -> None:
        self.request = request
        self.keys = () if request.params.computes_prompt else keys  # nothing that is cached helps
        self._known = known
        self._now = now
        self._expected: dict[str, int] = {}
        self.choices: list[Choice] | None = [] if request.explain else None  # why engines were chosen, if asked for
        self.stays = ""  # "local": its decode engine does all of it; "kept": its prefill engine; "": neither by cost

    @cached_property
    def cached(self) -> Match:
        """Number of the prompt's first tokens in each engine's own cache; engines without any are left out."""
        return self._known.index.match(self.keys)

    @property
    def reachable(self) -> tuple[int, int]:
        """Tokens of its longest prefix in any engine's cache, and in any tier below; one is always computed."""
        most = (len(self.request.prompt_token_ids) - 1) // HASH_BLOCK_SIZE * HASH_BLOCK_SIZE
        return min(self.cached.longest, most), min(max((r.num_tokens for r in self.reaches), default=0), most)

    def expected(self, engine: str) -> int:
        """As in `cached`, with what the engine is about to compute for prompts that it was given before."""
        own = self._expected.get(engine)
        if own is None:
            own = self._known.index.expected.extend(engine, self.keys, self.cached.get(engine), self._now)
            self._expected[engine] = own
        return own

    @cached_property
    def near(self) -> Collection[str]:
        """Engines that have, or are about to have, most of the prompt: FEW of each kind at most."""
        cached = (engine for _, engine in islice(self.cached.most_first(in_turn=True), FEW))
        own = (engine for reach in self.reaches if len(reach.engines) < FEW for engine in reach.engines)
        return {*cached, *self._known.index.expected.engines(self.keys, FEW), *own}

    @cached_property
    def reaches(self) -> Sequence[Reach]:
        """The prefixes in tiers below the caches."""
        return self._known.tiers.match(self.keys)

    def holders(self, own: int) -> Iterator[tuple[int, str]]:
        """(tokens that could be lent, engine) of those with more than `own`, most first; one token of the prompt is
        always computed.
        """
        most = (len(self.request.prompt_token_ids) - 1) // HASH_BLOCK_SIZE * HASH_BLOCK_SIZE
        if own < most:
            for num_tokens, engine in self.cached.most_first():
                if num_tokens <= own:
                    return
                yield min(num_tokens, most), engine


class Holdings:
    """The KV that all engines hold, as far as one router knows.

    Args:
        reuse: when an engine reads what others have cached; auto: if that takes less time than computing it.
    """

    def __init__(self, fleet: Fleet, index: PrefixIndex, tiers: TierIndex, reuse: Reuse) -> None:
        self._fleet = fleet
        self.index = index
        self.tiers = tiers
        self._reuse = reuse
        self._card: EngineCard | None = None  # of the engine that was asked last
        self._layout = ""

    def of(self, request: GenerateRequest, now: float) -> PromptKV:
        """The known KV of a prompt at this moment."""
        card = self._fleet.any_card
        if card is None:
            return PromptKV(request, (), self, now)
        if card is not self._card:
            self._card, self._layout = card, card.layout.identity
        root = root_key(model=card.model, layout=self._layout, cache_salt=request.cache_salt)
        return PromptKV(request, request.keys.of(root, request.prompt_token_ids), self, now)

    def given(self, prompt: PromptKV, engine: str, offer: Offer | None, now: float) -> int:
        """Note that an engine is given the prompt, so it will soon have all of it; returns its `uncached_tokens`."""
        num_uncached = self.uncached_tokens(prompt, engine, offer)
        self.index.expected.add(engine, prompt.keys[prompt.cached.get(engine, 0) // HASH_BLOCK_SIZE :], now)
        return num_uncached

    def worth(self, prompt: PromptKV, engines: Collection[str], now: float) -> Mapping[str, int]:
        """Prompt tokens that each of these engines need not compute."""
        failing = self._fleet.pairs.avoided(now)
        found: dict[str, int] = {}
        for engine in engines:
            own = prompt.expected(engine)
            loan = self._find_lender(prompt, engine, own, failing)
            found[engine] = self._worth(engine, own, prompt.reaches, 0 if loan is None else loan[0])
        return found

    def uncached_tokens(self, prompt: PromptKV, engine: str, offer: Offer | None = None) -> int:
        """Number of prompt tokens that the engine will have to compute, as far as is known; at least one block's.
        Loaded tokens count as the tokens that it could compute during their load.
        """
        own, lent = prompt.expected(engine), 0 if offer is None else offer.num_tokens
        num_saved = self._worth(engine, own, prompt.reaches, lent)
        return max(len(prompt.request.prompt_token_ids) - num_saved, HASH_BLOCK_SIZE)

    def find_offer(self, prompt: PromptKV, borrower: str, now: float) -> Offer | None:
        """The KV that another engine has of the prompt, if `borrower` would read it sooner than compute it."""
        if not self._may_borrow(prompt.request, borrower):
            return None
        cached = prompt.cached.get(borrower, 0)
        reach = max((r for r in prompt.reaches if borrower in r.engines), key=lambda r: r.num_tokens, default=None)
        own = max(cached, 0 if reach is None else reach.num_tokens)
        best = self._find_lender(prompt, borrower, own, self._fleet.pairs.avoided(now))
        if best is None:
            return None
        num_tokens, lender = best
        if self._reuse == "always":
            return Offer(lender, num_tokens)
        costs = self._loan_costs(
            borrower, num_tokens - cached
        )  # all of it is transferred, including the part that a tier has
        if not costs.prefers_load or self._tier_is_sooner(borrower, reach, cached, num_tokens, costs):
            return None
        return Offer(lender, num_tokens, costs.load_timeout_s, costs.compute_s or 0.0)

    def handoff_s(self, prefill: str, decode: str, num_tokens: int) -> float:
        """Seconds to hand over this many tokens to a decode engine; 0: not known."""
        return self._fleet.speeds.load_s(self._num_bytes(decode, num_tokens), (prefill, decode))

    # --- loans ----------------------------------------------------------------------------------------------------

    def _may_borrow(self, request: GenerateRequest, engine: str) -> bool:
        card = self._fleet.engines[engine].card
        return self._reuse != "never" and not request.probe and card is not None and card.lends

    def _find_lender(
        self, prompt: PromptKV, borrower: str, own: int, failing: Collection[tuple[str, str]]
    ) -> tuple[int, str] | None:
        """(tokens, engine) of the engine that has most beyond the first `own` tokens, and may lend them."""
        if not self._may_borrow(prompt.request, borrower):
            return None
        more = prompt.holders(own)
        return next((e for e in more if e[1] != borrower and self._fleet.can_lend(e[1], borrower, failing)), None)

    def _tier_is_sooner(self, borrower: str, reach: Reach | None, cached: int, num_tokens: int, loan: Costs) -> bool:
        """Whether the borrower would have these tokens sooner by reading the tier and computing the rest."""
        if reach is None or reach.num_tokens <= cached or loan.load_s is None or loan.compute_s is None:
            return False
        compute_s = loan.compute_s * (num_tokens - reach.num_tokens) / (num_tokens - cached)
        return (self._tier_load_s(borrower, reach, cached) or 0.0) + compute_s <= loan.load_s

    def _loan_costs(self, borrower: str, num_tokens: int) -> Costs:
        return self._fleet.speeds.costs(borrower, num_tokens, self._num_bytes(borrower, num_tokens))

    def _num_bytes(self, engine: str, num_tokens: int) -> int:
        """Bytes on all ranks."""
        return num_tokens * self._fleet.engines[engine].token_bytes

    # --- value ----------------------------------------------------------------------------------------------------

    def _worth(self, engine: str, own: int, reaches: Sequence[Reach], lent: int) -> int:
        """The value in tokens. `own`: tokens that the engine has itself; `lent`: those that it may borrow."""
        token_s = self._fleet.speeds.token_s(engine)
        ways = [0]
        for reach in reaches:
            if engine in reach.engines and reach.num_tokens > own:
                load_s = self._tier_load_s(engine, reach, own)
                ways.append(saved_tokens(reach.num_tokens - own, load_s, token_s))
        if lent > own:
            ways.append(saved_tokens(lent - own, self._loan_costs(engine, lent - own).load_s, token_s))
        return own + max(ways)

    def _tier_load_s(self, engine: str, reach: Reach, own: int) -> float | None:
        """Seconds to load the tier's part after the first `own` tokens; None: not known."""
        value_bytes = reach.value_bytes or reach.tokens_per_value * self._card_of(engine).layout.token_bytes
        seconds = 0.0
        for part, num_values in reach.values_behind(own):
            byte_s = self._fleet.speeds.byte_s(part)
            if byte_s is None:
                return None
            seconds += num_values * value_bytes * byte_s
        return seconds

    def _card_of(self, engine: str) -> EngineCard:
        card = self._fleet.engines[engine].card
        assert card is not None, f"{engine} has never been ready"
        return card
