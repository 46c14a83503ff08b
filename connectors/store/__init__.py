"""KV through a store: shared storage, Redis, LMCache, or a store of your own."""
