"""Content-addressed KV stores."""
