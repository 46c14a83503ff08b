"""Replies to requests for embeddings and rankings."""

import base64
import functools
from typing import Any

import msgspec

from pdkv.router.http.answer.choice import ChoiceDelta, TokenCounts, usage
from pdkv.router.http.answer.replies import Asked, Work
from pdkv.router.http.read.job import PooledForm
from pdkv.text.pooled import embedding_of, score_of

_NUMBERS_PER_LOGPROB = 16
"""Numbers of an embedding that take as long to encode as the logprob of a token."""


class WholePooled:
    """Gathers what is pooled of all prompts of a reply."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._pooled = [b""] * len(asked.choices)

    def add(self, delta: ChoiceDelta) -> None:
        """Add the next delta of a choice."""
        self._pooled[delta.choice] = delta.pooled or self._pooled[delta.choice]

    @property
    def num_logprobs(self) -> int:
        """The work to encode it, as a number of tokens whose logprobs are shown."""
        return sum(map(len, self._pooled)) // (4 * _NUMBERS_PER_LOGPROB)

    async def body(self, counts: TokenCounts, work: Work) -> dict[str, Any]:
        """The reply; embeddings are encoded one by one.

        Raises:
            NonFiniteLogits: the model computed NaN or infinity.
        """
        asked = self._asked
        form, body = asked.job.pooled, {"model": asked.model.name, "usage": usage(counts)}
        if form.documents:
            return {"id": "rerank-" + asked.serial, **body, "results": _ranking(self._pooled, form)}
        data = [await work(functools.partial(_entry, i, pooled, form)) for i, pooled in enumerate(self._pooled)]
        head = {"id": "embd-" + asked.serial, "object": "list", "created": asked.created}
        return {**head, **body, "data": data}


def _entry(index: int, pooled: bytes, form: PooledForm) -> msgspec.Raw:
    """The entry of `data`, as JSON."""
    embedding = embedding_of(pooled, dimensions=form.dimensions, normalize=form.normalize)
    shown = base64.b64encode(embedding.tobytes()).decode() if form.base64 else embedding.tolist()
    return msgspec.Raw(msgspec.json.encode({"index": index, "object": "embedding", "embedding": shown}))


def _ranking(pooled: list[bytes], form: PooledForm) -> list[dict[str, Any]]:
    """The documents by score, the best first; of equal ones, in their order."""
    scores = [*map(score_of, pooled)]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: form.top_n]
    shown = [{"document": {"text": form.documents[i]}} if form.shows_documents else {} for i in best]
    return [{"index": i, **document, "relevance_score": scores[i]} for i, document in zip(best, shown, strict=True)]
