"""The dashboard's files hold no data and parse none as markup; its data needs an admin's key where there are keys."""

import re
from pathlib import Path
from typing import Any

import pytest
from admin_keys import admin_keys
from asgi_client import call
from dispatch_rig import System, live
from small_app import make_app

from pdkv.config import AccessConfig
from pdkv.router.admission.api_keys import KeyRing
from pdkv.router.http.pages import dashboard_page

FOLDER = Path(dashboard_page.__file__).with_name("dashboard")
FILES = sorted(FOLDER.iterdir())
PARSING = (
    r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|createContextualFragment|srcdoc|\beval\b|Function\("
)
INLINE = r"<script(?![^>]*\bsrc=)|\son\w+=\"|\bstyle=|https?://(?!www\.w3\.org/2000/svg\")|@import|url\("


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_parses_text_as_markup_or_needs_what_the_policy_forbids(file: Path) -> None:
    assert not re.search(PARSING, file.read_text())
    assert not re.search(INLINE, file.read_text())


def test_it_only_reads_and_its_key_is_no_part_of_an_address() -> None:
    text = "".join(file.read_text() for file in FILES if file.suffix == ".js")
    assert re.findall(r"\bfetch\((.*?)\{", text) == ["path, "]
    assert "method:" not in text
    assert not re.search(r"[?&](key|token)=|location\.(hash|search)|document\.cookie|localStorage\.setItem\(KEY", text)
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= 1300


async def test_its_files_are_open_and_its_data_is_an_admins(tmp_path: Path) -> None:
    file, root, other = admin_keys(tmp_path)
    async with live(System(1, 1)) as system:
        app = make_app(system.dispatcher, keys=KeyRing(file), access=AccessConfig(api_key_file=file))  # type: ignore[arg-type]

        async def ask(path: str, headers: dict[str, str], method: str = "GET") -> Any:
            return await call(app, method, path, None, headers)

        for path in ("/dashboard", *(f"/dashboard/{f.name}" for f in FILES if f.suffix != ".html")):
            reply = await ask(path, {})
            assert reply.status == 200
            assert reply.headers["x-content-type-options"] == "nosniff"
            policy = reply.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert (await ask(path, root, "POST")).status == 405
        for path in ("/dashboard/../admin/overview", "/dashboard/dashboard_page.py", "/dashboard/%2e%2e/page.py"):
            assert (await ask(path, {})).status == 404
        for headers, status in ((root, 200), (other, 403), ({}, 401)):
            reply = await ask("/admin/overview", headers)
            assert reply.status == status
            assert (b"prefill-0" in reply.body) == (status == 200)
        assert (await ask("/admin/overview", root, "POST")).status == 405


async def test_without_keys_it_tells_what_the_metrics_tell() -> None:
    async with live(System(1, 1)) as system:
        reply = await call(make_app(system.dispatcher), "GET", "/admin/overview")  # type: ignore[arg-type]
    assert reply.json()["requests"] == {}
