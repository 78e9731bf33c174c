"""Steps with few calls and few kernels: whole decoders, and a model's own modules."""
