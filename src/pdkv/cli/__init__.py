"""The `pd` command."""
