"""Proposers guess tokens to come, which later steps verify; any of them may be plugged in (docs/speculation.md)."""
