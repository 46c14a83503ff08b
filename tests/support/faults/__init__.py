"""Faults under load: `python -m faults` in tests/support, and tests/e2e/test_faults.py."""
