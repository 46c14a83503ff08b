"""The JSON Schema Test Suite of draft 2020-12, from the source archive of the package `jsonschema`, which has it whole.

    python tests/support/schema_suite.py          (`make install` does)

downloads it into the virtual environment; JSON_SCHEMA_TEST_SUITE names a folder that has it already.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DRAFT = "draft2020-12"
PACKAGE = "jsonschema==4.26.0"
FOLDER = Path(os.environ.get("JSON_SCHEMA_TEST_SUITE") or Path(sys.prefix) / "share" / "json-schema-test-suite")

Schema = dict[str, Any] | bool


class Group(NamedTuple):
    """One schema, and values that fulfil it or do not."""

    name: str
    schema: Schema
    valid: list[Any]
    invalid: list[Any]


def groups() -> Iterator[Group]:
    """All of the draft, those of optional features and of formats included. Skips the test where they are missing."""
    files = sorted((FOLDER / "tests" / DRAFT).rglob("*.json"))
    if not files:
        pytest.skip(f"no JSON Schema Test Suite in {FOLDER}: {sys.executable} {__file__}")
    for file in files:
        for group in json.loads(file.read_text()):
            valid = [case["data"] for case in group["tests"] if case["valid"]]
            invalid = [case["data"] for case in group["tests"] if not case["valid"]]
            yield Group(f"{file.stem}: {group['description']}", group["schema"], valid, invalid)


def download() -> None:
    """Raises CalledProcessError: pip did not succeed."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--no-binary", "jsonschema", "--dest", folder, PACKAGE], check=True, timeout=600)
        [archive] = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar:
                _, _, name = member.name.partition("/json/")
                if member.isfile() and name.startswith(f"tests/{DRAFT}/"):
                    path = FOLDER / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]


if __name__ == "__main__":
    download()
