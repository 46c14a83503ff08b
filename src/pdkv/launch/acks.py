"""A child's reports during its start: progress, ready, or the reason for a failure."""

import contextlib
import errno
import logging
import os

from pdkv.errors import ConfigError, RankError, RankGone
from pdkv.launch.specs import KNOWN, Ack, Identified, Progress, Started, StartFailed, encode

logger = logging.getLogger(__name__)


class StartGivenUp(Exception):
    """The acks are no longer read: the launcher has given this start up."""


class Acknowledger:
    """The child's end of its start's socket (children.AckSocket). Methods raise StartGivenUp."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.answered = False  # whether the last ack was given

    def wait_known(self) -> None:
        """Wait until the launcher knows this process. If it never does, the socket just ends."""
        try:
            known = os.read(self._fd, len(KNOWN))
        except ConnectionResetError:
            known = b""
        if not known:
            raise StartGivenUp

    def progress(self, text: str) -> None:
        """Report a step of the start."""
        self._write(Progress(text))

    def identified(self, model: str) -> None:
        """Report the identity of the model that this process loads."""
        self._write(Identified(model))

    def ready(self) -> None:
        """Report success: the last ack of a start."""
        self._write(Started())
        self._close()

    def failed(self, error: Exception) -> None:
        """Report a failure: the last ack of a start. An error that only a defect can cause is logged in full."""
        config = isinstance(error, ConfigError)
        has_no_files = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
        if not config and not has_no_files and not isinstance(error, RankError):
            logger.error("cannot start", exc_info=error)
        message = str(error) if config else f"{type(error).__name__}: {error}"
        with contextlib.suppress(StartGivenUp):  # another process failed first: the launcher has its reason
            self._write(StartFailed(message, config=config, rank_gone=isinstance(error, RankGone)))
        self._close()

    def _close(self) -> None:
        self.answered = True
        os.close(self._fd)

    def _write(self, ack: Ack) -> None:
        data = encode(ack) + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except (BrokenPipeError, ConnectionResetError):
            raise StartGivenUp from None
