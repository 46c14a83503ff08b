"""vLLM's options on our command line, in variables and files: other names, neutral values, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from rows import check_each

from pdkv.base.options import from_fields, options_of
from pdkv.base.vllm_names import SHORT, UNSUPPORTED, VLLM, Theirs
from pdkv.cli import launch as cli_launch
from pdkv.cli.main import main, make_parser
from pdkv.config import EngineConfig
from pdkv.errors import ConfigError

OWN = cli_launch.all_flags()
VALUES = {
    "tp": "2",
    "tool_parser": "hermes",
    "kv_cache_memory": "2G",
    "cors_origin": "*",
    "otlp_endpoint": "http://h:1",
}
VALUES |= {"model": "some/dir", "log_level": "debug", "max_headers": "7", "idle_timeout_s": "5"}


PARSER = make_parser()


def deployment(*arguments: str, command: str = "launch", **environment: str) -> cli_launch.Deployment:
    return cli_launch.read_deployment(PARSER.parse_args([command, *arguments]), environment)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def refusal(*arguments: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        deployment(*arguments, **environment)
    return str(caught.value)


def test_no_row_is_about_an_option_that_there_is() -> None:
    assert not OWN.keys() & VLLM.keys()
    assert {theirs.ours for theirs in VLLM.values()} - {""} <= OWN.keys()
    assert {*SHORT.values()} <= VLLM.keys()


@pytest.mark.parametrize(("theirs", "ours"), [(name, of.ours) for name, of in VLLM.items() if of.ours])
def test_an_option_of_another_name_means_the_same(theirs: str, ours: str, tmp_path: Path) -> None:
    value = VALUES[ours]
    expected = deployment(flag(ours), value)
    assert expected != deployment()
    assert deployment(flag(theirs), value) == deployment(f"{flag(theirs)}={value}") == expected
    assert deployment(**{f"PDKV_{theirs.upper()}": value}) == expected
    file = tmp_path / "f.yaml"
    file.write_text(f"{theirs.replace('_', '-')}: {json.dumps(value)}\n")
    assert deployment("--config", str(file)) == expected


def test_none_from_a_program_is_the_default() -> None:
    """As programs say that copy vLLM's defaults."""
    names = ("block_size", "max_num_seqs", "speculative_config", "logits_processors", "kv_cache_memory_bytes")
    assert from_fields(EngineConfig, dict.fromkeys(names), owner="LLM") == EngineConfig()


def test_every_other_option_is_neutral_or_refused_with_what_to_do() -> None:
    check_each(UNSUPPORTED.items(), lambda row: check_unsupported(*row))


def check_unsupported(name: str, theirs: Theirs) -> None:
    for value in theirs.neutral:
        if value is True or value is False:
            assert deployment(flag(name) if value else "--no-" + flag(name)[2:]) == deployment()
        else:
            assert deployment(flag(name), str(value)) == deployment()
        assert deployment(**{f"PDKV_{name.upper()}": str(value).lower()}) == deployment()
        assert from_fields(EngineConfig, {name: value}, owner="LLM") == EngineConfig()
    assert from_fields(EngineConfig, {name: None}, owner="LLM") == EngineConfig()
    wrong: list[Any] = [value for value in (True, False, "no-such-value") if not theirs.accepts(value)]
    if theirs.is_switch:
        wrong = [value for value in wrong if isinstance(value, bool)]
    for value in wrong:
        given = [flag(name)] if value is True else ["--no-" + flag(name)[2:]] if value is False else [flag(name), value]
        if not theirs.is_switch and isinstance(value, bool):
            continue
        said = refusal(*given)
        assert said.startswith(flag(name))
        assert " is not supported: " in said
        assert "{" not in said
        with pytest.raises(ConfigError, match=rf"^LLM: {name}.* is not supported: "):
            from_fields(EngineConfig, {name: value}, owner="LLM")


@pytest.mark.parametrize(
    ("arguments", "check"),
    [
        (["--dtype", "half"], lambda d: d.prefill.dtype == d.decode.dtype == "float16"),
        (["--dtype", "float"], lambda d: d.decode.dtype == "float32"),
        (["--decode-dtype", "half"], lambda d: (d.prefill.dtype, d.decode.dtype) == ("auto", "float16")),
        (["--generation-config", "vllm"], lambda d: d.prefill.generation_config == "none"),
        (["--kv-cache-dtype", "fp8_e4m3"], lambda d: d.decode.kv_cache_dtype == "fp8"),
        (["--attention-backend", "TRITON_ATTN"], lambda d: d == deployment()),
        (["--max-model-len", "2k"], lambda d: d.decode.max_model_len == 2000),
        (["--max-model-len", "32K"], lambda d: d.decode.max_model_len == 32768),
        (["--max-model-len", "25.6k"], lambda d: d.decode.max_model_len == 25600),
        (["-tp", "2"], lambda d: d.prefill.tp == d.decode.tp == 2),
        (["--decode-tensor-parallel-size", "2"], lambda d: (d.prefill.tp, d.decode.tp) == (1, 2)),
        (["-pp", "1", "-dp", "1", "--no-trust-remote-code"], lambda d: d == deployment()),
        (["--served-model-name", "a", "b"], lambda d: d.launch.served_model_name == ("a", "b")),
        (["--tp", "2", "--tensor-parallel-size", "2"], lambda d: d.decode.tp == 2),
        (["--tp", "2", "--tp", "4"], lambda d: d.decode.tp == 4),
        (["--enforce-eager", "--no-enforce-eager"], lambda d: not d.decode.enforce_eager),
        (["--threads", "3", "some/dir", "--decode-threads", "2"], lambda d: d.decode.model == Path("some/dir")),
        (["some/dir", "--model", "some/dir"], lambda d: d.prefill.model == Path("some/dir")),
    ],
)
@pytest.mark.parametrize("command", ["launch", "serve"])
def test_a_command_line_of_vllm_is_read(arguments: list[str], check: Any, command: str) -> None:
    assert check(deployment(*arguments, command=command))


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--tp", "2", "--tensor-parallel-size", "4"], {}, "--tp 2 and --tensor-parallel-size 4 are two values of one"),
        (["-tp", "4", "--tp", "2"], {}, "--tensor-parallel-size 4 and --tp 2 are two values of one option"),
        (["a", "--model", "b"], {}, "--model-tag a and --model b are two values of one option"),
        ([], {"PDKV_TP": "1", "PDKV_TENSOR_PARALLEL_SIZE": "2"}, "PDKV_TP 1 and PDKV_TENSOR_PARALLEL_SIZE 2 are two"),
        (
            [],
            {"PDKV_TENSOR_PARALLEL_SIZE": "x"},
            "PDKV_TENSOR_PARALLEL_SIZE: a whole number of at least 1 was expected",
        ),
        ([], {"PDKV_REVISION": "main"}, "PDKV_REVISION main is not supported: a revision is part of the model's name"),
        (["--tensor-parallel-size", "9" * 40], {}, "--tensor-parallel-size: a whole number of at least 1 was expected"),
        (["--max-model-len", "1.5K"], {}, "--max-model-len: a whole number of at least 1 was expected, got '1.5K'"),
        (["--max-model-len", "auto"], {}, "--max-model-len: a whole number of at least 1 was expected, got 'auto'"),
        (
            ["--served-model-name", "a", ""],
            {},
            "--served-model-name: a list of non-empty texts was expected, got ['a', '']",
        ),
        (["--connector-config", "a=1", "a=2"], {}, "--connector-config: a is given twice"),
    ],
)
def test_what_contradicts_itself_or_is_no_value_is_refused(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    assert message in refusal(*arguments, **environment)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--servd-model-name", "--served-model-name"),
        ("--max-model-length", "--max-model-len"),
        ("--compile", ""),
    ],
)
def test_a_hint_is_right_or_there_is_none(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", typed, "1"])
    said = capsys.readouterr().err
    assert f"unrecognized argument {typed}" in said
    assert (f"(did you mean '{meant}'?)" in said) if meant else ("did you mean" not in said)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp: 2\ntp: 3\n", "malformed: 'tp' appears twice"),
        ("tp: 2\ntensor-parallel-size: 3\n", "tp 2 and tensor_parallel_size 3 are two values of one option"),
        ("tp: [2\n", "malformed: "),
        ("- tp\n", "a table of options was expected, got list"),
        ("!!python/object/apply:os.getcwd []\n", "malformed: "),
        ("1: 2\n", "a table of options was expected"),
        ("tp: two\n", "tp: a whole number of at least 1 was expected, got 'two'"),
        ("kv-transfer-config:\n  kv_role: kv_both\n", "kv_transfer_config {'kv_role': 'kv_both'} is not supported: "),
        ("port: 8000\x00\n", "malformed: "),
    ],
)
def test_a_wrong_yaml_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    said = refusal("--config", str(file))
    assert str(file) in said
    assert message in said


def test_a_yaml_file_of_vllm_is_read(tmp_path: Path) -> None:
    file = tmp_path / "f.yml"
    file.write_text(
        "model: some/dir\nhost: 0.0.0.0\nport: 6379\nuvicorn-log-level: info\ntensor-parallel-size: 2\n"
        "served-model-name: [a, b]\nenable-prefix-caching: true\nmax-model-len: 32K\nenforce-eager: true\n"
    )
    read = deployment("--config", str(file), command="serve")
    assert (read.launch.host, read.launch.port, read.launch.served_model_name) == ("0.0.0.0", 6379, ("a", "b"))
    engine = read.decode
    assert (engine.tp, engine.max_model_len, engine.enforce_eager, engine.model) == (2, 32768, True, Path("some/dir"))


def test_the_names_that_python_gives_are_read_too() -> None:
    assert from_fields(EngineConfig, {"tensor_parallel_size": 2, "dtype": "half"}, owner="LLM") == EngineConfig(
        tp=2, dtype="float16"
    )
    with pytest.raises(ConfigError, match="LLM: unknown option 'tool_call_parser'"):
        from_fields(EngineConfig, {"tool_call_parser": "hermes"}, owner="LLM")
    assert options_of(EngineConfig)["tp"].expected == "a whole number of at least 1"
