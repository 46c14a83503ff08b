"""docs/from-vllm.md lists what is refused: every row is, by its own words, and nothing else is."""

import re
from pathlib import Path
from typing import Any

import pytest
from rows import check_each

import pdkv
from pdkv import LLM, SamplingParams
from pdkv.base.vllm_api import ABSENT, ABSENT_ARGUMENTS
from pdkv.base.vllm_names import VLLM
from pdkv.config import DEFAULT_MODEL, EngineConfig
from pdkv.errors import ConfigError, InvalidRequest
from pdkv.offline.engine import read_config

PAGE = (Path(__file__).parents[2] / "docs" / "from-vllm.md").read_text()
NO_ENGINE = LLM.__new__(LLM)


def rows(heading: str) -> dict[str, list[str]]:
    """The other columns of a section's table, by each name of the first one."""
    section = PAGE.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {
        name: [column.strip() for column in columns[1:]]
        for columns in lines
        for name in re.findall(r"`(\w+)`", columns[0])
    }


OPTIONS = rows("### Options that are refused")
ARGUMENTS = rows("### Arguments and fields that are refused")
NAMES = rows("### Methods and classes that are absent")


def value_of(text: str) -> Any:
    """What stands in a column of values."""
    return {"True": True, "False": False, "None": None, "{}": {}}.get(text, text)


def test_the_page_lists_all_of_them() -> None:
    other = {name for name, theirs in VLLM.items() if not theirs.ours and theirs.advice}
    assert {*OPTIONS} == other
    assert {*ARGUMENTS} == {*ABSENT_ARGUMENTS}
    assert {*NAMES} == {*ABSENT}
    assert rows("## Options") == {name: [f"`{theirs.ours}`"] for name, theirs in VLLM.items() if theirs.ours}


def test_an_option_is_accepted_with_these_values_and_refused_with_others() -> None:
    check_each(sorted(OPTIONS.keys() - {"seed"}), check_option)  # which LLM has


def check_option(name: str) -> None:
    accepted = [value_of(text) for text in re.findall(r"`([^`]+)`", OPTIONS[name][0])]
    for value in (None, *([{}, []] if name != "tokenizer" else []), *accepted):
        config, *_ = read_config("LLM", DEFAULT_MODEL, **{name: value})
        assert config == EngineConfig(model=DEFAULT_MODEL)
    other = not accepted[0] if accepted and isinstance(accepted[0], bool) else "another"
    with pytest.raises(ConfigError) as refused:
        read_config("LLM", DEFAULT_MODEL, **{name: other})
    assert OPTIONS[name][1] in str(refused.value)
    assert name in str(refused.value)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_accepted_with_this_value_and_refused_with_others(name: str) -> None:
    accepted, instead = ARGUMENTS[name]
    neutral = value_of(accepted.strip("`") or "None")
    neutral = float(neutral) if isinstance(neutral, str) else neutral
    assert SamplingParams(**{name: neutral}) == SamplingParams(**{name: None}) == SamplingParams()
    for call in (SamplingParams, lambda **given: NO_ENGINE.generate("x", **given)):
        with pytest.raises(InvalidRequest) as refused:
            call(**{name: "another"})
        assert str(refused.value).endswith(f"takes no {name}='another': {instead}")
        assert refused.value.param == name


@pytest.mark.parametrize("name", NAMES)
def test_a_method_or_class_that_is_absent_says_what_to_do(name: str) -> None:
    [instead] = NAMES[name]
    with pytest.raises(ImportError) as refused:
        getattr(pdkv, name)
    assert str(refused.value) == f"pdkv has no {name}: {instead}"
    with pytest.raises(AttributeError) as absent:
        getattr(NO_ENGINE, name)
    assert str(absent.value) == f"LLM has no {name!r}: {instead}"


def test_every_name_that_the_page_shows_is_there() -> None:
    names = re.findall(r"`([A-Z]\w+)`", PAGE.split("## Refused")[0])
    assert {name for name in names if not hasattr(pdkv, name)} <= {"SIZE", "NAME"}
    fields = PAGE.split("## Fields\n")[1].split("| output |")[0]
    of_params = re.findall(r"`([a-z_]+)`", fields.split("StructuredOutputsParams")[0])
    assert {*of_params} <= {*SamplingParams.__struct_fields__}
