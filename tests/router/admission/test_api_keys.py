"""The key file: what is in force, what is refused and how it is said, and what a reload changes."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError, Unauthorized
from pdkv.router.admission.api_keys import MAX_KEYS, KeyRing, make_key
from pdkv.wire.kv import KVTerms

HASH = "sha256:" + "ab" * 32


def write(path: Path, *entries: str) -> Path:
    """A key file of these entries, readable by its owner alone."""
    path.write_text("\n".join(entries))
    path.chmod(0o600)
    return path


def entry(name: str = "team", **fields: Any) -> str:
    values = {"name": f'"{name}"', "hash": f'"{HASH}"', **fields}
    return "[[key]]\n" + "\n".join(f"{field} = {value}" for field, value in values.items()) + "\n"


def bearer(key: str) -> str:
    return f"Bearer {key}"


def test_a_key_that_was_made_is_found_and_nothing_of_it_is_in_the_file(tmp_path: Path) -> None:
    key, lines = make_key("team-a")
    other, more = make_key("team-b", admin=True)
    assert key.startswith("pdk_")
    assert len(key) >= 46
    assert key.removeprefix("pdk_") not in lines
    ring = KeyRing(write(tmp_path / "keys", lines, more))
    tenant = ring.authenticate(bearer(key))
    assert (tenant.name, tenant.grant.admin) == ("team-a", False)
    assert ring.authenticate(f"bearer  {other} ").grant.admin
    assert tenant.grant.salt != ring.authenticate(bearer(other)).grant.salt


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Basic {key}", "{key}", "Bearer pdk_{key}"])
def test_whoever_names_no_known_key_is_told_no_more_than_that(authorization: str | None, tmp_path: Path) -> None:
    key, lines = make_key("team-a")
    ring = KeyRing(write(tmp_path / "keys", lines))
    header = None if authorization is None else authorization.format(key=key)
    with pytest.raises(Unauthorized) as refused:
        ring.authenticate(header)
    assert key not in str(refused.value)
    assert refused.value.status == 401


@pytest.mark.parametrize("key", ["x" * 30_000, "\udcff\x00", "ä" * 100])
def test_whatever_is_sent_as_a_key_is_unknown(key: str, tmp_path: Path) -> None:
    ring = KeyRing(write(tmp_path / "keys", entry()))
    with pytest.raises(Unauthorized, match=r"^the API key is not known$"):
        ring.authenticate(bearer(key))


def test_all_fields_of_a_key_are_its_tenants_grant(tmp_path: Path) -> None:
    fields = {"weight": 2.5, "priority": -4, "max_requests": 7, "max_streams": 3, "tokens_per_minute": 900}
    fields["requests_per_minute"] = 60
    ring = KeyRing(write(tmp_path / "keys", entry(salt='"own"', admin="true", **fields)))
    [tenant] = ring.tenants
    grant = tenant.grant
    assert (grant.weight, grant.best_priority, grant.max_requests, grant.max_streams) == (2.5, -4, 7, 3)
    assert (grant.requests_per_minute, grant.tokens_per_minute, grant.salt, grant.admin) == (60, 900, "own", True)


def terms_of(path: Path, **fields: Any) -> tuple[KVTerms | None, str]:
    """On which a key's KV is stored, and its salt."""
    [tenant] = KeyRing(write(path / "keys", entry(**fields))).tenants
    return tenant.grant.kv_terms, tenant.grant.salt


def test_a_key_has_terms_where_the_file_says_so(tmp_path: Path) -> None:
    assert terms_of(tmp_path)[0] is terms_of(tmp_path, kv_ttl_s=0)[0] is None
    ttl, quota, both = (
        terms_of(tmp_path, **fields)[0]
        for fields in ({"kv_ttl_s": 3600}, {"kv_quota": '"2GiB"'}, {"kv_ttl_s": 1, "kv_quota": 1000})
    )
    assert ttl is not None
    assert quota is not None
    assert both is not None
    assert (ttl.ttl_s, ttl.quota_bytes) == (3600, None)
    assert (quota.ttl_s, quota.quota_bytes) == (None, 2 << 30)
    assert (both.ttl_s, both.quota_bytes) == (1, 1000)


def test_an_owner_is_who_has_the_salt(tmp_path: Path) -> None:
    """Keys with one salt share their KV, and so its quota; others do not."""
    fields = {"kv_quota": '"1GiB"'}
    owners = [terms_of(tmp_path, **fields, **salt)[0] for salt in ({}, {"salt": '"a"'}, {"salt": '"b"'})]
    assert len(set(owners)) == 3
    assert terms_of(tmp_path, name="other", hash='"sha256:' + "cd" * 32 + '"', salt='"a"', **fields)[0] == owners[1]
    assert terms_of(tmp_path, kv_ttl_s=5, salt='"a"', **fields)[0].owner == owners[1].owner  # type: ignore[union-attr]


def test_what_was_stored_on_another_time_to_live_is_not_found(tmp_path: Path) -> None:
    """Nothing says how old it is."""
    salts = [terms_of(tmp_path, salt='"own"', kv_ttl_s=ttl_s, kv_quota='"1GiB"')[1] for ttl_s in (0, 60, 3600)]
    assert salts[0] == "own"
    assert len(set(salts)) == 3
    assert terms_of(tmp_path, salt='"own"', kv_ttl_s=60)[1] == salts[1], "a quota changes nothing of what is found"


def test_no_two_tenants_share_a_salt_whatever_their_clients_say(tmp_path: Path) -> None:
    a, b = (KeyRing(write(tmp_path / n, make_key(n)[1])).tenants[0] for n in ("a", "b"))
    said = ["", "x", a.grant.salt, b.grant.salt, a.salted(""), b.salted("x")]
    salts = [tenant.salted(text) for tenant in (a, b) for text in said]
    assert len(set(salts)) == len(salts)
    assert set(salts).isdisjoint(said[:4])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"has no \[\[key\]\]: add one with `pd key new NAME --append"),
        ("[[key]\n", "is not TOML, line 1"),
        (entry(extra=1), "unknown field `extra`"),
        (entry(weight=0), r"`float` > 0.0.*key\[0\].weight"),
        (entry(priority=2**40), r"key\[0\].priority"),
        (entry(max_streams=-1), r"key\[0\].max_streams"),
        (entry(hash='"sha256:zz"'), r"key\[0\].hash"),
        (entry(kv_ttl_s=-1), r"`int` >= 0 - at `\$.key\[0\].kv_ttl_s`"),
        (entry(kv_ttl_s=10**9 + 1), r"`int` <= 1000000000 - at `\$.key\[0\].kv_ttl_s`"),
        (entry(kv_ttl_s="nan"), r"`int`, got `float` - at `\$.key\[0\].kv_ttl_s`"),
        (entry(kv_ttl_s='"1h"'), r"`int`, got `str` - at `\$.key\[0\].kv_ttl_s`"),
        (entry(kv_quota=1.5), r"got `float` - at `\$.key\[0\].kv_quota`"),
        (entry(kv_quota='"much"'), "kv_quota of the key 'team': a size such as 512MiB was expected, got 'much'"),
        (entry(kv_quota=0), "kv_quota of the key 'team': a size such as 512MiB was expected, got '0'"),
        (entry(kv_quota='"nanGiB"'), "a size such as 512MiB was expected, got 'nanGiB'"),
        (entry(kv_quota='"8388609GiB"'), "a size of at most 9007199254740992 bytes was expected, got '8388609GiB'"),
        (entry(name="a b"), r"key\[0\].name"),
        (entry(name="anonymous"), "which is reserved for clients without a key"),
        (entry() + entry(hash='"sha256:' + "cd" * 32 + '"'), "two keys named 'team'"),
        (entry() + entry("other"), "has the hash of key 'team' twice"),
        ('[[key]]\nname = "a"\n', "missing required field `hash`"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_without_its_hashes(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        KeyRing(write(tmp_path / "keys", text))
    assert "ab" * 8 not in str(refused.value)


def test_a_file_that_is_missing_large_or_others_may_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        KeyRing(path)
    write(path, entry()).chmod(0o620)
    with pytest.raises(ConfigError, match=f"may be written by other users: make it yours, and chmod 600 {path}"):
        KeyRing(path)
    write(path, entry() + "#" * (1 << 20))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        KeyRing(path)


def test_there_are_so_many_keys_at_most(tmp_path: Path) -> None:
    entries = [entry(f"k{i}", hash=f'"sha256:{i:064x}"') for i in range(MAX_KEYS + 1)]
    assert len(KeyRing(write(tmp_path / "keys", *entries[:-1])).tenants) == MAX_KEYS
    with pytest.raises(ConfigError, match="has 1025 keys; at most 1024 are allowed"):
        KeyRing(write(tmp_path / "keys", *entries))


def test_a_reload_adds_changes_and_removes_keys_and_keeps_what_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    (old, old_lines), (kept, kept_lines), (new, new_lines) = (make_key(name) for name in ("old", "kept", "new"))
    ring = KeyRing(write(path, old_lines, kept_lines))
    tenant = ring.authenticate(bearer(kept))
    tenant.enter()
    write(path, kept_lines + "max_requests = 1\n", new_lines)
    ring.reload()
    assert ring.authenticate(bearer(kept)) is tenant
    assert (tenant.num_requests, tenant.grant.max_requests) == (1, 1)
    assert ring.authenticate(bearer(new)).name == "new"
    with pytest.raises(Unauthorized):
        ring.authenticate(bearer(old))


def test_a_reload_of_a_broken_file_changes_nothing_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, lines = make_key("team")
    path = write(tmp_path / "keys", lines)
    ring = KeyRing(path)
    for broken in ("[[key", entry(weight=-1)):
        write(path, broken)
        ring.reload()
    path.unlink()
    ring.reload()
    assert ring.authenticate(bearer(key)).name == "team"
    assert caplog.text.count("the API keys stay as they are") == 3


def test_a_model_that_is_not_served_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (_, one), (_, other) = make_key("one"), make_key("other")
    path = write(tmp_path / "keys", one, 'models = ["big", "bgi"]', other)
    KeyRing(path, models=["small", "big"]).reload()
    said = "the API key one may use ['bgi'], which is not served; known: small, big"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [said] * 2


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "anonymous", "ä", "a\n"])
def test_a_name_that_cannot_be_a_label_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a key's name has 1 to 64 letters"):
        make_key(name)


def test_the_command_makes_the_file_and_shows_the_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pdkv.cli.main import main

    path = tmp_path / "keys.toml"
    keys = []
    for arguments in (["team-a"], ["operator", "--admin"]):
        assert main(["key", "new", *arguments, "--append", str(path)]) == 0
        said = capsys.readouterr()
        keys.append(said.out.strip())
        assert keys[-1] not in said.err
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    ring = KeyRing(path)
    assert [ring.authenticate(bearer(key)).name for key in keys] == ["team-a", "operator"]
    assert not any(key in path.read_text() for key in keys)
    assert main(["key", "new", "team-a", "--append", str(path)]) == 2
    assert "already has a key named 'team-a': choose another name" in capsys.readouterr().err
    assert main(["key", "new", "third"]) == 0
    said = capsys.readouterr()
    assert KeyRing(write(tmp_path / "more", said.err[said.err.index("[[key]]") : said.err.index("this key")])).tenants
