"""Two hosts on one machine: a network namespace each, joined by a wire that delays, loses, cuts and limits."""

from hosts.machine import Host, Hosts, needs_namespaces, two_hosts
from hosts.wire import Wire

__all__ = ["Host", "Hosts", "Wire", "needs_namespaces", "two_hosts"]
