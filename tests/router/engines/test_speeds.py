"""Reading KV against computing it again, by what both took lately."""

import pytest

from pdkv.router.engines.speeds import CONTEXT_STEPS, LATELY_S, LOAD_PATIENCE, MIN_LOAD_TIMEOUT_S, Costs, Speeds


@pytest.mark.parametrize(
    ("load_s", "compute_s", "loads"),
    [(None, 1.0, True), (0.1, None, True), (None, None, True), (0.1, 0.2, True), (0.2, 0.1, False), (0.1, 0.1, False)],
)
def test_the_cheaper_way_is_taken_and_the_unknown_is_tried(
    load_s: float | None, compute_s: float | None, loads: bool
) -> None:
    assert Costs(load_s, compute_s).prefers_load is loads


def test_a_load_may_take_a_multiple_of_computing() -> None:
    assert Costs(0.1, None).load_timeout_s == 0.0  # its own deadline
    assert Costs(0.1, 0.01).load_timeout_s == MIN_LOAD_TIMEOUT_S
    assert Costs(0.1, 5.0).load_timeout_s == LOAD_PATIENCE * 5.0


def test_loans_that_come_to_nothing_are_left_alone_for_a_while_and_then_tried_again() -> None:
    speeds = Speeds()
    speeds.computed("p", 100, 1.0)
    speeds.loaded(1000, 0.1)

    def is_preferred() -> bool:
        return speeds.costs("p", 100, 1000).prefers_load

    num_failed = 0
    while is_preferred():
        speeds.lost(0.01 + 1.0)  # evicted meanwhile, and computed
        num_failed += 1
    assert 5 < num_failed < 50
    num_computed = 0
    while not is_preferred():
        speeds.computed("p", 100, 1.0)
        num_computed += 1
    assert num_computed < 50
    for _ in range(50):
        speeds.lent()
    assert speeds.costs("p", 100, 1000).load_s == pytest.approx(0.1, rel=0.05)


def test_a_load_costs_an_answer_its_beginning_and_its_bytes_and_computing_only_its_tokens() -> None:
    speeds = Speeds()
    assert speeds.costs("p", 100, 1000) == Costs(None, None)
    for i in range(1, 30):
        speeds.loaded(i << 20, 0.002 + (i << 20) / 1e9)
        speeds.answered(0.004)
        speeds.computed("p", 100 * i, 0.05 + 100 * i / 2000)
    costs = speeds.costs("p", 4000, 64 << 20)
    assert costs.load_s == pytest.approx(0.004 + 0.002 + (64 << 20) / 1e9, rel=0.01)
    assert costs.compute_s == pytest.approx(2.0, rel=0.01)  # another token more or less does not begin a step
    assert speeds.costs("q", 4000, 64 << 20).compute_s is None
    speeds.forget("p")
    assert speeds.costs("p", 4000, 64 << 20).compute_s is None


def test_engines_are_compared_by_the_time_of_as_much_work_and_only_while_they_were_measured_lately() -> None:
    speeds = Speeds()
    for i in range(1, 40):
        for engine, token_s in (("a", 0.001), ("b", 0.001), ("slow", 0.002)):
            speeds.worked(engine, 100 * i, 0.01 + token_s * 100 * i, 1.0)
    engines = ("a", "b", "slow", "unknown")
    assert speeds.paces(engines, 2.0) == pytest.approx({"a": 1.0, "b": 1.0, "slow": 2.0}, rel=0.02)
    assert speeds.work_token_s("slow") == pytest.approx(0.002, rel=0.01)
    speeds.worked("a", 100, 0.11, 1.0 + LATELY_S)
    assert speeds.paces(engines, 1.5 + LATELY_S) == {"a": 1.0}
    speeds.forget("a")
    assert speeds.paces(engines, 1.5 + LATELY_S) == {}


def test_a_token_of_kv_weighs_what_it_takes_of_steps_beside_what_a_prompt_token_takes() -> None:
    speeds = Speeds()
    speeds.computed("e", 1000, 1.0)
    assert speeds.context_weight("e") is None
    for i in range(1, 40):
        speeds.decoded("e", i, 0.01 + 1e-6 * 1000 * i, 1000 * i)
    assert speeds.context_weight("e") == pytest.approx(CONTEXT_STEPS * 1e-6 / 1e-3, rel=0.01)


def test_a_pair_that_was_measured_counts_by_itself() -> None:
    speeds = Speeds()
    speeds.loaded(1000, 1.0, ("a", "b"))
    speeds.loaded(1000, 0.01, ("a", "c"))
    assert speeds.load_s(1000, ("a", "b")) == pytest.approx(1.0)
    assert 0.01 < speeds.load_s(1000, ("a", "d")) < 1.0, "as the others do"
    speeds.forget("b")
    assert speeds.load_s(1000, ("a", "b")) < 1.0
