"""KV through a store: shared storage, Redis, LMCache, or a custom store."""
