"""The order in which grammars are compiled."""

from pdkv.grammar.spec import Grammar
from pdkv.grammar.waiting import Lane, WaitingGrammars, Wanted


def wanted(num_characters: int) -> Wanted:
    return Wanted(Grammar("ebnf", "x" * num_characters))


def test_the_shortest_text_comes_first() -> None:
    waiting = WaitingGrammars(10, 1 << 20)
    for size in (9000, 20, 5000):
        waiting.put(wanted(size), Lane.FAST)
    order = [waiting.pop(Lane.FAST) for _ in range(3)]
    assert [len(found.grammar.text) for found in order if found] == [20, 5000, 9000]
    assert waiting.pop(Lane.FAST) is None


def test_a_flow_of_short_ones_does_not_hold_up_a_long_one_for_ever() -> None:
    waiting = WaitingGrammars(10, 1 << 20)
    long = wanted(100_000)
    waiting.put(long, Lane.FAST)
    waiting.put(wanted(20), Lane.FAST)
    num_before = 0
    while num_before < 1000 and waiting.pop(Lane.FAST) is not long:
        waiting.put(wanted(20), Lane.FAST)
        num_before += 1
    assert 10 < num_before < 200
