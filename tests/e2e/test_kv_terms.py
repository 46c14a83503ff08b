"""Keys whose KV is kept for a time, or in so much room: what engines store of it, find again, and leave to others."""

import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from deployments import NO_AUTHORITIES, Launch, Running
from traffic import wait_until_true

from pdkv.cli.main import main
from pdkv.kv_store.host_segment import PAGE_BYTES
from pdkv.router.admission.api_keys import make_key

QUOTA_BYTES = 4 * PAGE_BYTES  # a value of 64 tokens takes a page
NUM_TOKENS = 208
WHOLE = 192  # in values
HOST, FILES = "multi/1-store/0-host", "multi/1-store/1-file"


class Tenants:
    """Clients with keys of a deployment, and the operator's view of what is stored for them."""

    def __init__(self, launch: Launch, path: Path) -> None:
        terms = {"quota": f"kv_quota = {QUOTA_BYTES}\n", "short": "kv_ttl_s = 2\n", "long": "kv_ttl_s = 100_000\n"}
        made = {name: make_key(name, admin=name == "root") for name in (*terms, "plain", "root")}
        self._keys = {name: key for name, (key, _) in made.items()}
        file = path / "keys.toml"
        file.write_text("\n".join(lines + terms.get(name, "") for name, (_, lines) in made.items()))
        file.chmod(0o600)
        tiers = ["--kv-host-memory", "16MiB", "--kv-store", f"file://{path}/kv"]
        patient = ["--connector-config", "store.lookup_timeout_s=20", "store.min_hit_tokens=1"]
        self.deployment: Running = launch(
            "--prefill", "1", "--decode", "1", *tiers, *patient, "--api-key-file", str(file)
        )

    def _post(self, name: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self._keys[name]}"}
        reply = httpx.post(self.deployment.url + path, json=body, headers=headers, timeout=60, verify=NO_AUTHORITIES)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def ask(self, name: str, number: int) -> int:
        """Complete a prompt of that number; how many of its tokens were cached or stored."""
        body = {"model": "served", "prompt": prompt(number), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        return int(self._post(name, "/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def stored(self, name: str, number: int, tier: str) -> int:
        """Tokens of the prompt that engines find in a tier, at most."""
        body = {"tokens": prompt(number), "api_key": name, "tier": tier}
        engines = self._post("root", "/admin/cache/lookup", body)["engines"]
        return max(found["tokens"] for engine in engines for found in engine["tiers"])

    def clear_pools(self) -> None:
        self._post("root", "/admin/cache/clear", {"tier": "pool"})

    def held(self) -> dict[str, dict[str, int]]:
        """By engine, what its host memory has for keys with terms."""
        headers = {"authorization": f"Bearer {self._keys['root']}"}
        reply = httpx.get(self.deployment.url + "/admin/cache", headers=headers, timeout=30, verify=NO_AUTHORITIES)
        return {
            engine["name"]: tier.get("keys", {})
            for engine in reply.json()["engines"]
            for tier in engine["tiers"]
            if tier["tier"] == HOST
        }


def prompt(number: int) -> list[int]:
    return [number + 2, *range(2, NUM_TOKENS + 1)]


@pytest.fixture
def tenants(launch: Launch, tmp_path: Path) -> Tenants:
    return Tenants(launch, tmp_path)


def test_one_keys_kv_keeps_to_its_room_and_anothers_to_its_time(
    tenants: Tenants, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plain", "long", "short"):
        assert tenants.ask(name, 0) == 0, "another key's KV is never found"
    for number in range(4):
        assert tenants.ask("quota", number) == 0
        wait_until_true(lambda number=number: tenants.stored("quota", number, HOST) == WHOLE, "it is saved", 20)  # type: ignore[misc]
    has_left = tenants.held()["decode-0"].get("quota", 0)  # decode saves what prefill has not saved by then
    assert has_left or tenants.stored("quota", 0, HOST) == 0, "it made room for the prompts behind it"
    assert tenants.stored("quota", 0, FILES) == WHOLE, "a directory knows of no quota"

    def is_told() -> bool:
        return all(set(keys) >= {"quota"} for name, keys in tenants.held().items() if name == "prefill-0")

    wait_until_true(is_told, "the engine has reported", 20)
    assert all(keys.get("quota", 0) <= QUOTA_BYTES for keys in tenants.held().values())
    monkeypatch.setattr(tempfile, "tempdir", str(tenants.deployment.directory))  # where the launch is looked for
    assert main(["cache", "--run", tenants.deployment.url.rpartition(":")[2]]) == 0
    assert " of quota " in capsys.readouterr().out

    for name in ("plain", "long", "short"):
        wait_until_true(lambda name=name: tenants.stored(name, 0, FILES) == WHOLE, "it is saved", 20)  # type: ignore[misc]
    wait_until_true(lambda: tenants.stored("short", 0, HOST) == 0, "its time is over", 20)
    assert [tenants.stored(name, 0, HOST) for name in ("plain", "long")] == [WHOLE, WHOLE]
    tenants.clear_pools()
    assert [tenants.ask(name, 0) for name in ("plain", "long")] == [WHOLE, WHOLE]
    assert tenants.ask("short", 0) == 0, "what lies in the directory is too old"
    metrics = tenants.deployment.get("/metrics").text.splitlines()
    damaged = [line for line in metrics if line.startswith("pdkv_engine_kv_damaged_values_total{")]
    assert damaged
    assert all(line.endswith(" 0.0") for line in damaged)
    assert tenants.deployment.stop() == 0
