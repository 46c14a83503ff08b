"""Two hosts on one machine: a network namespace each, joined by a wire that delays, loses, cuts and limits."""

import sys
from pathlib import Path

from hosts.machine import Host, Hosts, hosts_or_skip
from hosts.wire import Wire

__all__ = ["Host", "Hosts", "Wire", "hosts_or_skip"]

sys.path.append(str(Path(__file__).parents[2] / "support"))  # what harnesses share with tests
