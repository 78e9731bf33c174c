"""One queue, one step, one driver: what turns extends and runs into model calls."""
