"""Fronts: processes for HTTP and text, in front of one dispatcher (docs/fronts.md)."""
