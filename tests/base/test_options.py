"""Options over dataclass fields: what each kind takes, and what an error says."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Meta

from pdkv.base.options import Options, OptionTexts, Seconds, Size, did_you_mean, option, options_of
from pdkv.errors import ConfigError

Even = Annotated[int, Meta(multiple_of=2, extra={"expected": "an even number"})]


class Base(Options):
    """What all of them have."""

    wait_s: Seconds = option(5.0, "how long")


class Sample(Base):
    """One option of every kind."""

    threads: Annotated[int, Meta(ge=1, le=8)] = option(1, "threads that copy")
    page: Annotated[int, Meta(ge=4096, multiple_of=4096)] = option(4096, "a page")
    share: Annotated[float, Meta(ge=0, le=1)] = option(0.5, "a share")
    mode: Literal["pull", "push"] = option("pull", "who moves")
    capacity: Size | None = option(None, "bytes")
    verbose: bool = option(False, "noise")
    folder: Path | None = option(None, "where")
    pairs: Even = option(2, "an even number")
    path: str = option(help="where the file is", metavar="FILE")


def parse(prefix: str = "", **texts: str) -> Sample:
    return Sample.parse(OptionTexts({"path": "x", **texts}, "connector sample", prefix=prefix))


def message(prefix: str = "", **texts: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(prefix, **texts)
    return str(caught.value)


def test_every_kind_is_converted() -> None:
    given = parse(
        threads="8", page="8192", share="1", mode="push", capacity="2MiB", verbose="TRUE", folder="/a", pairs="4",
        wait_s="0.25",
    )  # fmt: skip
    assert given == Sample(
        threads=8, page=8192, share=1.0, mode="push", capacity=2 << 20, verbose=True, folder=Path("/a"), pairs=4,
        wait_s=0.25, path="x",
    )  # fmt: skip


def test_what_is_not_given_has_its_default() -> None:
    assert parse() == Sample(path="x")


def test_a_plain_mapping_is_read_too() -> None:
    assert Sample.parse({"path": "x"}) == Sample(path="x")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("threads", "0", "a whole number of at least 1 and up to 8 was expected, got '0'"),
        ("threads", "9", "a whole number of at least 1 and up to 8 was expected, got '9'"),
        ("threads", "1.5", "a whole number of at least 1 and up to 8 was expected, got '1.5'"),
        ("threads", "", "a whole number of at least 1 and up to 8 was expected, got ''"),
        ("threads", "9" * 5000, "a whole number of at least 1 and up to 8 was expected"),
        ("page", "5000", "a multiple of 4096 of at least 4,096 was expected, got '5000'"),
        ("share", "nan", "a number of at least 0 and up to 1 was expected, got 'nan'"),
        ("wait_s", "-1", "a number of seconds above 0 and up to 1,000,000 was expected, got '-1'"),
        ("wait_s", "0", "a number of seconds above 0 and up to 1,000,000 was expected, got '0'"),
        ("wait_s", "nan", "a number of seconds above 0 and up to 1,000,000 was expected, got 'nan'"),
        ("wait_s", "inf", "a number of seconds above 0 and up to 1,000,000 was expected, got 'inf'"),
        ("wait_s", "1e300", "a number of seconds above 0 and up to 1,000,000 was expected, got '1e300'"),
        ("mode", "teleport", "one of pull, push was expected, got 'teleport'"),
        ("capacity", "lots", "a size such as 512MiB was expected, got 'lots'"),
        ("verbose", "maybe", "true or false was expected, got 'maybe'"),
        ("pairs", "3", "an even number was expected, got '3'"),
    ],
)
def test_a_wrong_value_is_named_with_its_option_and_what_was_expected(name: str, text: str, expected: str) -> None:
    assert message(**{name: text}).startswith(f"connector sample: option {name}: {expected}")


def test_an_unknown_option_gets_the_nearest_known_one() -> None:
    known = "; known: capacity, folder, mode, page, pairs, path, share, threads, verbose, wait_s"
    assert message(thread="1") == f"connector sample: unknown option 'thread' (did you mean 'threads'?){known}"
    assert message(zzz="1") == f"connector sample: unknown option 'zzz'{known}"


def test_an_option_is_named_as_it_was_typed() -> None:
    assert "unknown option '0.thread' (did you mean '0.threads'?)" in message("0.", thread="1")
    assert "option sample.mode: one of pull, push" in message("sample.", mode="x")


@pytest.mark.parametrize("texts", [{}, {"path": ""}])
def test_an_option_that_is_missing_is_named_with_what_it_is(texts: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="connector sample: requires the option path=FILE: where the file is"):
        Sample.parse(OptionTexts(texts, "connector sample"))


def test_only_some_options_may_be_allowed() -> None:
    with pytest.raises(ConfigError, match="unknown option 'mode'; known: threads"):
        Sample.parse({"mode": "pull"}, only={"threads"})


def test_the_description_of_a_field_is_complete() -> None:
    options = options_of(Sample)
    assert next(iter(options)) == "wait_s"  # what a base class has comes first
    assert [name for name, item in options.items() if item.required] == ["path"]
    assert options["mode"].choices == ("pull", "push")
    assert options["folder"].optional
    assert (options["wait_s"].metavar, options["capacity"].metavar, options["path"].metavar) == (
        "SECONDS", "SIZE", "FILE",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "meant"),
    [("uri", " (did you mean 'url'?)"), ("timeout", " (did you mean 'transfer_timeout_s'?)"), ("colour", "")],
)
def test_the_nearest_name(name: str, meant: str) -> None:
    assert did_you_mean(name, ["url", "transfer_timeout_s", "mode"]) == meant
