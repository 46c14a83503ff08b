"""Results of several ranks as one."""

from pdkv.connectors.base import NO_TRANSFERS, TransferKey, TransferOutcome, TransferResults
from pdkv.connectors.transfer.aggregator import TransferAggregator
from pdkv.errors import KVCorrupted

KEY, OTHER = TransferKey("t", 0), TransferKey("u", 1)


def sent(key: tuple[str, int] = KEY, num_bytes: int = 0, seconds: float = 0.0) -> TransferResults:
    return NO_TRANSFERS._replace(finished_sending={key: TransferOutcome("", num_bytes, seconds)})


def received(key: tuple[str, int] = KEY, num_bytes: int = 0, seconds: float = 0.0) -> TransferResults:
    return NO_TRANSFERS._replace(finished_receiving={key: TransferOutcome("", num_bytes, seconds)})


def not_received(code: str, key: tuple[str, int] = KEY, num_bytes: int = 0) -> TransferResults:
    return NO_TRANSFERS._replace(failed_receiving={key: TransferOutcome(code, num_bytes)})


def test_a_transfer_has_finished_when_every_rank_says_so() -> None:
    """F20: one rank's success is not all ranks' success."""
    aggregator = TransferAggregator(3)
    assert aggregator.add([received(num_bytes=5, seconds=0.5), NO_TRANSFERS, NO_TRANSFERS]) == NO_TRANSFERS
    assert aggregator.add([NO_TRANSFERS, NO_TRANSFERS, received(num_bytes=7, seconds=2.0)]) == NO_TRANSFERS
    assert aggregator.num_pending == 1
    done = aggregator.add([NO_TRANSFERS, received(num_bytes=1, seconds=1.0), NO_TRANSFERS])
    assert done.finished_receiving == {KEY: TransferOutcome("", 13, 2.0)}
    assert [len(outcomes) for outcomes in done] == [0, 0, 1, 0]
    assert aggregator.num_pending == 0


def test_all_ranks_in_one_step() -> None:
    done = TransferAggregator(2).add([sent(num_bytes=2), sent(num_bytes=3)])
    assert done.finished_sending == {KEY: TransferOutcome("", 5)}


def test_what_ranks_found_damaged_or_expired_adds_up() -> None:
    outcome = TransferOutcome("kv_not_found", num_damaged=1, num_expired=2)
    failed = NO_TRANSFERS._replace(failed_receiving={KEY: outcome})
    done = TransferAggregator(2).add([failed, failed])
    assert done.failed_receiving == {KEY: outcome._replace(num_damaged=2, num_expired=4)}


def test_a_failure_waits_until_every_rank_has_let_go() -> None:
    """F4: blocks that another rank still writes must not be given away; the first code wins, bytes still count."""
    aggregator = TransferAggregator(3)
    assert not aggregator.add([NO_TRANSFERS, not_received("peer_gone"), NO_TRANSFERS])
    assert not aggregator.add([received(num_bytes=9), NO_TRANSFERS, NO_TRANSFERS])
    done = aggregator.add([NO_TRANSFERS, NO_TRANSFERS, not_received("transfer_cancelled", num_bytes=2)])
    assert done.failed_receiving == {KEY: TransferOutcome("peer_gone", 11)}
    assert not done.finished_receiving


def test_that_kv_was_corrupted_is_said_even_if_another_rank_lost_its_peer_first() -> None:
    aggregator = TransferAggregator(3)
    ends = [TransferOutcome(code) for code in ("peer_gone", KVCorrupted.code, "transfer_timeout")]
    for rank, outcome in enumerate(ends):
        results = [NO_TRANSFERS] * 3
        results[rank] = NO_TRANSFERS._replace(failed_receiving={KEY: outcome})
        ended = aggregator.add(results)
    assert ended.failed_receiving[KEY].code == KVCorrupted.code


def test_directions_and_keys_are_separate() -> None:
    aggregator = TransferAggregator(2)
    assert not aggregator.add([sent(), received()])
    assert not aggregator.add([received(OTHER), sent(OTHER)])
    assert aggregator.num_pending == 4
    done = aggregator.add([received(), sent()])
    assert (set(done.finished_sending), set(done.finished_receiving)) == ({KEY}, {KEY})


def test_a_key_comes_again_after_its_end() -> None:
    aggregator = TransferAggregator(2)
    for num_bytes in (1, 2):
        done = aggregator.add([received(num_bytes=num_bytes), received(num_bytes=num_bytes)])
        assert done.finished_receiving == {KEY: TransferOutcome("", 2 * num_bytes)}


def test_what_a_rank_says_twice_is_counted_and_does_not_stand_for_another_rank() -> None:
    """F2."""
    aggregator = TransferAggregator(2)
    assert not aggregator.add([received(num_bytes=1), NO_TRANSFERS])
    assert not aggregator.add([not_received("transfer_cancelled"), NO_TRANSFERS])
    assert aggregator.num_repeated == 1
    assert aggregator.add([NO_TRANSFERS, received(num_bytes=1)]).finished_receiving == {KEY: TransferOutcome("", 2)}


def test_one_rank_is_passed_through() -> None:
    assert TransferAggregator(1).add([sent(num_bytes=4)]) == sent(num_bytes=4)
    assert TransferAggregator(1).add([NO_TRANSFERS]) is NO_TRANSFERS
