"""KV in padded buffers: the pool, its steps and attention products."""
