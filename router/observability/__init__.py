"""What shows a router at work, beside its metrics."""
