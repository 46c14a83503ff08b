"""Reads and writes of remote memory through NIXL."""
