"""Chooses how many engines of each role a launch runs (docs/autoscaling.md)."""
