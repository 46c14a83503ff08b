"""Beam search on top of an engine: a step is one token of each beam, and the beams' common tokens are prefix hits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from pdkv.errors import InvalidRequest
from pdkv.offline.outputs import Logprobs, RequestOutput
from pdkv.offline.requests import RequestMaker, TokensPrompt
from pdkv.sampling.params import MAX_LOGPROBS, SamplingParams, as_type


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """How many sequences are kept, and when they end."""

    beam_width: Annotated[int, Meta(ge=1, le=MAX_LOGPROBS // 2)]
    max_tokens: Annotated[int, Meta(ge=1)]
    ignore_eos: bool = False
    temperature: float = 0.0  # no effect: beams are compared by the model's own probabilities
    # a sequence's score is its log probability / its length to this power
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    include_stop_str_in_output: bool = False  # keep the end of sequence in the text


@dataclass
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]  # tokens of prompt and output
    logprobs: list[Logprobs] = field(default_factory=list)  # of each output token
    cum_logprob: float = 0.0
    text: str | None = None  # text of all tokens, once the beam is returned
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def score(self, length_penalty: float) -> float:
        """The value by which beams are compared; an end of sequence does not count as length."""
        length = len(self.tokens) - (self.finish_reason == "stop")
        return self.cum_logprob / float(max(length, 1) ** length_penalty)


@dataclass
class BeamSearchOutput:
    """The best sequences of a prompt, best first; at most `beam_width`."""

    sequences: list[BeamSearchSequence]


def search(
    prompts: Sequence[TokensPrompt],
    params: BeamSearchParams,
    model: RequestMaker,
    generate: Callable[[Sequence[TokensPrompt], SamplingParams], list[RequestOutput]],
) -> list[BeamSearchOutput]:
    """The best sequences of prompts.

    Args:
        generate: completes token ids; called once per output token.

    Raises:
        InvalidRequest: a wrong parameter. Also raises what `generate` raises.
    """
    if not isinstance(params, BeamSearchParams):
        raise InvalidRequest(f"params must be BeamSearchParams, got {params!r:.80}", param="params")
    for item in msgspec.structs.fields(BeamSearchParams):
        as_type(getattr(params, item.name), item.type, item.name)
    width = params.beam_width
    one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * width, ignore_eos=True)
    ends = () if params.ignore_eos else model.eos_token_ids
    beams = [[BeamSearchSequence(prompt["prompt_token_ids"])] for prompt in prompts]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]

    def best(sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=lambda beam: beam.score(params.length_penalty), reverse=True)[:width]

    for _ in range(params.max_tokens):
        each = zip(prompts, beams, strict=True)
        live = [{**prompt, "prompt_token_ids": beam.tokens} for prompt, of_prompt in each for beam in of_prompt]
        if not live:
            break
        outputs = iter(generate(live, one))
        for index, of_prompt in enumerate(beams):
            grown = [_grow(beam, next(outputs), ends) for beam in of_prompt]
            candidates = [beam for of_beam in grown for beam in of_beam]
            ended[index] += [beam for beam in candidates if beam.finish_reason]
            going_on = best([beam for beam in candidates if not beam.finish_reason])
            is_full = bool(going_on) and len(going_on[0].tokens) >= model.max_len
            ended[index] += going_on if is_full else []
            beams[index] = [] if is_full else going_on
    found = [best(done + going) for done, going in zip(ended, beams, strict=True)]
    for beam in (beam for sequences in found for beam in sequences):
        hides_end = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        shown = beam.tokens[:-1] if hides_end else beam.tokens
        beam.text = model.tokenizer.decode(shown, skip_special_tokens=False)
    return [BeamSearchOutput(sequences) for sequences in found]


def _grow(beam: BeamSearchSequence, output: RequestOutput, ends: Sequence[int]) -> list[BeamSearchSequence]:
    """The beam with each of the likeliest next tokens."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, "logprobs were requested"
    return [
        BeamSearchSequence(
            [*beam.tokens, token_id],
            [*beam.logprobs, logprobs[0]],
            beam.cum_logprob + entry.logprob,
            finish_reason="stop" if token_id in ends else None,
        )
        for token_id, entry in logprobs[0].items()
    ]
