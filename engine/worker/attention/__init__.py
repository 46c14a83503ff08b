"""Attention over paged KV: the backends, and how one is chosen."""
