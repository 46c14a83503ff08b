"""Tokenizer, chat template, incremental detokenizer and stop strings. No torch, no transformers."""
