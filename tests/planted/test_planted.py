"""`make planted`: each defect can still be planted."""

import pytest
from planted.__main__ import DEFECTS, ROOT, Defect, planted


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_each_defect_can_be_planted(defect: Defect) -> None:
    assert planted((ROOT / defect.file).read_text(), defect)
    assert all((ROOT / "tests" / name).exists() for name in defect.tests.split())
