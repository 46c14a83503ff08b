"""Engines, host processes and worlds in which the kit's cases and benchmarks run connectors."""
