"""The table of faults in docs/failures.md."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdkv.errors import EngineUnavailable, InvalidRequest, PdkvError, RequestFailed, ServerBusy, TransferError
from pdkv.router.engines.faults import fault_of

PAGE = Path(__file__).parents[3] / "docs" / "failures.md"


def kinds(base: type[PdkvError]) -> Iterator[type[PdkvError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


REQUESTS_END_WITH = [
    k for b in (EngineUnavailable, InvalidRequest, RequestFailed, ServerBusy, TransferError) for k in kinds(b)
]


@pytest.mark.parametrize("code", sorted({kind.code for kind in REQUESTS_END_WITH} - {"request_failed", "draining"}))
def test_the_page_names_each_code_under_its_fault(code: str) -> None:
    error = PdkvError("x")
    error.code = code
    section = PAGE.read_text().partition("## Whose fault")[2].partition("## ")[0]
    items = {item.partition("**")[0]: set(re.findall("`([a-z_]+)`", item)) for item in section.split("- **")[1:]}
    assert [fault for fault, codes in items.items() if code in codes] == [fault_of(error)]
