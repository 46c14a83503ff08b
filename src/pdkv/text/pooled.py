"""What becomes of what an engine pools of a prompt: an embedding, or a score. Without numpy, which routers lack."""

import math
from array import array
from operator import mul

from pdkv.errors import InvalidRequest, NonFiniteLogits
from pdkv.sampling.params import SamplingParams
from pdkv.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What a ranker is told unless a request says otherwise."""

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


def embedding_of(pooled: bytes, *, dimensions: int | None = None, normalize: bool = True) -> "array[float]":
    """The first `dimensions` numbers (None: all) of a pooled state, float32, divided by their Euclidean norm.

    Raises:
        NonFiniteLogits: the model computed NaN or infinity.
    """
    state = array("f", pooled)[:dimensions]
    norm = math.sqrt(sum(map(mul, state, state)))
    if not math.isfinite(norm):
        raise NonFiniteLogits("the embedding has numbers that are not finite", request_id="")
    return array("f", (number / max(norm, 1e-12) for number in state)) if normalize else state


def score_of(pooled: bytes) -> float:
    """The probability of yes, of the logits of no and yes. Raises NonFiniteLogits."""
    no, yes = array("f", pooled)
    if not math.isfinite(yes - no):
        raise NonFiniteLogits("the score is not finite", request_id="")
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


def judging(tokenizer: Tokenizer) -> SamplingParams:
    """The parameters of a prompt of `judged_text`. Raises InvalidRequest if the answers are not one token each."""
    answers = [tokenizer.encode(word, add_special_tokens=False) for word in ("no", "yes")]
    if any(len(ids) != 1 for ids in answers):
        raise InvalidRequest(f"the tokenizer must have one token for no and one for yes, it has {answers}: no ranking")
    ids = tuple(token_id for [token_id] in answers)
    return SamplingParams(max_tokens=1, temperature=0.0, pooling="logits", allowed_token_ids=ids)


def judged_text(tokenizer: Tokenizer, query: str, document: str, instruction: str = INSTRUCTION) -> str:
    """The prompt that asks whether a document is one for the query, as Qwen3-Reranker was trained.

    Raises:
        InvalidRequest: the model has no chat template.
    """
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}]
    return tokenizer.render_chat(messages, add_generation_prompt=True, variables={"enable_thinking": False})
