"""Bytes that were read, and the seconds in which anybody was reading."""

from pdkv.kv_store.read_meter import ReadMeter, ReadTime
from pdkv.testing import VirtualClock


def test_reads_at_the_same_time_share_their_seconds() -> None:
    clock = VirtualClock()
    meter = ReadMeter(clock.now)
    first, second = meter.reading(), meter.reading()
    first.__enter__()
    clock.advance(1)
    second.__enter__()
    clock.advance(2)
    first.__exit__(None, None, None)
    meter.add(10)
    assert meter.total == ReadTime(10, 3.0), "somebody still reads"
    clock.advance(1)
    second.__exit__(None, None, None)
    clock.advance(5)
    with meter.reading():
        clock.advance(0.5)
    assert meter.total == ReadTime(10, 4.5)


def test_a_read_that_fails_takes_its_time_too() -> None:
    clock = VirtualClock()
    meter = ReadMeter(clock.now)
    reading = meter.reading()
    reading.__enter__()
    clock.advance(2)
    assert not reading.__exit__(OSError, OSError("gone"), None), "the error goes on"
    assert meter.total == ReadTime(0, 2.0)
