"""The `pd` command: what it prints, its exit codes, and one clear line for every mistake."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deployments import link_text_model

from pdkv import __version__
from pdkv.cli import EXIT_INTERRUPTED
from pdkv.cli import launch as cli_launch
from pdkv.cli.main import EXIT_FAILED, EXIT_READER_GONE, EXIT_USAGE, main, make_parser
from pdkv.config import EngineConfig
from pdkv.connectors import plan
from pdkv.connectors.registry import SHIPPED
from pdkv.errors import ConfigError
from pdkv.host import memory_limits
from pdkv.host.memory_limits import MemoryBound
from pdkv.kernels import compiled
from pdkv.launch import launcher, listening
from pdkv.router.routing.policies import POLICIES


def run(*arguments: str) -> int:
    """The exit code, argparse's own exits too."""
    try:
        return main(arguments)
    except SystemExit as error:
        return int(error.code or 0)


def deployment(*arguments: str, environment: dict[str, str] | None = None) -> cli_launch.Deployment:
    return cli_launch.read_deployment(make_parser().parse_args(["launch", *arguments]), environment or {})


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"pdkv {__version__}\n"


PD = [sys.executable, "-P", "-m", "pdkv.cli"]


def left_pipe() -> int:
    """As in `pd … | head -1`."""
    read, write = os.pipe()
    os.close(read)
    return write


def closed_terminal() -> int:
    window, terminal = os.openpty()
    os.close(window)
    return terminal


@pytest.mark.parametrize("gone", [left_pipe, closed_terminal])
def test_a_reader_that_leaves_is_no_error(gone: Callable[[], int]) -> None:
    output = gone()
    done = subprocess.run([*PD, "connector", "show", "memory"], stdout=output, stderr=subprocess.PIPE, timeout=60)
    os.close(output)
    assert (done.returncode, done.stderr) == (EXIT_READER_GONE, b"")


def test_a_full_disk_is_said_in_a_sentence() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*PD, "connector", "list"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (EXIT_FAILED, b"pd: failed: No space left on device\n")


def test_an_error_without_a_reader_keeps_its_code() -> None:
    output = closed_terminal()
    done = subprocess.run([*PD, "scale"], stdout=output, stderr=output, timeout=60)
    os.close(output)
    assert done.returncode == EXIT_USAGE


def test_ctrl_c_in_an_import_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*PD, "--version"], env=environment, stderr=subprocess.PIPE, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background has it ignored
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, b"")


@pytest.mark.parametrize(
    "arguments", [["http://h:1"], ["--run", "http://h:1"], ["--interval-s", "2", "http://h:1"]], ids=" ".join
)
def test_a_launch_is_named_by_an_argument_or_an_option(arguments: list[str]) -> None:
    assert make_parser().parse_args(["status", *arguments]).run_name == "http://h:1"


COMMANDS = [
    "launch",
    "engines",
    "status",
    "stop",
    "cache",
    "drain",
    "resume",
    "role",
    "scale",
    "restart",
    "generate",
    "bench",
    "replay",
    "connector",
]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["connector", "list"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    assert capsys.readouterr().out.startswith("usage: " + " ".join(["pd", *command]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["sever"], "unknown command 'sever' (did you mean 'serve'?)"),
        (
            ["quit"],
            "unknown command 'quit'; known: launch, serve, engine, engines, drain, resume, role, split, status, stop",
        ),
        (["cache", "find"], "'find'; known: lookup, clear, pin, unpin, prefetch, move"),
        (["cache", "move", "--tokens", "1"], "the following arguments are required: --from, --tier"),
        (["cache", "pin", "--tokens", "1", "--copy"], "--copy"),
        (
            ["cache", "clear"],
            "one of the arguments --prompt --prompt-file --messages --tokens --keys --all is required",
        ),
        (["cache", "lookup", "--tokens", "1,x"], "--tokens: expected numbers separated by commas, got '1,x'"),
        (
            ["cache", "pin", "--prompt-file", "no-such.txt"],
            "--prompt-file: no-such.txt cannot be read: [Errno 2] No such",
        ),
        (["cache", "pin", "--messages", "/dev/null"], "--messages: /dev/null is not JSON: Expecting value"),
        (["scale"], "expected --prefill N, --decode M, or both"),
        (["scale", "--decode", "0"], "--decode must be at least 1, got 0: to have no engines, stop the launch"),
        (["scale", "--decode", "2", "--drain-s", "-1"], "--drain-s: a number of seconds from 0 to 86400 was expected"),
        (["restart", "--drain-s", "1e6"], "--drain-s: a number of seconds from 0 to 86400 was expected"),
        (
            ["drain", "decode-0", "--wait-s", "nan"],
            "--wait-s: a number of seconds from 0 to 86400 was expected, got nan",
        ),
        (["generate", "caf\udce9"], "an argument is not valid UTF-8: 'caf\\udce9'"),
        (["launch", "--served-model-name", "a\udcff"], "an argument is not valid UTF-8: 'a\\udcff'"),
        (["role", "decode-0", "chef"], "unknown value 'chef'; known: prefill, decode, any"),
        (
            ["launch", "--drain-s", "-1"],
            "--drain-s: a number of seconds of at least 0 and up to 86,400 was expected, got '-1'",
        ),
        (["launch", "--start-timeout-s", "86401"], "--start-timeout-s: a number of seconds above 0 and up to 86,400"),
        (["lanch"], "unknown command 'lanch' (did you mean 'launch'?)"),
        (
            ["launch", "--prefil", "2"],
            "unrecognized argument --prefil (did you mean '--prefill'?) (see pd launch --help)",
        ),
        (["launch", "--prefill-thread=2"], "--prefill-thread (did you mean '--prefill-threads'?)"),
        (["connector", "shwo"], "unknown command 'shwo' (did you mean 'show'?)"),
        (["launch", "--no-such-flag"], "--no-such-flag"),
        (["launch", "--pref", "1"], "--pref"),
        (["launch", "--prefill", "two"], "--prefill: a whole number of at least 0 was expected, got 'two'"),
        (["launch", "--prefill", "-1"], "--prefill: a whole number of at least 0 was expected, got '-1'"),
        (
            ["launch", "--decode", "0"],
            "decode must be at least 1 where there are no --remote-engines, and none may join, got 0",
        ),
        (["launch", "--prefill", "0", "--prefill-tp", "2"], "--prefill-tp is given, but prefill = 0"),
        (
            ["launch", "--port", "70000"],
            "--port: a whole number of at least 0 and up to 65,535 was expected, got '70000'",
        ),
        (["launch", "--dtype", "int8"], "--dtype: one of auto, float32, bfloat16, float16 was expected, got 'int8'"),
        (["launch", "--block-size", "17"], "--block-size: a multiple of 16 of at least 16 was expected, got '17'"),
        (["launch", "--decode-threads", "0"], "--decode-threads: a whole number of at least 1 was expected, got '0'"),
        (["launch", "--kv-cache-memory", "lots"], "--kv-cache-memory: a size such as 512MiB was expected, got 'lots'"),
        (["launch", "--lease-timeout-s", "1"], "lease_timeout_s (1.0) must exceed kv_load_timeout_s (30.0)"),
        (
            ["launch", "--ssl-certfile", "no-such.pem"],
            "--ssl-certfile: no-such.pem cannot be read: No such file or dir",
        ),
        (["launch", "--ssl-keyfile", "k.pem"], "ssl_keyfile requires ssl_certfile: without it there is no TLS"),
        (["launch", "--ssl-cert-reqs", "3"], "--ssl-cert-reqs: one of none, optional, required was expected, got '3'"),
        (["launch", "--model", "no/such/dir"], "model directory no/such/dir does not exist"),
        (["launch", "--config", "no-such.toml"], "no-such.toml: No such file or directory"),
        (["generate", "--temperature", "-1", "x"], "--temperature: a number of at least 0 was expected, got '-1'"),
        (
            ["generate", "--stop-token-ids", "x", "--", "y"],
            "--stop-token-ids: a list with a length of up to 256 was expected, got",
        ),
        (["generate", "--model", "no/such/dir", "x"], "model directory no/such/dir does not exist"),
        (["connector", "remove"], "'remove'"),
        (["launch", "--decode-max-model-len", "5000"], "max_model_len 5000 exceeds the model's 4096 positions"),
        (["launch", "--prefill-tp", "3"], "4 key-value heads cannot be divided among 3 ranks"),
        (["launch", "--check", "--max-model-len", "5000"], "max_model_len 5000 exceeds the model's 4096 positions"),
        (["launch", "--check", "--tp", "3"], "4 key-value heads cannot be divided among 3 ranks"),
        (
            ["launch", "--check", "--kv-cache-memory", "1MiB", "--max-model-len", "512"],
            "the KV pool of 1 MiB holds 256 tokens, but a request may have 512 (max_model_len), which need 2 MiB",
        ),
        (["launch", "--check", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000"),
        (
            ["launch", "--check", "--record-trace", "/no/folder/t"],
            "--record-trace: /no/folder/t: No such file or direc",
        ),
        (["launch", "--check", "--chat-template", "no\x1b-such.jinja"], r"no\x1b-such.jinja: no such file"),
        (["launch", "--check", "--split", "next=5"], "of one of no pools (--pool) was expected, got next=5"),
        (["launch", "--check", "--pool", "next=DIR"], "pool needs --join-listen, --engines-file or --engines-dns"),
        (["launch", "--revision", "main"], "--revision main is not supported: a revision is part of the model's name"),
        (["launch", "--kv-transfer-config", "{}", "--hf-overrides", "{}", "--tp", "3"], "cannot be divided among 3"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_pools_have_names_of_their_own_and_engines_pools_that_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (key := tmp_path / "key").touch(mode=0o600)
    key.write_text("k" * 32)
    join = ["--join-listen", "tcp://127.0.0.1:6999", "--cluster-key-file", str(key), "--port", "0"]
    assert run("launch", "--check", *join, "--served-model-name", "a,next", "--pool", "next=DIR") == 2
    assert "next is a served name of --model and of pool next: each needs names" in capsys.readouterr().err
    (file := tmp_path / "engines").write_text("a@nxt=tcp://10.0.0.2:7000\n")
    assert run("launch", "--check", *join, "--engines-file", str(file)) == 2
    assert "engines_file: --pool was expected to name the pool of 'a@nxt'" in capsys.readouterr().err


def test_a_launch_can_be_checked_without_starting_anything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limits, "available_memory", lambda: MemoryBound(10 << 30, "MemAvailable"))
    flags = ["--host", "0.0.0.0", "--port", "0", "--prefill", "2", "--decode-kv-cache-memory", "8MiB"]
    assert run("launch", "--check", *flags) == 0
    said = capsys.readouterr()
    assert "0.0.0.0 can be reached from other hosts, but --api-key-file is not given" in said.err
    first, *engines = said.out.splitlines()
    assert first.startswith("2 prefill, 1 decode, connector shared_memory: pdkv-default from ")
    assert [line.split(":")[0].strip() for line in engines] == ["prefill-0", "prefill-1", "decode-0"]
    assert engines[0].endswith("a KV pool of 1.2 GiB for 77 requests of the longest length, 4096 tokens")
    assert engines[2].endswith("a KV pool of 8 MiB for 1 requests of the longest length, 2048 tokens")


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("nixl_cu12", ["--connector", "nixl"]),
        ("redis", ["--connector", "store", "--connector-config", "url=redis://localhost:1"]),
        ("redis", ["--kv-store", "rediss://localhost:1"]),
        ("obstore", ["--kv-store", "s3://bucket"]),
    ],
)
def test_a_missing_package_is_named_before_anything_starts(
    module: str, flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = plan.find_spec
    absent = (module, "nixl_cu13")
    monkeypatch.setattr(plan, "find_spec", lambda name: None if name in absent else find_spec(name))
    assert run("launch", "--check", "--port", "0", *flags) == 2
    said = capsys.readouterr()
    assert re.search(rf"needs {module}.*, which is not installed: pip install 'pdkv\[", said.err)
    assert said.out == ""


@pytest.fixture
def no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled library lies beside the module that finds them."""
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
        for found in (compiled._paths, compiled.levels, compiled.isa):
            found.cache_clear()
        yield
    for found in (compiled._paths, compiled.levels, compiled.isa):
        found.cache_clear()


@pytest.mark.usefixtures("no_kernels")
def test_a_launch_without_compiled_kernels_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("launch", "--check", "--port", "0") == 0
    assert "compiled kernels are missing: torch computes instead" in capsys.readouterr().err


def test_the_help_of_launch_has_choices_and_examples_and_each_engine_option_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("launch", "--help") == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert "examples: pd launch " in words
    assert f"one of {', '.join(POLICIES)}" in words
    assert f"one of {', '.join(SHIPPED)}" in words
    assert text.count("  --threads ") == text.count("-threads N") == 1
    assert "--decode-threads 4" in words  # that there is such a thing is said


def test_an_unknown_connector_and_an_unknown_policy_are_refused_before_anything_starts(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["launch", "--model", str(tiny_model_dir), "--port", "0"]
    assert run(*flags, "--connector", "teleport") == 2
    assert "unknown connector 'teleport'; known: lmcache, memory, " in capsys.readouterr().err
    assert run(*flags, "--connector", "shared_memoy") == 2
    assert "unknown connector 'shared_memoy' (did you mean 'shared_memory'?); known: " in capsys.readouterr().err
    assert run(*flags, "--policy", "astrology") == 2
    assert "unknown policy 'astrology'; known: " in capsys.readouterr().err


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listening.listen("192.0.2.1", 0)


def test_autoscaling_excludes_servers_of_other_engines() -> None:
    with pytest.raises(ConfigError, match="--autoscale excludes --backend"):
        deployment("--backend", "vllm=http://a", "--autoscale", "decode=1..2")


@pytest.mark.parametrize(
    "flag",
    [
        "--kv-store=file:///x",
        "--connector=nixl",
        "--decode-tp=2",
        "--start-method=spawn",
        "--order=concurrent",
        "--pooling=mean",
    ],
)
def test_options_of_engines_are_refused_beside_servers_of_other_engines(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag.partition('=')[0]} is given, but --backend starts no engine"):
        deployment("--backend", "vllm=http://a", flag)
    read = deployment("--backend", "vllm=http://a", "--max-num-seqs", "8", "--policy", "random", "--slo-ttft-ms", "500")
    assert read.decode.max_num_seqs == 8


def test_role_flags_change_one_role_only() -> None:
    read = deployment("--threads", "3", "--decode-threads", "2", "--prefill-kv-cache-memory", "1MiB")
    assert (read.prefill.threads, read.decode.threads) == (3, 2)
    assert (read.prefill.kv_cache_memory, read.decode.kv_cache_memory) == (1 << 20, None)


def test_environment_and_file_reach_the_deployment(tmp_path: Path) -> None:
    file = tmp_path / "pd.toml"
    file.write_text("prefill = 2\ndecode-threads = 5\n[connector_config]\nio_threads = 2\n")
    read = deployment("--config", str(file), "--decode", "4", environment={"PDKV_PREFILL": "3"})
    assert (read.launch.prefill, read.launch.decode, read.decode.threads) == (3, 4, 5)
    assert read.handoff.connector_config == {"io_threads": "2"}
    assert read.shape == "3 prefill, 4 decode, connector shared_memory"


def test_a_command_line_of_vllm_asks_for_the_same_client_certificates() -> None:
    files = ["--ssl-certfile", "c", "--ssl-keyfile", "k", "--ssl-ca-certs", "a"]
    assert deployment(*files, "--ssl-cert-reqs", "1").router.tls.client_certificates == "optional"
    assert deployment(*files, "--ssl-cert-reqs", "2").router.tls.client_certificates == "required"
    assert deployment(*files[:4], "--ssl-cert-reqs", "0").router.tls.client_certificates == "none"


def test_a_password_in_the_url_of_redis_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdkv.launch.logs.configure_logging", lambda *_: None)
    monkeypatch.setattr(launcher, "launch", lambda _: 0)
    assert run("launch", "--kv-store", "redis://:pw@host/0") == 0
    assert "--kv-store redis://***@host/0: every user of this host can read the password" in caplog.text


def test_the_defaults_are_the_dataclasses(tmp_path: Path) -> None:
    read = deployment()
    assert read.prefill == read.decode == EngineConfig()
    assert deployment("--prefill", "0").shape == "1 aggregated, connector shared_memory"


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_connector_by_default_is_one_that_reaches_the_kv(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_launch, "count_cuda_devices", lambda: num_devices)
    assert deployment("--device", "cpu").handoff.connector == "shared_memory"
    assert deployment("--device", "cpu", "--decode-device", "cuda").handoff.connector == "nixl"
    assert deployment("--device", "cuda", "--connector", "p2p").handoff.connector == "p2p"
    assert deployment("--device", "cuda").handoff.connector == ("shared_memory" if num_devices == 1 else "nixl")
    assert deployment("--device", "cuda", "--devices", "1").handoff.connector == "shared_memory"
    assert deployment("--device", "cuda", "--devices", "0,1").handoff.connector == "nixl"


def test_connector_list_shows_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("connector", "list") == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["NAME"] == ["NAME", "KIND", "CONTENT-ADDRESSED", "ORDERS", "CLASS"]
    assert rows["shared_memory"][1:] == [
        "pull", "yes", "prefill_first,decode_first", "pdkv.connectors.shared_memory.connector:SharedMemoryConnector",
    ]  # fmt: skip
    assert "memory" in rows


def modules_after(code: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that ran `code`."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(result.stderr.split())


def test_torch_is_not_imported() -> None:
    """By the package, for help, by a launcher or by a router."""
    code = """
import pdkv
from pdkv.cli.main import main
for arguments in (["--help"], ["launch", "--help"]):
    try: main(arguments)
    except SystemExit: pass
import pdkv.launch.launcher, pdkv.launch.router_process, pdkv.router.process
"""
    assert not modules_after(code) & {"torch", "transformers"}


def test_the_process_that_forks_grammar_workers_imports_little() -> None:
    code = "import pdkv.grammar.matching.zygote, llguidance"
    assert not modules_after(code) & {"torch", "numpy"}, "the first grammar waits for these imports"


@pytest.fixture
def text_model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return link_text_model(tiny_model_dir, path)


def test_generate_prints_a_completion_per_prompt(
    text_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["generate", "--model", str(text_model), "--kv-cache-memory", "4MiB", "--temperature", "0", "--json"]
    assert run(*flags, "--max-tokens", "5", "--ignore-eos", "hello", "world") == 0
    rows = [{**json.loads(line), "metrics": None} for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["hello", "world"]
    assert [len(row["outputs"][0]["token_ids"]) for row in rows] == [5, 5]
    monkeypatch.setattr("sys.stdin", ["hello\n", "world\n"])
    assert run(*flags, "--max-tokens", "5", "--ignore-eos") == 0
    assert [{**json.loads(line), "metrics": None} for line in capsys.readouterr().out.splitlines()] == rows


def test_generate_takes_the_models_sampling_defaults(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in text_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 3}')

    def num_tokens(*flags: str) -> int:
        common = ["--model", str(tmp_path), "--kv-cache-memory", "4MiB", "--json", "--ignore-eos"]
        assert run("generate", *common, *flags, "hello") == 0
        (row,) = map(json.loads, capsys.readouterr().out.splitlines())
        return len(row["outputs"][0]["token_ids"])

    assert num_tokens() == 3
    assert num_tokens("--max-tokens", "5") == 5
    assert num_tokens("--generation-config", "none") == 16
    monkeypatch.setenv("PDKV_GENERATION_CONFIG", "none")
    assert num_tokens() == 16
    assert num_tokens("--generation-config", "auto") == 3


@pytest.mark.parametrize("words", [["one,two"], ["one", "two"], ["one, two"]])
def test_commas_part_names_within_a_word_too(words: list[str]) -> None:
    assert deployment("--served-model-name", *words).launch.served_model_name == ("one", "two")
    assert deployment("--logits-processors", *words).decode.logits_processors == ("one", "two")
