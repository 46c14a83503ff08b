"""The model that most tests of the offline API have."""

from pathlib import Path

import pytest
from deployments import link_text_model


@pytest.fixture(scope="session")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer."""
    return link_text_model(tiny_model_dir, tmp_path_factory.mktemp("text-model"))
