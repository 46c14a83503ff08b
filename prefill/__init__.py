"""What makes an engine a prefill engine: hand-offs and leases."""
