"""KV in a pool of slots: its memory, the plan of a step, and tree attention in Triton."""
