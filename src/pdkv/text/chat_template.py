"""A model's chat template: messages to prompt text, in a sandbox and with Hugging Face's helpers."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from pdkv.base.clock import unix_time
from pdkv.errors import InvalidRequest, ModelError
from pdkv.text.sandbox import REFUSALS, Render, compile_template
from pdkv.text.template_forms import ContentFormat, Messages, as_turns, find_forms

_OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
"""Variables of templates, and what else requests set by separate fields."""

_SOME_TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]

_FINAL_MESSAGE_ENDS = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put after the final message's content to find its end in the rendered text."""


class ChatTemplate:
    """One compiled template and the special tokens that it may use."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any],
        *,
        for_tools: bool = False,
        content_format: ContentFormat = "auto",
        now: Callable[[], datetime] = lambda: datetime.fromtimestamp(unix_time()),
        render: Render | None = None,
    ) -> None:
        """Compile `source`, and find out which formats it accepts.

        Args:
            special_tokens: variables of every rendering, such as bos_token.
            for_tools: its conversations have tools.
            content_format: the format of messages' content; "auto": detected.
            now: the clock of strftime_now.
            render: an already compiled template.

        Raises:
            ModelError: `source` is not a valid template, or it omits the user's messages.
        """
        self.source = source
        try:
            self._compiled = render or compile_template(source, now)
        except REFUSALS as error:
            raise ModelError(f"the chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._tools = (_SOME_TOOLS, None) if for_tools else (None, _SOME_TOOLS)
        self.forms = find_forms(self._probe, content_format)

    def _probe(self, turns: Messages) -> str | None:
        """The prompt of turns, with as few other variables as the template needs; None: it refuses them."""
        for lead, tools in itertools.product(([], [{"role": "system", "content": "x"}]), self._tools):
            with contextlib.suppress(InvalidRequest):
                return self._render([*lead, *turns], {"tools": tools, "add_generation_prompt": True})
        return None

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Args:
            messages: as clients write them; `as_turns` says how.
            add_generation_prompt: whether the text ends with the beginning of an assistant's turn.
            continue_final_message: whether it ends within the last message, the content of which must be a text.
            tools: functions that the template may describe; their `strict` is for the server, not for the model.
            variables: further variables of the template, such as enable_thinking.

        Raises:
            InvalidRequest: an invalid message (`as_turns`), the template refuses the messages (an unknown role, a wrong
                order), a variable has a reserved name, or the final message is not text or not found in the prompt.
        """
        if taken := sorted(_OWN_VARIABLES.intersection(variables or {})):
            raise InvalidRequest(f"chat_template_kwargs must not contain {taken[0]}", param="chat_template_kwargs")
        if continue_final_message:
            if not isinstance(content := messages[-1].get("content"), str):
                needed = "continue_final_message requires the content of the final message to be a string"
                raise InvalidRequest(needed, param="continue_final_message")
            messages = [*messages[:-1], {**messages[-1], "content": content + _FINAL_MESSAGE_ENDS}]
        told = tools and [_told(tool) for tool in tools]
        values = {**(variables or {}), "tools": told, "add_generation_prompt": add_generation_prompt}
        text = self._render(as_turns(messages, self.forms), values)
        return _cut_behind_final_message(text) if continue_final_message else text

    def _render(self, turns: Messages, variables: Mapping[str, Any]) -> str:
        try:
            return self._compiled({**self._special_tokens, **variables, "messages": turns, "documents": None})
        except REFUSALS as error:
            raise InvalidRequest(f"the chat template rejected these messages: {error}", param="messages") from error


def _told(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a model learns of a tool: all but `strict`, which no model was trained on."""
    described = tool.get("function")
    if not isinstance(described, Mapping):
        return tool
    return {**tool, "function": {name: value for name, value in described.items() if name != "strict"}}


def _cut_behind_final_message(text: str) -> str:
    """Transformers' rule: spaces at the message's end are kept if the template keeps them."""
    at = text.rfind(_FINAL_MESSAGE_ENDS.rstrip())
    if at < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template omits the end of the final message",
            param="continue_final_message",
        )
    kept = text.startswith(_FINAL_MESSAGE_ENDS, at)
    return text[:at] if kept else text[:at].rstrip()
