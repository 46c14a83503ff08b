"""One engine: scheduler, KV cache manager, block pool, model runner, sampler, executor. Knows no roles, no transports."""
