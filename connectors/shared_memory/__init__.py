"""Same-host hand-off through shared memory: the KV pool itself is the arena that peers map."""
