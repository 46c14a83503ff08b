"""Masks of a step's rows: behind the output, behind each draft, and nowhere else."""

from collections.abc import Collection, Sequence

import numpy as np
import pytest
import torch

from pdkv.config import DEFAULT_MODEL
from pdkv.engine.batch import PersistentBatch
from pdkv.engine.drafts import DrawRows
from pdkv.engine.masks import GrammarMasks
from pdkv.engine.plan import NewRequest
from pdkv.engine.sampling.logit_processors import TokenMasks
from pdkv.errors import GrammarGivenUp, InvalidRequest
from pdkv.grammar.compiled import CompiledGrammar, serialize
from pdkv.grammar.compiling import Compiler
from pdkv.grammar.spec import Grammar
from pdkv.grammar.vocabulary import Vocabulary
from pdkv.models.config import load_model_config
from pdkv.sampling_params import SamplingParams
from pdkv.text import Tokenizer

CONFIG = load_model_config(DEFAULT_MODEL)
EOS = CONFIG.eos_token_ids[0]
PROMPT = [5, 6, 7]
FIRST = 7  # number of a batch's first grammar


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(DEFAULT_MODEL, CONFIG.vocab_size, CONFIG.eos_token_ids)


class Batch:
    """A batch whose requests draw in every step, with grammars that some of them have."""

    def __init__(self, vocabulary: Vocabulary, *grammars: Grammar | str, max_len: int = 64) -> None:
        self.masks = GrammarMasks(CONFIG.vocab_size, CONFIG.eos_token_ids)
        for number, asked in enumerate(grammars, FIRST):
            grammar = Grammar("regex", asked) if isinstance(asked, str) else asked
            data = serialize(Compiler(vocabulary).compile(grammar), grammar)
            self.masks.learn({number: CompiledGrammar.from_bytes(data, vocabulary)}, [])
        self.batch = PersistentBatch(8, max_len, 16)
        self._slots: list[int] = []

    def add(self, output: Sequence[int] = (), *, grammar: int | None = FIRST, **params: object) -> int:
        """Returns the slot."""
        new = NewRequest(
            (f"r{len(self._slots)}", 0), 0, PROMPT, list(output), SamplingParams(**params),  # type: ignore[arg-type]
            [[0, 1, 2, 3]], grammar,
        )  # fmt: skip
        slot = self.batch.add(new)
        self.masks.add(slot, new)
        self._slots.append(slot)
        return slot

    def rows(self, drafts: Sequence[Sequence[int]] = ()) -> DrawRows:
        """Those of a step with these drafts, by request."""
        drafts = drafts or [[]] * len(self._slots)
        for slot, guesses in zip(self._slots, drafts, strict=True):
            self.batch.propose(slot, guesses)
        counts = np.array([1 + len(guesses) for guesses in drafts])
        starts = np.cumsum(counts) - counts
        slots = np.repeat(self._slots, counts)
        behind = np.arange(counts.sum()) - np.repeat(starts, counts)
        return DrawRows(
            np.arange(len(counts)), starts, np.arange(counts.sum()), slots, self.batch.num_tokens[slots] + behind
        )

    def fill(self, drafts: Sequence[Sequence[int]] = ()) -> TokenMasks | None:
        return self.masks.fill(self.rows(drafts), self.batch)

    def draw(self, *tokens: int) -> None:
        """Each request draws one token."""
        drawn = self.rows()
        counts = np.ones(len(tokens), np.int64)
        self.masks.accept(drawn, np.array(tokens), counts)
        self.batch.append_tokens(drawn.slots, drawn.num_tokens, np.array(tokens))


def allowed(masks: TokenMasks | None, row: int) -> set[int]:
    """Tokens that the mask of a row of the logits allows."""
    assert masks is not None
    at = masks.rows.tolist().index(row)
    bits = np.unpackbits(masks.bits[at].numpy().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def ids(tokenizer: Tokenizer, texts: Collection[str]) -> list[int]:
    """A token for each character."""
    found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert all(len(one) == 1 for one in found), found
    return [one[0] for one in found]


def test_rows_without_a_grammar_have_no_mask(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    batch = Batch(vocabulary, "[01]{3}")
    batch.add(grammar=None)
    assert batch.fill() is None
    batch.add()
    batch.add(grammar=None)
    masks = batch.fill()
    assert masks is not None
    assert masks.rows.tolist() == [1]
    zero, one = ids(tokenizer, "01")
    assert {zero, one} <= allowed(masks, 1)
    assert EOS not in allowed(masks, 1)


def test_replayed_and_drawn_outputs_have_the_same_masks(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    output = ids(tokenizer, "0110")
    drawing = Batch(vocabulary, "[01]{4}")
    drawing.add()
    for i, token in enumerate(output):
        joining = Batch(vocabulary, "[01]{4}")
        joining.add(output[:i])
        assert allowed(drawing.fill(), 0) == allowed(joining.fill(), 0)
        drawing.draw(token)
    assert allowed(drawing.fill(), 0) == {EOS}
    drawing.draw(EOS)
    assert drawing.fill() is None  # what is drawn behind the end is thrown away


def test_a_row_behind_drafts_has_the_mask_behind_them(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    zero, one, two = ids(tokenizer, "012")
    batch = Batch(vocabulary, "(01|10)+")
    batch.add()
    batch.add(grammar=None)
    batch.add([one])
    for _ in range(2):  # what was tried leaves no trace
        masks = batch.fill([[zero, one, two, zero], [one], [zero, EOS, zero]])
        assert masks is not None
        assert masks.rows.tolist() == [0, 1, 2, 7, 8]  # none behind `two`, none behind the end
        assert allowed(masks, 1) & {zero, one} == {one}
        assert {zero, one, EOS} <= allowed(masks, 2)
        assert allowed(masks, 7) & {zero, one, EOS} == {zero}
        assert {zero, one, EOS} <= allowed(masks, 8)
    drawn = batch.rows([[zero, one, two], [], [zero]])
    tokens = np.array([zero, one, zero, 0, 0, zero, one])
    batch.masks.accept(drawn, tokens, np.array([3, 1, 2]))
    assert not batch.masks.failures
    after = batch.fill()
    assert allowed(after, 0) & {zero, one, EOS} == {one}
    assert allowed(after, 2) & {zero, one, EOS} == {zero}


def test_a_request_s_own_stop_tokens_may_end_what_is_complete(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    zero, one = ids(tokenizer, "01")
    batch = Batch(vocabulary, "0+")
    batch.add(stop_token_ids=(one,))
    assert one not in allowed(batch.fill(), 0)
    batch.draw(zero)
    assert {zero, one, EOS} <= allowed(batch.fill(), 0)
    batch.draw(one)
    assert batch.fill() is None
    assert not batch.masks.failures


def test_an_output_that_its_grammar_refuses_fails_its_request_alone(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    zero, one = ids(tokenizer, "01")
    batch = Batch(vocabulary, "0+")
    batch.add([zero, zero])
    slot = batch.add([zero, one])
    masks = batch.fill()
    assert masks is not None
    assert masks.rows.tolist() == [0]
    failure = batch.masks.failures["r1", 0]
    assert failure.code == InvalidRequest.code
    assert f"token {one}, behind 1 others" in failure.message
    batch.masks.remove(slot)
    assert not batch.masks.failures


def test_a_grammar_whose_work_grows_with_the_answer_ends_with_all_its_answers(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    """The others go on."""
    [a] = ids(tokenizer, "a")
    batch = Batch(vocabulary, "a*", Grammar("ebnf", 'root ::= root root root | "a" | ""'), max_len=2048)
    batch.add()
    for _ in range(6):
        batch.add(grammar=FIRST + 1)
    batch.add()
    while not batch.masks.failures:
        batch.fill()
        batch.draw(*[a] * 8)
    assert set(batch.masks.failures) == {(f"r{i}", 0) for i in range(1, 7)}
    assert {failure.code for failure in batch.masks.failures.values()} == {GrammarGivenUp.code}


def test_a_mask_has_no_token_behind_the_vocabulary(vocabulary: Vocabulary) -> None:
    batch = Batch(vocabulary, ".*")
    batch.add()
    masks = batch.fill()
    assert max(allowed(masks, 0)) < CONFIG.vocab_size
    assert masks is not None
    assert masks.bits.dtype == torch.int32
