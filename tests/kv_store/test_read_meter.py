"""Bytes that were read, and the seconds in which anybody was reading."""

from pdkv.kv_store.read_meter import ReadMeter, ReadTime


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_reads_at_the_same_time_share_their_seconds() -> None:
    clock = Clock()
    meter = ReadMeter(clock)
    first, second = meter.reading(), meter.reading()
    first.__enter__()
    clock.now = 1.0
    second.__enter__()
    clock.now = 3.0
    first.__exit__(None, None, None)
    meter.add(10)
    assert meter.total == ReadTime(10, 3.0), "somebody still reads"
    clock.now = 4.0
    second.__exit__(None, None, None)
    clock.now = 9.0
    with meter.reading():
        clock.now = 9.5
    assert meter.total == ReadTime(10, 4.5)


def test_a_read_that_fails_takes_its_time_too() -> None:
    clock = Clock()
    meter = ReadMeter(clock)
    reading = meter.reading()
    reading.__enter__()
    clock.now = 2.0
    assert not reading.__exit__(OSError, OSError("gone"), None), "the error goes on"
    assert meter.total == ReadTime(0, 2.0)
