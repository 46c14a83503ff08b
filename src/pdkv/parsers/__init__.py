"""Splits a model's output, while it is written, into reasoning, tool calls, and the text for the user."""
