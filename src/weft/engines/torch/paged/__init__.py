"""KV in a pool of slots: the pool, attention metadata and tree attention in Triton."""
