"""Grammars of another process's bytes: read once the vocabulary is there, or an error with a type."""

import threading
from functools import partial

import pytest

from pdkv.config import DEFAULT_MODEL
from pdkv.engine.ranks.grammars import GrammarReader
from pdkv.errors import ConfigError, PdkvError, RankTimeout
from pdkv.grammar.compiled import serialize
from pdkv.grammar.compiling import Compiler
from pdkv.grammar.spec import Grammar
from pdkv.grammar.vocabulary import Vocabulary
from pdkv.models.config import load_model_config

CONFIG = load_model_config(DEFAULT_MODEL)
load = partial(Vocabulary.load, DEFAULT_MODEL, CONFIG.vocab_size, CONFIG.eos_token_ids)


def test_a_grammar_is_read_and_nothing_is_loaded_before() -> None:
    grammar = Grammar("regex", "a+")
    data = serialize(Compiler(load()).compile(grammar), grammar)
    begun = threading.Event()

    def loaded() -> Vocabulary:
        begun.set()
        return load()

    reader = GrammarReader(loaded, 60.0)
    assert reader.read({}) == {}
    assert not begun.is_set()
    reader.expect()
    assert begun.wait(10.0)
    read = reader.read({3: data, 5: data})
    assert list(read) == [3, 5]
    assert read[3].serialized == data
    assert not read[5].matcher().has_ended


def test_a_vocabulary_that_does_not_come_is_a_timeout() -> None:
    comes = threading.Event()

    def loaded() -> Vocabulary:
        comes.wait(60.0)
        raise ConfigError("it came too late")

    reader = GrammarReader(loaded, 0.05)
    with pytest.raises(RankTimeout, match=r"not loaded within 0\.05 s"):
        reader.read({0: b""})
    comes.set()


@pytest.mark.parametrize("error", [ConfigError("no tokenizer"), OSError("no file")])
def test_what_loading_it_raises_has_a_type(error: Exception) -> None:
    def loaded() -> Vocabulary:
        raise error

    reader = GrammarReader(loaded, 10.0)
    with pytest.raises(PdkvError, match=str(error)):
        reader.read({0: b""})
