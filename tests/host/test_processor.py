"""Which instructions a processor has, from the lines of /proc/cpuinfo."""

from pathlib import Path

import pytest

from pdkv.host import processor


@pytest.mark.parametrize(
    ("text", "name", "emulates"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx2 f16c\n", "avx2", True),
        ("flags\t\t: avx2 avx512f avx512vl\n\nflags\t\t: other\n", "avx512f", True),
        ("flags\t\t: avx2 avx512f avx512_bf16\n", "avx512_bf16", False),
        ("flags\t\t: avx2 avx512f avx512_bf16 amx_tile amx_bf16\n", "amx_bf16", False),
        ("Features\t: fp asimd sve\n", "asimd", True),
        ("Features\t: fp asimd sve i8mm bf16\n", "bf16", False),
        ("processor\t: 0\n", "unknown", False),
    ],
)
def test_flags(text: str, name: str, emulates: bool, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert processor.instruction_set(path) == name
    assert processor.emulates_bfloat16(path) is emulates


def test_without_the_file_nothing_is_known(tmp_path: Path) -> None:
    assert processor.instruction_set(tmp_path / "none") == "unknown"
    assert not processor.emulates_bfloat16(tmp_path / "none")
