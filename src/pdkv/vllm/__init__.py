"""Runs pdkv's connectors inside vLLM."""
