"""One prefill and one decode engine of a small random model, for runs that look at what is in front of them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments import Running, launches
from serving_checks import serve_directory
from small_models import make_hf_model


@contextmanager
def launched(*flags: str, **model_config: Any) -> Iterator[tuple[Running, Path]]:
    """The deployment, and the folder of its model, which lies in it until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        work = Path(folder)
        model = serve_directory(make_hf_model(work / "model", "llama", "float32", **model_config), work)
        with launches(model) as launch:
            yield launch("--prefill", "1", "--decode", "1", *flags), model
