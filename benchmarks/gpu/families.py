"""One small random model of each family: tokens in float32 are those of the CPU wherever the choice is not a matter of
rounding.
"""

from collections.abc import Iterator

from benchmarks.gpu.tokens import compare, generate
from benchmarks.models import FAMILIES, find_family, models_folder
from benchmarks.report import Claim

MODELS = tuple(FAMILIES)
"""For the dry run, which names them."""


def run(device: str, scale: str) -> Iterator[Claim]:
    """A claim for each family."""
    prompts = [[(7 * i + 5 * j) % 4000 + 2 for j in range(9 + 40 * i)] for i in range(2 if scale == "tiny" else 16)]
    with models_folder() as folder:
        for family in MODELS:
            options = {"model": find_family(folder, family), "max_model_len": 1024}
            expected, found = (generate(where, prompts, **options) for where in ("cpu", device))
            yield compare(family, device, expected, found)
