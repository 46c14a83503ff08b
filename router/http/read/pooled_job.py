"""Turns a request for embeddings or a ranking into a job: a generation of one token per text, which is not shown."""

from pdkv.base.limits import MAX_INPUTS
from pdkv.errors import InvalidRequest
from pdkv.router.http.read.bodies import EmbeddingBody, RerankBody
from pdkv.router.http.read.job import Job, PooledForm, check_priority, check_total, lacking
from pdkv.router.http.read.prompts import (
    Prompt,
    check_chars,
    check_length,
    encode,
    longest,
    read_prompts,
    read_truncation,
)
from pdkv.router.http.read.served_model import Cancelled, ServedModel
from pdkv.sampling.params import SamplingParams
from pdkv.text.pooled import INSTRUCTION, judged_text, judging


def prepare_embedding(body: EmbeddingBody, model: ServedModel, cancelled: Cancelled = lambda: False) -> Job:
    """Check and tokenize a request for embeddings.

    Raises:
        InvalidRequest: names the field and what was expected.
        RequestAborted: the request was cancelled.
    """
    _check(body, model, "input")
    params = SamplingParams(max_tokens=1, temperature=0.0, pooling=model.pooling.checked_kind())
    model.pooling.check_dimensions(body.dimensions)
    truncation = read_truncation(body.truncate_prompt_tokens, body.truncation_side or "right", model)
    special = body.add_special_tokens is not False
    prompts = read_prompts(
        body.input,
        1,
        model,
        cancelled,
        add_special_tokens=special,
        truncation=truncation,
        most=MAX_INPUTS,
        param="input",
    )
    form = PooledForm(body.dimensions, body.normalize is not False, body.encoding_format == "base64")
    return _job(body, prompts, params, form, model, "input")


def prepare_rerank(body: RerankBody, model: ServedModel, cancelled: Cancelled = lambda: False) -> Job:
    """Check, render and tokenize a request for a ranking; raises the same as `prepare_embedding`."""
    num, top_n = len(body.documents), body.top_n
    if not 1 <= num <= MAX_INPUTS:
        raise InvalidRequest(f"documents must be 1 to {MAX_INPUTS}, got {num}", param="documents")
    if top_n is not None and top_n < 1:
        raise InvalidRequest(f"top_n must be at least 1, got {top_n}", param="top_n")
    _check(body, model, "documents")
    params, instruction = judging(model.tokenizer), INSTRUCTION if body.instruction is None else body.instruction
    documents = [given if isinstance(given, str) else given.text for given in body.documents]
    prompts, num_tokens = [], 0
    for document in documents:
        check_chars(len(body.query) + len(instruction) + len(document), model, "documents")
        text = judged_text(model.tokenizer, body.query, document, instruction)
        ids = encode(text, model, "documents", cancelled, add_special_tokens=False)
        num_tokens += len(ids)
        check_total(num_tokens, 1, "documents")  # before the next: each has the query again
        prompts.append(Prompt(ids, None))
    form = PooledForm(documents=documents, top_n=top_n, shows_documents=body.return_documents is not False)
    return _job(body, prompts, params, form, model, "documents")


def _check(body: EmbeddingBody | RerankBody, model: ServedModel, param: str) -> None:
    """Check what needs no tokenizer."""
    check_priority(body.priority)
    if (engine := model.lacks.get("pooling")) is not None:
        raise lacking(param, engine)


def _job(
    body: EmbeddingBody | RerankBody,
    prompts: list[Prompt],
    params: SamplingParams,
    form: PooledForm,
    model: ServedModel,
    param: str,
) -> Job:
    check_length(longest(prompts), None, model, param)
    check_total(sum(len(prompt.token_ids) for prompt in prompts), 1, param)
    return Job(
        chat=False,
        prompts=prompts,
        params=params,
        n=1,
        stream=False,
        include_usage=False,
        prompt_only=True,
        priority=body.priority or 0,
        pooled=form,
    )
