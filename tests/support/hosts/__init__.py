"""Two hosts on one machine: a network namespace each, joined by a wire that delays, loses, cuts and limits."""

from hosts.machine import Host, Hosts, hosts_or_skip
from hosts.wire import Wire

__all__ = ["Host", "Hosts", "Wire", "hosts_or_skip"]
