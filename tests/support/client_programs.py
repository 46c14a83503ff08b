"""Other people's clients as programs, in a Python of their own."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 120.0
FINDS = "import importlib.util, sys; sys.exit(importlib.util.find_spec"


def python_with(package: str) -> str:
    """A Python that has the client, else the test is skipped.

    Clients seldom agree on what they need: CLIENTS_PYTHON may name several, separated by colons.
    """
    for python in filter(None, os.environ.get("CLIENTS_PYTHON", sys.executable).split(os.pathsep)):
        found = subprocess.run(
            [python, "-c", f"{FINDS}({package!r}) is None)"], capture_output=True, cwd="/", timeout=TIMEOUT_S
        )
        if not found.returncode:
            return python
    pytest.skip(f"needs {package}: set CLIENTS_PYTHON to a Python that has it")


async def run_program(*command: str, directory: Path | None = None, **variables: str) -> str:
    """What a program prints; its errors are the test's."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=directory or "/",
        env={**os.environ, "OPENAI_API_KEY": "none", "PYTHONWARNINGS": "ignore", **variables},
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, errors.decode()[-2000:]
    return out.decode()
