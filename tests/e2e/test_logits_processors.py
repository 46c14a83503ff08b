"""Logits processors over a hand-off and two ranks, beside an engine without; a fault is one request's."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import processors
import pytest
from deployments import Running, launches, link_text_model
from oracle import oracle

WINDOW = 6
NUM_OUTPUT = 16


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path := tmp_path_factory.mktemp("model") / "served").mkdir()
    return link_text_model(tiny_model_dir, path)


@pytest.fixture(scope="module")
def deployment(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    site = tmp_path_factory.mktemp("site")
    (site / "no_repeat.py").write_text(processors.example_source())
    for needed in ("processors", "oracle"):
        shutil.copy(Path(processors.__file__).with_name(f"{needed}.py"), site)
    names = "no_repeat:NoRepeat,processors:Faulty"
    with launches(model) as launch:
        yield launch(
            *("--prefill", "1", "--decode", "1", "--decode-tp", "2", "--dtype", "float32", "--policy", "round_robin"),
            *("--logits-processors", names),
            environment={"PYTHONPATH": str(site)},
            engine=("--dtype", "float32"),
        )


def test_each_token_of_a_request_went_through_its_processor(deployment: Running, model: Path) -> None:
    prompts = [list(range(5 + i, 30 + 2 * i)) for i in range(10)]
    num_clear = num_refused = 0
    for prompt in prompts:
        expected = oracle(model).generate(prompt, NUM_OUTPUT, processors.without_repeats(WINDOW))
        fields = {"max_tokens": NUM_OUTPUT, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
        reply = deployment.complete(prompt, logits_processors={"no_repeat:NoRepeat": {"window": WINDOW}}, **fields)
        if reply.status_code == 400:  # by decode-b, which was started without
            assert "'no_repeat:NoRepeat' is unknown; this server has none" in reply.json()["error"]["message"]
            num_refused += 1
            continue
        assert reply.status_code == 200, reply.text
        if expected is not None:
            num_clear += 1
            assert reply.json()["choices"][0]["token_ids"] == expected
    assert num_clear >= 2
    assert num_refused >= 2


@pytest.mark.parametrize(
    ("asked", "status", "code", "text"),
    [
        ({"processors:Faulty": {"how": "raise"}}, 500, "logits_processor_failed", "RuntimeError: out of luck"),
        ({"processors:Faulty": {"how": "refuse"}}, 400, None, "processors:Faulty: not today"),
        ({"no_repeat:NoRepeat": {"window": 0}}, 400, None, "no_repeat:NoRepeat: window must be in [1, 1024], got 0"),
        ({"no_repeat": {}}, 400, None, "'no_repeat' is unknown; this server has no_repeat:NoRepeat, processors:Faulty"),
    ],
)
def test_what_goes_wrong_is_said(
    deployment: Running, asked: dict[str, object], status: int, code: str | None, text: str
) -> None:
    reply = deployment.complete([5, 6, 7], logits_processors=asked, max_tokens=4)  # prefill draws first
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert text in error["message"]
    assert error["code"] == code
    assert deployment.complete([5, 6, 7], max_tokens=4).status_code == 200
