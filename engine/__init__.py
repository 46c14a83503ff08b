"""One engine: scheduler, KV cache, model runner, sampler, executor. Knows no roles and no transports."""
