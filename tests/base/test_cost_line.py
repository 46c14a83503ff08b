"""Costs as a line over an amount."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.base.cost_line import Line


@given(
    intercept=st.floats(0, 1),
    slope=st.floats(1e-9, 1e-3),
    amounts=st.lists(st.integers(1, 10**6), min_size=5, max_size=30, unique=True),
)
def test_a_line_finds_what_its_measurements_lie_on(intercept: float, slope: float, amounts: list[int]) -> None:
    line = Line()
    for amount in amounts:
        line.add(amount, intercept + slope * amount)
    at_rest, per_unit = line.fit()
    assert at_rest >= 0
    assert per_unit >= 0
    last = amounts[-1]
    if max(amounts[-5:]) > 10 * min(amounts[-5:]):  # they differ enough to tell the two parts
        assert at_rest + per_unit * last == pytest.approx(intercept + slope * last, rel=0.05, abs=1e-6)


def test_equal_amounts_make_a_line_through_the_origin() -> None:
    line = Line()
    assert not line.known
    for _ in range(5):
        line.add(100, 0.2)
    assert line.fit() == (0.0, pytest.approx(0.002))


def test_what_was_measured_long_ago_is_forgotten_and_nothing_is_no_measurement() -> None:
    line = Line()
    for seconds in [1.0] * 20 + [0.01] * 60:
        line.add(1000, seconds)
        line.add(0, seconds)
    assert line.fit()[1] == pytest.approx(0.01 / 1000, rel=0.2)
