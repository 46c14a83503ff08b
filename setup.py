"""The compiled kernels: each library once for each level of x86-64, from one source. All else is in pyproject.toml."""

import copy
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LEVELS = {
    "v4_bf16": (["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi"], "avx512_bf16"),
    "v4": (["-march=x86-64-v4"], "avx512vl"),
    "v3": (["-march=x86-64-v3"], "avx2"),
    "v2": (["-march=x86-64-v2"], ""),
}
"""Flags of each level, and what /proc/cpuinfo has where it can run; kernels/compiled.py loads one that the host has."""

FLOATS = ["-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
EXACT = [*FLOATS, "-ffp-contract=off"]
LIBRARIES = {
    "linear": (["linear", "passes", "prompts"], [*EXACT, "-O2"]),  # -O3 keeps too much in registers: sums do not fit
    "host": (["host", "digest", "stream"], FLOATS),
    "codec": (["cachegen", "rans"], EXACT),
    "sampler": (["sampler"], EXACT),
}
"""Sources and flags; without a compiler numpy and torch serve."""
HEADERS = ["lanes", "passes", "rans", "tiles", "vectors"]


def extension(name: str, sources: list[str], flags: list[str], needs: str = "") -> Extension:
    """One library, which may be left out."""
    made = Extension(
        f"pdkv.kernels._{name}",
        [f"kernels/{source}.c" for source in sources],
        depends=[f"kernels/{header}.h" for header in HEADERS],
        extra_compile_args=["-std=gnu11", "-O3", "-g0", *flags],
        extra_link_args=["-fopenmp"] if "-fopenmp" in flags else [],
        optional=True,
    )
    made.needs = needs
    return made


class Build(build_ext):
    """Builds libraries side by side, each in a folder of its own: levels are made from the same sources."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = True

    def run(self) -> None:
        if self.inplace or self.editable_mode:  # for this host alone
            cpu = Path("/proc/cpuinfo")
            flags = cpu.read_text() if cpu.exists() else ""
            self.extensions = [ext for ext in self.extensions if ext.needs in flags]
        super().run()

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)
        own.build_temp = f"{self.build_temp}/{ext.name}"
        build_ext.build_extension(own, ext)


def extensions() -> list[Extension]:
    """What this kind of machine can use: levels of x86-64, or what is compiled without any flags for it."""
    levels = LEVELS if platform.machine() == "x86_64" else {"base": ([], "")}
    return [
        *(
            extension(f"{name}_{level}", sources, flags + march, needs)
            for name, (sources, flags) in LIBRARIES.items()
            for level, (march, needs) in levels.items()
            if name == "linear" or level != "v4_bf16"  # the others have nothing to gain from it
        ),
        extension(
            "block_keys", ["levels", "block_keys", "block_pool", "block_runs", "block_table", "int_lists", "ngrams"], []
        ),
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
