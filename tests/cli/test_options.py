"""One source for flags, PDKV_* variables and a file: what each accepts, and who wins."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from pdkv.base.options import Size, option
from pdkv.cli.options import Parser, add_flags, build, collect, flags_of
from pdkv.errors import ConfigError

HERE = Path("here")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One field of every kind."""

    count: int = option(1, "a count")
    share: float = option(0.5, "a share of 100 %")
    name: str | None = option(None, "a name")
    memory: Size | None = option(None, "a size")
    mode: Literal["slow", "fast"] = option("slow", "a mode")
    place: Path = option(HERE, "a place")
    loud: bool = option(False, "noise")
    extra: Mapping[str, str] = option({}, "more")

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigError(f"count must be 0 or more, got {self.count}")


FLAGS = flags_of(Sample)
GIVEN_ON_THE_COMMAND_LINE = (
    "--count 3 --share 0.25 --name x --memory 2KiB --mode fast --place there --loud --extra a=1 b=c=d --extra e="
)
EXPECTED = Sample(
    count=3, share=0.25, name="x", memory=2048, mode="fast", place=Path("there"), loud=True,
    extra={"a": "1", "b": "c=d", "e": ""},
)  # fmt: skip


def parse(line: str) -> dict[str, Any]:
    parser = Parser()
    add_flags(parser, FLAGS)
    return vars(parser.parse_args(line.split()))


def values(line: str = "", environment: Mapping[str, str] | None = None, file: Path | None = None) -> dict[str, Any]:
    return collect(FLAGS, parse(line), environment=environment or {}, file=file)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_nothing_given_leaves_the_defaults() -> None:
    assert build(Sample, values()) == Sample()


def test_every_kind_from_the_command_line() -> None:
    assert build(Sample, values(GIVEN_ON_THE_COMMAND_LINE)) == EXPECTED


def test_every_kind_from_the_environment() -> None:
    given = {
        "PDKV_COUNT": "3", "PDKV_SHARE": "0.25", "PDKV_NAME": "x", "PDKV_MEMORY": "2KiB", "PDKV_MODE": "fast",
        "PDKV_PLACE": "there", "PDKV_LOUD": "true", "PDKV_EXTRA": "a=1,b=c=d,e=", "OTHER": "ignored",
    }  # fmt: skip
    assert build(Sample, values(environment=given)) == EXPECTED


def test_every_kind_from_toml(tmp_path: Path) -> None:
    text = (
        'count = 3\nshare = 0.25\nname = "x"\nmemory = "2KiB"\nmode = "fast"\nplace = "there"\nloud = true\n'
        '[extra]\na = 1\nb = "c=d"\ne = ""\n'
    )
    assert build(Sample, values(file=write(tmp_path / "f.toml", text))) == EXPECTED


def test_every_kind_from_json(tmp_path: Path) -> None:
    table = {
        "count": 3, "share": 0.25, "name": "x", "memory": 2048, "mode": "fast", "place": "there", "loud": True,
        "extra": {"a": "1", "b": "c=d", "e": ""},
    }  # fmt: skip
    assert build(Sample, values(file=write(tmp_path / "f.json", json.dumps(table)))) == EXPECTED


def test_a_secret_that_has_a_variable_and_no_flag_is_no_mistake() -> None:
    assert values(environment={"PDKV_STORE_SIGN_KEY": "0123456789abcdef", "PDKV_ISA": "v3"}) == {}


def test_the_command_line_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "f.toml", 'count = 1\nshare = 0.1\nname = "file"\n')
    environment = {"PDKV_COUNT": "2", "PDKV_SHARE": "0.2"}
    assert values("--count 3", environment, file) == {"count": 3, "share": 0.2, "name": "file"}


def test_a_role_comes_before_the_common_value() -> None:
    options = {**FLAGS, **flags_of(Sample, role="prefill", exclude=["name"])}
    assert "prefill_name" not in options
    parser = Parser()
    add_flags(parser, options)
    given = collect(
        options, vars(parser.parse_args(["--count", "1", "--mode", "fast", "--prefill-count", "2"])), environment={}
    )
    assert build(Sample, given, role="prefill") == Sample(count=2, mode="fast")
    assert build(Sample, given, role="decode") == Sample(count=1, mode="fast")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--count x", "--count: a whole number was expected, got 'x'"),
        ("--count 1.5", "--count: a whole number was expected, got '1.5'"),
        ("--share x", "--share: a number was expected, got 'x'"),
        ("--memory lots", "--memory: a size such as 512MiB was expected, got 'lots'"),
        ("--mode medium", "--mode: one of slow, fast was expected, got 'medium'"),
        ("--extra novalue", "--extra: KEY=VALUE was expected, got 'novalue'"),
        ("--extra =x", "--extra: KEY=VALUE was expected, got '=x'"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        values(line)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont = 1", "unknown key 'cuont' (did you mean 'count'?)"),
        ("count = true", "count: a whole number was expected, got True"),
        ("count = 1.5", "count: a whole number was expected, got 1.5"),
        ('loud = "maybe"', "loud: true or false was expected, got 'maybe'"),
        ("name = 3", "name: text was expected, got 3"),
        ("extra = [1]", "extra: KEY=VALUE was expected, got 1"),
        ("extra = 1", "extra: KEY=VALUE was expected, got 1"),
        ("count = ", "malformed"),
    ],
)
def test_a_wrong_file_is_named_with_what_was_expected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        values(file=write(tmp_path / "f.toml", text))
    assert message in str(caught.value)
    assert "f.toml" in str(caught.value)


def test_a_file_that_is_missing_or_holds_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        values(file=tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="a table of options was expected, got list"):
        values(file=write(tmp_path / "list.json", "[]"))


def test_an_unknown_variable_is_refused_and_a_known_one_of_another_command_is_not() -> None:
    with pytest.raises(ConfigError, match=r"unknown environment variable 'PDKV_COUMT' \(did you mean 'PDKV_COUNT'\?\)"):
        values(environment={"PDKV_COUMT": "1"})
    assert collect(FLAGS, {}, environment={"PDKV_ELSEWHERE": "1"}, known_variables={"PDKV_ELSEWHERE"}) == {}


def test_the_dataclass_has_the_last_word() -> None:
    with pytest.raises(ConfigError, match="count must be 0 or more, got -1"):
        build(Sample, values("--count -1"))


def test_flags_cannot_be_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--coun 1")
    assert caught.value.code == 2
    assert "--coun" in capsys.readouterr().err


def test_help_shows_help_text_and_default() -> None:
    parser = argparse.ArgumentParser(prog="x")
    add_flags(parser, FLAGS)
    text = " ".join(parser.format_help().split())
    assert "--share X a share of 100 % (default: 0.5)" in text
    assert "--memory SIZE a size" in text
