"""Checks and measures a connector through its public interface. Stands above connectors and launch."""
