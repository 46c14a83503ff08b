"""Which processes write into this rank's blocks, and whether one that has gone silent has exited."""

import contextlib
import errno
import os
import select
from collections.abc import Iterable

from pdkv.connectors.nixl.wire import RankBlob
from pdkv.host.host_id import host_id
from pdkv.host.process_info import process_start_time


class WriterProcesses:
    """Processes of this host that were let in, by agent. Not thread-safe."""

    def __init__(self) -> None:
        self._pidfds: dict[str, int] = {}

    def watch(self, blob: RankBlob) -> bool:
        """Hold on to a sender's process while it lives, if it is one of this host. Idempotent.

        Returns:
            False: this process lacks a descriptor for it, so that its end could not be seen.
        """
        if blob.agent in self._pidfds or blob.host != host_id():
            return True
        bell = blob.doorbell
        try:
            pidfd = os.pidfd_open(bell.pid)
        except OSError as error:  # or: it is not seen from here (another namespace of pids), or has just ended
            return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
        except OverflowError:
            return True
        if process_start_time(bell.pid) == bell.start_time:
            self._pidfds[blob.agent] = pidfd
        else:
            os.close(pidfd)
        return True

    def knows(self, agent: str) -> bool:
        """Whether its end can be seen here."""
        return agent in self._pidfds

    def has_ended(self, agent: str) -> bool:
        """Whether a process that is known here is gone, with all of its threads."""
        pidfd = self._pidfds.get(agent)
        if pidfd is None:
            return False
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def forget(self, agents: Iterable[str]) -> None:
        """They write nothing any more. Idempotent."""
        for agent in agents:
            with contextlib.suppress(KeyError):
                os.close(self._pidfds.pop(agent))

    def close(self) -> None:
        """Idempotent."""
        self.forget(list(self._pidfds))
