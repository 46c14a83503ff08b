"""Codecs: the forms in which KV lies in a store."""
