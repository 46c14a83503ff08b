"""A deployment, a client's load on it, and what is said of one that does not start."""

import pytest

from pdkv.testing.deployment import complete_all, launched

SMALL = ("--kv-cache-memory", "8MiB", "--threads", "1")


def test_a_client_is_answered_and_nothing_is_left() -> None:
    with launched(*SMALL) as deployment:
        answers = complete_all(deployment.url, ["one", "two", "one"], max_tokens=4)
        assert answers[0] == answers[2] != ""
    assert deployment.pids_left() == []
    assert not deployment.directory.exists()


def test_what_does_not_start_shows_its_log() -> None:
    with pytest.raises(AssertionError, match="instead of a ready line"), launched("--no-such-flag"):
        pass
