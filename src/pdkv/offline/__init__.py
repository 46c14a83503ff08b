"""What `LLM` and `AsyncLLM` share: requests made of prompts, an engine in this process, outputs."""
