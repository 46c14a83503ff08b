"""Mutated model directories: a short, seeded run; `make soak` has ten thousand."""

from pathlib import Path

from soak.directories import fuzz


def test_what_is_made_of_mutated_directories_is_what_transformers_makes(tmp_path: Path) -> None:
    bases = ("Llama-2-7b-chat-hf", "Qwen2.5-7B-Instruct", "SmolLM2-1.7B-Instruct", "Phi-3-mini-4k-instruct")
    result = fuzz(tmp_path, 30, seed=11, bases=bases)
    assert result.violations == []
    assert result.outcomes["equal"] > 5
    assert result.outcomes["refused"] > 2
