"""Lists of ints become arrays as numpy makes them, by the compiled form and without it."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pdkv.kernels import int_lists
from pdkv.kernels.int_lists import int32_array, int64_array

Convert = Callable[[Collection[int]], npt.NDArray[Any]]


@pytest.fixture(params=["compiled", "numpy"])
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(int_lists, "_array_of", lambda: None)
    else:
        assert int_lists.available()


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize(("convert", "dtype"), [(int64_array, np.int64), (int32_array, np.int32)])
@pytest.mark.parametrize("count", [0, 1, 8, 9, 1000])
def test_the_numbers_are_the_same(convert: Convert, dtype: type, count: int) -> None:
    info = np.iinfo(dtype)
    numbers = [int(info.min), int(info.max), -1, 0, *range(-count, count)][:count]
    for made in (convert(numbers), convert(tuple(numbers)), convert(dict.fromkeys(numbers).keys())):
        assert made.dtype == dtype
        assert made.flags.writeable
        assert made.tolist() == numbers


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize(
    ("convert", "wrong"),
    [(int64_array, 2**63), (int64_array, -(2**63) - 1), (int32_array, 2**31), (int32_array, 2**70)],
)
def test_a_number_that_does_not_fit_is_an_error(convert: Convert, wrong: int) -> None:
    with pytest.raises(OverflowError):
        convert([*range(20), wrong])


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize("convert", [int64_array, int32_array])
def test_what_is_no_number_is_an_error(convert: Convert) -> None:
    with pytest.raises((TypeError, ValueError)):
        convert([*range(20), "one"])  # type: ignore[list-item]
