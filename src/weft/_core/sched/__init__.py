"""The scheduler: turns requests of looms, branches and AsyncLM into batched model calls."""
