"""The draw rule in PyTorch and Triton, where the logits are."""
