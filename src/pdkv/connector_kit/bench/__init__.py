"""Measures a connector: bandwidth, latency and what it costs the steps beside it."""
