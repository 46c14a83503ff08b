"""Measures a connector: bandwidth, latency, and its effect on steps that run during transfers."""
