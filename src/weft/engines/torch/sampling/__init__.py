"""Sampling on a GPU with Triton, and faster reductions on a CPU."""
