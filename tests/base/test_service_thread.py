"""Start, end, failure and leak of a thread that serves an object: tested here, and nowhere again."""

import logging
import threading
import weakref
from collections.abc import Iterator

import pytest
from no_threads import no_threads

from pdkv.base import service_thread
from pdkv.base.service_thread import ServiceThread
from pdkv.errors import ServerBusy

NAME = "pdkv-test-service"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert NAME not in {thread.name for thread in threading.enumerate()}


class Server:
    """Counts its wake-ups until it is stopped."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.began = threading.Event()
        self.thread = ServiceThread(self.run, self.woken.set, NAME)

    def run(self, stopping: threading.Event) -> None:
        self.began.set()
        while not stopping.is_set():
            self.woken.wait()
            self.woken.clear()


def test_it_runs_until_it_is_stopped() -> None:
    server = Server()
    assert not server.thread.is_alive
    server.thread.start()
    assert server.began.wait(60)
    assert server.thread.is_alive
    assert server.thread.stop()
    assert not server.thread.is_alive
    assert server.thread.failure is None


def test_a_second_start_and_a_second_stop_do_nothing() -> None:
    server = Server()
    server.thread.start()
    server.thread.start()
    assert server.thread.stop()
    assert server.thread.stop()


def test_it_does_not_begin_after_its_end() -> None:
    server = Server()
    assert server.thread.stop()
    server.thread.start()
    assert not server.thread.is_alive
    assert not server.began.is_set()


def test_a_start_that_the_system_refuses_may_be_tried_again() -> None:
    server, released = Server(), threading.Event()
    with no_threads(), pytest.raises(ServerBusy, match=f"no thread for {NAME}: can't start new thread"):
        server.thread.start_or(released.set)
    assert released.is_set()
    server.thread.start()
    assert server.began.wait(60)
    assert server.thread.stop()


def test_an_error_ends_it_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def run(stopping: threading.Event) -> None:
        raise ValueError("broken")

    thread = ServiceThread(run, lambda: None, NAME)
    with caplog.at_level(logging.ERROR, service_thread.__name__):
        thread.start()
        assert thread.stop()
    assert isinstance(thread.failure, ValueError)
    assert f"thread {NAME} ended with an error" in caplog.text


def test_one_that_does_not_end_is_named(caplog: pytest.LogCaptureFixture) -> None:
    let_go = threading.Event()
    thread = ServiceThread(lambda stopping: let_go.wait() and None, lambda: None, NAME)
    thread.start()
    assert not thread.stop(timeout_s=0.0)
    assert f"thread {NAME} does not end" in caplog.text
    let_go.set()
    assert thread.stop()


def test_it_may_stop_itself() -> None:
    stopped: list[bool] = []
    thread = ServiceThread(lambda stopping: stopped.append(thread.stop()), lambda: None, NAME)
    thread.start()
    thread._thread.join(60)
    assert stopped == [False]
    assert thread.stop()


@pytest.mark.parametrize("is_started", [False, True])
def test_its_owner_is_free_when_it_has_ended(is_started: bool) -> None:
    server = Server()
    if is_started:
        server.thread.start()
    assert server.thread.stop()
    owner = weakref.ref(server)
    del server
    assert owner() is None
