"""Fixtures that launch real deployments."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deployments import Launch, launches, write_tokenizer
from equality import Workload, greedy_workload


@pytest.fixture(scope="session")
def served_model(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random float32 Llama with a byte-level tokenizer, in a directory named "served"."""
    path = tmp_path_factory.mktemp("models") / "served"
    shutil.copytree(hf_model("llama"), path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Forty greedy requests to a Llama, and what transformers answers."""
    return greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def launch(served_model: Path) -> Iterator[Launch]:
    """Starts deployments of this test: launch(*flags, wait=True, environment={}) -> Running."""
    with launches(served_model) as factory:
        yield factory


@pytest.fixture(scope="module")
def module_launch(served_model: Path) -> Iterator[Launch]:
    """The same for deployments that all tests of a module share."""
    with launches(served_model) as factory:
        yield factory
