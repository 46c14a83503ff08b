"""Reads the shape that a request demands of its answers, from OpenAI's, vLLM's or vLLM's older fields."""

import msgspec

from pdkv.errors import InvalidRequest
from pdkv.parsers.answer_grammar import AskedShape
from pdkv.router.http.read.bodies import ChatBody, CompletionBody, ResponseFormat, ShapeBody
from pdkv.sampling.shape import ASKED_AS, StructuredOutputs

_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}


def read_shape(body: CompletionBody | ChatBody) -> AskedShape | None:
    """The requested shape; None: free text. The content of a schema is not checked.

    Raises:
        InvalidRequest: two fields ask for a shape; or the one that does specifies none, or several, or lacks a required
            part.
    """
    given = {name: getattr(body, name) for name in ("response_format", "structured_outputs", *_GUIDED)}
    is_text = body.response_format is not None and body.response_format.type == "text"
    asked = [name for name in given if given[name] is not None and not (is_text and name == "response_format")]
    if len(asked) > 1:
        raise InvalidRequest(
            f"{asked[0]} and {asked[1]} both give the answer a shape: send at most one of them", param=asked[1]
        )
    if body.response_format is not None:
        _check_fields(body.response_format)
    if not asked:
        return None
    [name] = asked
    match given[name]:
        case ResponseFormat() as format:
            return _of_response_format(format)
        case ShapeBody() as outputs:
            return _of_structured_outputs(outputs)
        case value:
            return AskedShape(msgspec.convert({_GUIDED[name]: value}, StructuredOutputs), name)


def _check_fields(given: ResponseFormat) -> None:
    """Check that each given field belongs to the type."""
    fields = ("json_schema", "format", "structures", "triggers")
    own = {"json_schema": fields[:1], "structural_tag": fields[1:]}.get(given.type, ())
    for name in fields:
        if getattr(given, name) is not None and name not in own:
            needed = "json_schema" if name == "json_schema" else "structural_tag"
            raise InvalidRequest(
                f"response_format.{name} requires response_format.type {needed!r}, got {given.type!r}",
                param=f"response_format.{name}",
            )


def _of_response_format(given: ResponseFormat) -> AskedShape:
    if given.type == "json_object":
        return AskedShape(StructuredOutputs(json_object=True), "response_format")
    if given.type == "structural_tag":
        tag = {
            name: value
            for name in ("type", "format", "structures", "triggers")
            if (value := getattr(given, name)) is not None
        }
        return AskedShape(StructuredOutputs(structural_tag=tag), "response_format")
    if given.json_schema is None or given.json_schema.schema is None:
        missing = "response_format.json_schema" + ("" if given.json_schema is None else ".schema")
        raise InvalidRequest(f"{missing} is required with response_format.type 'json_schema'", param=missing)
    return AskedShape(StructuredOutputs(json=given.json_schema.schema), "response_format.json_schema.schema")


def _of_structured_outputs(given: ShapeBody) -> AskedShape:
    outputs = msgspec.convert({name: getattr(given, name) for name in ASKED_AS}, StructuredOutputs)
    try:
        return AskedShape(outputs, f"structured_outputs.{outputs.asked_as}")
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param="structured_outputs") from None
