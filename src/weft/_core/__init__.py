"""Internal: the token tree, the scheduler, sampling, tokenization and small helpers."""
