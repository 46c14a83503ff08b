"""Codecs: the forms in which KV is stored."""
