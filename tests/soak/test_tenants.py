"""A hostile tenant beside a polite one: no answer is lost and no process ends. Times are the soak's to judge."""

from pathlib import Path

import pytest
from deployments import launches
from serving_checks import serve_directory
from small_models import make_hf_model
from soak.hostile_tenant import MEANS
from soak.polite_tenant import FILLER_TOKENS, PROMPT_TOKENS, Polite
from soak.tenants import FLAGS, Result, disturb, judge, make_keys


def test_a_polite_tenant_asks_for_nothing_that_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[tuple[int, ...]] = []
    for pid in (100, 101):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        tenant = Polite("127.0.0.1", 1, "key")
        prompts = [tenant.prompt(num_tokens) for num_tokens in (PROMPT_TOKENS, FILLER_TOKENS) * 1000]
        blocks += [tuple(prompt[:16]) for prompt in prompts]
    assert len(set(blocks)) == len(blocks) == 4000


def test_loads_of_which_one_was_granted_less_are_not_compared() -> None:
    seen = {"failed": [], "ttft_p99_ms": 1.0, "gap_p99_ms": 1.0}
    health = {"num_unavailable": 0, "resident_before": 0, "resident_worst": 0}
    for granted, expected in ((990, []), (650, ["the polite tenant was granted 650 tokens, and the hostile one 1000"])):
        result = Result(seconds=1.0, victim=seen, victim_before=seen, health=health)
        result.hostile, result.tokens = {"broken": [], "counts": {}}, {"hostile": 1000, "polite": granted}
        judge(result)
        assert [text.partition(":")[0] for text in result.slow] == expected


@pytest.mark.slow
def test_a_hostile_tenant_costs_another_one_no_answer(tmp_path: Path) -> None:
    model = serve_directory(make_hf_model(tmp_path / "model", "llama", "float32"), tmp_path)
    keys = make_keys(tmp_path / "keys.toml")
    with launches(model) as launch:
        flags = ("--prefill", "1", "--decode", "1", *FLAGS, "--api-key-file", str(tmp_path / "keys.toml"))
        result = disturb(launch(*flags), keys, 4.0)
    assert result.violations == []
    assert result.victim["ttft_num"] >= 4
    assert result.victim_before["gap_num"] > 100
    assert result.hostile["used"] == sorted(MEANS)
    assert result.tokens["hostile"] > 0
