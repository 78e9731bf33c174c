"""KV in padded banks: its memory, the step over it, and the attention products."""
