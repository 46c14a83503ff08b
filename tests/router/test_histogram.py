"""Counts by upper bound, as Prometheus means them."""

from pdkv.router.histogram import Histogram


def test_a_value_counts_in_every_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram([1.0, 0.1, 10.0, 1.0])
    for value in (0.0, 0.1, 0.11, 1.0, 9.0, 10.0, 11.0):
        histogram.observe(value)
    assert histogram.bounds == (0.1, 1.0, 10.0)
    assert histogram.cumulative((0.1, 1.0, 10.0)) == [2, 4, 6]
    assert histogram.cumulative((1.0,)) == [4]
    assert histogram.count == 7
    assert histogram.sum == sum((0.0, 0.1, 0.11, 1.0, 9.0, 10.0, 11.0))
