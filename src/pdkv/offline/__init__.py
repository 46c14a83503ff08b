"""Common to `LLM` and `AsyncLLM`: requests made of prompts, an engine in this process, outputs."""
