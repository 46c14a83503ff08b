"""Proposers without a model: the last tokens are looked up in the request's own tokens, its predicted output, and
earlier outputs of the same tenant (docs/speculation.md).
"""

from collections import OrderedDict
from itertools import count
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from pdkv.base.options import Size, option
from pdkv.engine.plan import NewRequest
from pdkv.engine.proposers.base import Asked, Guesses, Place, Proposer, ProposerOptions
from pdkv.errors import ConfigError
from pdkv.kernels.int_lists import int32_array
from pdkv.kernels.ngrams import Job, Texts

_GRAM = 2
"""Tokens by which a prediction, or an earlier output, is looked up."""

_LONGEST = 32
"""A longer match there is as good as one of this length."""

_FIRST_TOKENS = 1 << 12
_MAX_OUTPUTS = 1 << 10
"""Tenants with earlier outputs, at most."""

_Order = Annotated[int, Meta(ge=1, le=64)]


class PredictionProposer(Proposer):
    """Follows the predicted outputs that requests bring along; the other requests have no guesses."""

    def attach(self, place: Place) -> None:
        slots = place.max_num_seqs
        self._texts = Texts(2 * slots + _MAX_OUTPUTS)  # own tokens, predictions, earlier outputs
        self._first_prediction, self._first_output = slots, 2 * slots
        self._predicted: set[int] = set()  # slots

    def add(self, slot: int, request: NewRequest) -> None:
        if request.prediction_token_ids:
            tokens = int32_array(request.prediction_token_ids)
            self._texts.set(self._first_prediction + slot, tokens, len(tokens), _GRAM)
            self._predicted.add(slot)

    def remove(self, slot: int, token_ids: npt.NDArray[np.int32]) -> None:
        if slot in self._predicted:
            self._predicted.discard(slot)
            self._texts.clear(self._first_prediction + slot)

    def propose(self, asked: Asked) -> Guesses:
        jobs = self._jobs(asked)
        if not len(jobs):
            return Guesses(np.zeros(len(asked.slots), np.int64), np.zeros((len(asked.slots), 0), np.int32))
        return Guesses(*self._texts.look_up(jobs, len(asked.slots), self.num_tokens, self._factor))

    _factor = 0.0

    def _jobs(self, asked: Asked) -> npt.NDArray[np.int64]:
        if not self._predicted:
            return np.zeros((0, len(Job._fields)), np.int64)
        row, base = asked.token_ids.strides[0], asked.token_ids.ctypes.data
        each = zip(count(), asked.slots.tolist(), asked.requests, asked.num_tokens.tolist(), asked.most.tolist())
        jobs = [
            Job(
                base + slot * row + 4 * (num_prompt := len(request.prompt_token_ids)),
                known - num_prompt, self._first_prediction + slot, _GRAM, _LONGEST, True, place, most,
            )
            for place, slot, request, known, most in each
            if slot in self._predicted
        ]  # fmt: skip
        return np.array(jobs, np.int64).reshape(-1, len(Job._fields))


class NgramOptions(ProposerOptions):
    """Keys of the method "ngram"."""

    prompt_lookup_max: _Order | None = option(None, "tokens from which on a match is long enough (default: 5)")
    prompt_lookup_min: _Order | None = option(
        None, "least tokens that must match (default: 2, or prompt_lookup_max if that is less)"
    )

    @property
    def most(self) -> int:
        """Tokens from which on a match is long enough."""
        return self.prompt_lookup_max or max(self.prompt_lookup_min or 0, 5)

    @property
    def least(self) -> int:
        """Least tokens that must match."""
        return self.prompt_lookup_min or min(2, self.most)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise ConfigError(f"prompt_lookup_min ({self.least}) must be at most prompt_lookup_max ({self.most})")


class NgramProposer(PredictionProposer):
    """Prompt lookup: a request's last tokens are looked up in its prompt and output."""

    options_type: type[ProposerOptions] = NgramOptions

    def attach(self, place: Place) -> None:
        super().attach(place)
        self._is_set = np.zeros(place.max_num_seqs, np.bool_)

    def add(self, slot: int, request: NewRequest) -> None:
        super().add(slot, request)
        self._is_set[slot] = False

    def remove(self, slot: int, token_ids: npt.NDArray[np.int32]) -> None:
        super().remove(slot, token_ids)
        self._texts.clear(slot)

    def _jobs(self, asked: Asked) -> npt.NDArray[np.int64]:
        self._begin(asked)
        jobs = np.empty((len(asked.slots), len(Job._fields)), np.int64)
        address = asked.token_ids.ctypes.data + asked.slots * asked.token_ids.strides[0]
        least, most = self._lengths
        columns: tuple[Any, ...] = (address, asked.num_tokens, asked.slots, least, most, 0)
        columns += (np.arange(len(jobs)), asked.most)
        for i, column in enumerate(columns):
            jobs[:, i] = column
        predicted = super()._jobs(asked)
        return np.concatenate([predicted, jobs]) if len(predicted) else jobs

    def _begin(self, asked: Asked) -> None:
        """Index the slots of new requests from their first token on."""
        for slot in asked.slots[~self._is_set[asked.slots]].tolist():
            self._texts.set(slot, asked.token_ids[slot], 0, min(self._lengths[0], 4))
            self._is_set[slot] = True

    @property
    def _lengths(self) -> tuple[int, int]:
        return self.options.least, self.options.most


class SuffixOptions(ProposerOptions):
    """Keys of the method "suffix"."""

    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=64)] = option(
        24, "tokens from which on a match is long enough"
    )
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0, le=64)] = option(
        1.0, "the most guesses per matched token"
    )
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = option(
        10_000, "0: look in the request's own tokens only, not in earlier outputs"
    )
    suffix_cache_bytes: Size = option(
        64 << 20, "memory for earlier outputs on each rank, of which one tenant has at most an eighth"
    )


class SuffixProposer(NgramProposer):
    """Looks also in earlier outputs of the same API key and cache salt; guesses more where more tokens match."""

    options_type = SuffixOptions

    def attach(self, place: Place) -> None:
        super().attach(place)
        keeps = self.options.suffix_decoding_max_cached_requests
        self._outputs = EarlierOutputs(self._texts, self._first_output, self.options.suffix_cache_bytes if keeps else 0)
        self._requests: dict[int, NewRequest] = {}
        self._factor = self.options.suffix_decoding_max_spec_factor

    def add(self, slot: int, request: NewRequest) -> None:
        super().add(slot, request)
        self._requests[slot] = request

    def remove(self, slot: int, token_ids: npt.NDArray[np.int32]) -> None:
        super().remove(slot, token_ids)
        request = self._requests.pop(slot)
        output = token_ids[len(request.prompt_token_ids) + len(request.output_token_ids) :]  # the part drawn here
        if len(output) > _GRAM:
            self._outputs.append(request.tenant, output)

    def _jobs(self, asked: Asked) -> npt.NDArray[np.int64]:
        jobs = super()._jobs(asked)
        texts = [self._outputs.number(request.tenant) for request in asked.requests]
        if not any(texts):
            return jobs
        places = np.flatnonzero(texts)
        more = jobs[len(jobs) - len(asked.slots) :][places]
        more[:, 2] = np.array(texts)[places]
        return np.concatenate([jobs, more])

    @property
    def _lengths(self) -> tuple[int, int]:
        return _GRAM, self.options.suffix_decoding_max_tree_depth


class EarlierOutputs:
    """The last outputs of each tenant, within a bound of bytes. A tenant's are found by its own requests only."""

    def __init__(self, texts: Texts, first: int, max_bytes: int) -> None:
        self._texts = texts
        self._free = list(range(first + _MAX_OUTPUTS - 1, first - 1, -1))
        self._max_bytes = max_bytes
        self._texts_of: OrderedDict[str, _Output] = OrderedDict()  # the least recently used first
        self.num_bytes = 0

    def number(self, tenant: str) -> int:
        """The number of the text with the tenant's outputs; 0: there is none."""
        text = self._texts_of.get(tenant)
        return 0 if text is None else text.number

    def append(self, tenant: str, output: npt.NDArray[np.int32]) -> None:
        """Add an output; a tenant's oldest ones make room for it, and so do tenants that have had none for long."""
        most = self._max_bytes // 8 // _bytes_of(1)
        if most < _FIRST_TOKENS:
            return
        output = output[-(most // 2) :]
        text = self._texts_of.pop(tenant, None)
        if text is None:
            if not self._free:
                self._forget_oldest()
            text = _Output(self._free.pop())
        text.end(output, most)
        self.num_bytes += text.grown_bytes()
        self._texts_of[tenant] = text
        self._texts.resize(text.number, text.size) if text.is_set else text.begin(self._texts)
        while self.num_bytes > self._max_bytes:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, text = self._texts_of.popitem(last=False)
        self.num_bytes -= text.num_bytes
        self._texts.clear(text.number)
        self._free.append(text.number)


class _Output:
    """One tenant's outputs, with -1 behind each."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.size = 0
        self.num_bytes = 0
        self.is_set = False  # whether the texts have this array
        self._tokens = np.zeros(_FIRST_TOKENS, np.int32)

    def end(self, output: npt.NDArray[np.int32], most: int) -> None:
        """Add an output. Beyond `most` tokens the older half goes."""
        size = self.size + len(output) + 1
        if size > most:
            kept = self._tokens[max(self.size + 1 - most // 2, 0) : self.size].copy()
            self._tokens[: len(kept)], self.size, self.is_set = kept, len(kept), False
            size = self.size + len(output) + 1
        if size > len(self._tokens):
            grown = np.zeros(max(size, min(2 * len(self._tokens), most)), np.int32)
            grown[: self.size] = self._tokens[: self.size]
            self._tokens, self.is_set = grown, False
        self._tokens[self.size : size - 1], self._tokens[size - 1] = output, -1
        self.size = size

    def grown_bytes(self) -> int:
        """Bytes by which it has grown since the last call."""
        before, self.num_bytes = self.num_bytes, _bytes_of(len(self._tokens))
        return self.num_bytes - before

    def begin(self, texts: Texts) -> None:
        """Index it from its first token on."""
        texts.set(self.number, self._tokens, self.size, _GRAM)
        self.is_set = True


def _bytes_of(num_tokens: int) -> int:
    """Bytes of a text of that many tokens and of its index, at most."""
    return 16 * num_tokens
