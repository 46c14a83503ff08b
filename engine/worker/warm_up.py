"""Steps that an engine runs before it is ready, so that later steps wait for no kernel to be compiled, and the kernels'
memory is already allocated.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdkv.engine.plan import NewRequest, ScheduledRequest, StepPlan
from pdkv.sampling.params import MAX_LOGPROBS, SamplingParams

_FEW_REQUESTS = 6
"""Numbers of requests: with four layers' products and the logits' for each, and for a prompt, more than 32 kernels."""

_CHUNK = 64
"""Tokens of one request: enough for large tiles of queries."""

_ROWS = (32, 128, 255)
"""Tokens of steps for whose numbers of rows 4-bit layers have separate kernels, besides those of the other
steps here.
"""

_GREEDY = SamplingParams(temperature=0.0)
_EVERYTHING = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, repetition_penalty=1.1, logprobs=MAX_LOGPROBS, seed=0)

_Shares = Sequence[tuple[int, int]]
"""For each request of a step: tokens computed before, and tokens computed in it. It draws."""


class WarmUp(NamedTuple):
    """The limits of an engine's steps. Requests share blocks, in a pool that is not used yet."""

    max_num_seqs: int
    max_model_len: int
    num_groups: int
    num_blocks: int
    block_size: int

    def on_host(self, *, compiles: bool) -> Iterator[StepPlan]:
        """A prompt and then decodes of 1 request, or, where kernels are compiled per number of rows, of 1, 2, 3 …"""
        length = min(16, self.num_blocks * self.block_size - 1, self.max_model_len)
        few = range(1, min(_FEW_REQUESTS if compiles else 1, self.max_num_seqs) + 1)
        return self._plans([([(0, length)], _GREEDY), *(([(length - 1, 1)] * count, _GREEDY) for count in few)])

    def on_device(self, max_num_tokens: int) -> Iterator[StepPlan]:
        """The largest step, with every option of draws; one step for each shape class of attention (few or many tokens
        of a request, seeing little KV or as much as possible); and one for each shape class of 4-bit layers.
        """
        count = min(self.max_num_seqs, max_num_tokens)
        each = min(max_num_tokens // count, self.max_model_len)
        lengths = sorted({min(_CHUNK, self.max_model_len), self.max_model_len})
        return self._plans(
            [
                ([(0, each)] * count, _EVERYTHING),
                (self._prompts(max_num_tokens), _GREEDY),
                *(([(max(length - _CHUNK, 0), min(length, _CHUNK))], _GREEDY) for length in lengths),
                *((self._prompts(rows), _GREEDY) for rows in sorted({min(rows, count * each) for rows in _ROWS})),
                *(([(length - 1, 1)], _EVERYTHING) for length in lengths),
                *(([(max(length - 2, 0), min(length, 2))] * min(2, count), _EVERYTHING) for length in lengths),
            ]
        )

    def _prompts(self, num_tokens: int) -> _Shares:
        """This many tokens in as few requests as possible, or fewer tokens if there are no requests for more."""
        whole, rest = divmod(num_tokens, self.max_model_len)
        return [*[(0, self.max_model_len)] * whole, *[(0, rest)] * (rest > 0)][: self.max_num_seqs]

    def _plans(self, steps: Sequence[tuple[_Shares, SamplingParams]]) -> Iterator[StepPlan]:
        """Plans in which each step has new requests, which end with the next one."""
        before: list[tuple[str, int]] = []
        for step_id, (shares, params) in enumerate(steps):
            requests = [self._request(i, computed + count, params) for i, (computed, count) in enumerate(shares)]
            keys = [request.key for request in requests]
            scheduled = [ScheduledRequest(k, *share, [], True) for k, share in zip(keys, shares, strict=True)]
            yield StepPlan(step_id, requests, scheduled, before)
            before = keys
        yield StepPlan(len(steps), [], [], before)

    def _request(self, index: int, length: int, params: SamplingParams) -> NewRequest:
        """A prompt of `length` tokens, in as many blocks as the pool has."""
        blocks = [j % self.num_blocks for j in range(-(-length // self.block_size))]
        return NewRequest(("warm-up", index), 0, [0] * length, [], params, [blocks] * self.num_groups)
