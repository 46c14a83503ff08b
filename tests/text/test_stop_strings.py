"""Stop strings: cut from the text, held back while they may come, the same for every cut into deltas."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.text import StopAutomaton, StopStrings
from tests.conftest import EXAMPLES

WORD = st.text("abé", min_size=1, max_size=5)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=100 * EXAMPLES)
@given(deltas=st.lists(st.text("abé", max_size=6), max_size=8), stops=st.lists(WORD, min_size=1, max_size=4))
def test_the_first_completed_stop_string_cuts_the_text(deltas: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown, found = "", None
    text, stop = expected("".join(deltas), stops)
    for delta in deltas:
        piece, found = matcher.push(delta)
        shown += piece
        assert text.startswith(shown)  # nothing is shown that is cut later
        if found is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, found) == (text, stop)


@settings(max_examples=40 * EXAMPLES)
@given(text=st.text("ab", max_size=12), stops=st.lists(WORD, min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    piece, found = StopStrings(stops).push(text)
    if found is None:
        held = text[len(piece) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_across_deltas_is_never_shown() -> None:
    matcher = StopStrings(["END", "\n\n"])
    assert matcher.push("one E") == ("one ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("ter\n") == ("ENter", None)
    assert matcher.push("\nmore") == ("", "\n\n")


def test_a_stop_string_that_is_not_accepted_stays_in_the_text() -> None:
    matcher = StopStrings(["ab"])
    assert matcher.push("xab", accept=False) == ("xab", None)
    assert matcher.push("ab") == ("", "ab")


def test_the_end_of_one_that_was_not_accepted_may_begin_the_next() -> None:
    matcher = StopStrings(["aa"])
    assert matcher.push("xaa", accept=False) == ("xa", None)
    assert matcher.push("a") == ("", "aa")


@settings(max_examples=60 * EXAMPLES)
@given(
    deltas=st.lists(st.tuples(st.text("abé", max_size=6), st.booleans()), max_size=8),
    stops=st.lists(WORD, min_size=1, max_size=4),
)
def test_what_is_shown_and_held_is_the_text(deltas: list[tuple[str, bool]], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown, text = "", ""
    for delta, accept in deltas:
        piece, found = matcher.push(delta, accept=accept)
        shown, text = shown + piece, text + delta
        if found is not None:
            assert text.startswith(shown + found)
            return
        held = text[len(shown) :]
        assert text.startswith(shown)
        longest = max(
            (n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) and len(s) > n for s in stops)),
            default=0,
        )
        assert len(held) == longest
    assert shown + matcher.flush() == text


def test_choices_share_one_automaton_and_have_their_own_states() -> None:
    automaton = StopAutomaton(["abc", "b"])
    one, other = StopStrings(automaton), StopStrings(automaton)
    assert one.push("xa") == ("x", None)
    assert other.push("b") == ("", "b")
    assert one.push("bc") == ("a", "b")


def test_the_worst_stop_strings_cost_a_state_per_character() -> None:
    """A text that matches them all but for the last character: the work is one table, not one per stop string."""
    stops = ["a" * length + "b" for length in range(2, 66)]
    automaton = StopAutomaton(stops)
    assert len(automaton._depths) == 65 + 64 + 1
    text, found = StopStrings(automaton).push("a" * 100_000 + "c")
    assert (len(text), found) == (100_001, None)
