"""A model's tokenizer with the methods that transformers has: the result of `LLM.get_tokenizer`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkv.text import Tokenizer


class ModelTokenizer:
    """Text to token ids, for one text at a time; `encode`, `decode` and `apply_chat_template` as in transformers."""

    def __init__(self, tokenizer: Tokenizer, model: Path, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.ids_by_text()
        self._eos_token_ids = eos_token_ids
        self.name_or_path = str(model)
        self.vocab_size = tokenizer.vocab_size
        self.all_special_ids = sorted(tokenizer.special_ids)
        self.chat_template = tokenizer.chat_template.source if tokenizer.chat_template else None

    def __len__(self) -> int:
        return self.vocab_size

    def __getattr__(self, name: str) -> Any:
        """Special tokens, such as bos_token, and their ids, such as bos_token_id; None if there is none."""
        if name.endswith("_token"):
            return self._tokenizer.special_tokens.get(name)
        if name.endswith("_token_id"):
            found = self._ids.get(getattr(self, name.removesuffix("_id")) or "")
            return self._eos_token_ids[0] if found is None and name == "eos_token_id" and self._eos_token_ids else found
        raise AttributeError(
            f"no {name!r} here; transformers.AutoTokenizer.from_pretrained({self.name_or_path!r}) has all"
        )

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        """`input_ids` and `attention_mask` of a text, or a list of them for several."""
        if not isinstance(text, str):
            each = [self(one, add_special_tokens=add_special_tokens) for one in text]
            return {name: [item[name] for item in each] for name in ("input_ids", "attention_mask")}
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode text to token ids. Raises InvalidRequest for half of a surrogate pair."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode token ids to text."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Decode several lists of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Convert ids to tokens as in the vocabulary."""
        return [self._tokenizer.token(token_id) for token_id in token_ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of one token, or those of several; None for one that is not in the vocabulary."""
        return self._ids.get(tokens) if isinstance(tokens, str) else [self._ids.get(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Token ids by token."""
        return dict(self._ids)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The prompt of a conversation: its text, or with `tokenize` its token ids. Raises InvalidRequest."""
        text = self._tokenizer.render_chat(
            conversation,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
