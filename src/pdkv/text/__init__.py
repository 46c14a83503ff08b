"""Tokenizer, chat template, incremental detokenizer and stop strings. No torch, no transformers."""

from pdkv.text.bad_words import with_bad_word_ids
from pdkv.text.chat_template import ChatTemplate
from pdkv.text.detokenizer import Detokenizer
from pdkv.text.stop_strings import StopAutomaton, StopStrings
from pdkv.text.text_stream import TextPiece, TextStream
from pdkv.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopAutomaton",
    "StopStrings",
    "TextPiece",
    "TextStream",
    "Tokenizer",
    "load_tokenizer",
    "with_bad_word_ids",
]
