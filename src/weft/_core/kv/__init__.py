"""The token tree: which token paths are known, which of them have KV, and what may be evicted."""
