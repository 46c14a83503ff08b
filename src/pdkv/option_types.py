"""Converters of option texts, of connectors and stores; each raises ValueError with what was expected."""

from collections.abc import Callable


def parse_count(text: str) -> int:
    """A whole number above 0."""
    if (value := int(text)) < 1:
        raise ValueError("at least 1 was expected")
    return value


def parse_natural(text: str) -> int:
    """A whole number from 0 on."""
    if (value := int(text)) < 0:
        raise ValueError("0 or more was expected")
    return value


def parse_seconds(text: str) -> float:
    """A finite duration above 0."""
    if not 0 < (value := float(text)) < float("inf"):
        raise ValueError("a number of seconds above 0 was expected")
    return value


def parse_bool(text: str) -> bool:
    """true or false."""
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false was expected")
    return text.lower() == "true"


def parse_choice(*choices: str) -> Callable[[str], str]:
    """A converter that accepts these words only."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{' or '.join(choices)} was expected")
        return text

    return parse
