"""Options with which the kit runs shipped connectors: private places, and deadlines of at most a second."""

from collections.abc import Mapping
from typing import NamedTuple


class Profile(NamedTuple):
    """Options for all cases, and those that cases about deadlines add. "{directory}" is a private one."""

    options: Mapping[str, str] = {}
    short: Mapping[str, str] = {}


_PROFILES: Mapping[str, Profile] = {
    "pdkv.connectors.memory": Profile(short={"transfer_timeout_s": "0.8"}),
    "pdkv.connectors.shared_memory": Profile(short={"load_timeout_s": "0.8"}),
}
"""By module."""


def profile_of(target: str, options: Mapping[str, str]) -> Profile:
    """The profile of a "module:Class"; a third party's options are all on the command line."""
    return _PROFILES.get(target.partition(":")[0], Profile())
