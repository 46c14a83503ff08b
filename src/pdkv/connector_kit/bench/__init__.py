"""Measures a connector: bandwidth, latency, and its effect on the steps that run meanwhile."""
