"""Transformers models with fewer calls and kernels: full decoders, and a model's own modules."""
