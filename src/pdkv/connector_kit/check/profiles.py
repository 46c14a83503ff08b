"""Options with which the kit runs the shipped connectors: private directories, and short deadlines."""

from collections.abc import Mapping
from typing import NamedTuple

from pdkv.connectors.registry import CONNECTORS


class Profile(NamedTuple):
    """Options for all cases, and those that cases about deadlines add ("{deadline}"). "{directory}" is private."""

    options: Mapping[str, str] = {}
    short: Mapping[str, str] = {}


_STORE_DEADLINES = dict.fromkeys(("lookup_timeout_s", "transfer_timeout_s", "layer_timeout_s"), "{deadline}")

_PROFILES: Mapping[str, Profile] = {
    "pdkv.connectors.memory.connector": Profile(short={"transfer_timeout_s": "{deadline}"}),
    "pdkv.connectors.multi.connector": Profile(
        {"connectors": "shared_memory,store", "store.url": "file://{directory}"},
        {"shared_memory.load_timeout_s": "{deadline}", **{f"store.{k}": v for k, v in _STORE_DEADLINES.items()}},
    ),
    "pdkv.connectors.nixl.connector": Profile(short={"transfer_timeout_s": "{deadline}"}),
    "pdkv.connectors.p2p.connector": Profile(
        {"timeout_s": "4"}, short={"timeout_s": "{deadline}", "handshake_timeout_s": "{deadline}"}
    ),
    "pdkv.connectors.shared_memory.connector": Profile(short={"load_timeout_s": "{deadline}"}),
    "pdkv.connectors.store.shared_storage": Profile({"path": "{directory}"}, _STORE_DEADLINES),
    "pdkv.connectors.store.url": Profile({"url": "file://{directory}"}, _STORE_DEADLINES),
}
"""Connectors' profiles by module."""


def profile_of(target: str, given: Mapping[str, str]) -> Profile:
    """The profile of a "module:Class" with `given` on top; a third party's options must all be on the command line."""
    profile = _PROFILES.get(target.partition(":")[0], Profile())
    if "connectors" in given:  # other children than those that the options are for
        return _profile_of_children(given)
    return Profile({**profile.options, **given}, {k: v for k, v in profile.short.items() if k not in given})


def _profile_of_children(given: Mapping[str, str]) -> Profile:
    """The options of `multi` on top of its children's profiles."""
    options: dict[str, str] = {}
    short: dict[str, str] = {}
    for index, name in enumerate(filter(None, map(str.strip, given["connectors"].split(",")))):
        profile = _PROFILES.get(CONNECTORS.target(name).partition(":")[0], Profile())
        for target, source in ((options, profile.options), (short, profile.short)):
            for option, value in source.items():
                if not {f"{index}.{option}", f"{name}.{option}"} & given.keys():
                    target[f"{index}.{option}"] = value
    return Profile({**options, **given}, short)
