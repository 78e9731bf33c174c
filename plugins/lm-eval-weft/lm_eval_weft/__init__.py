"""lm-evaluation-harness over models that run in Weft: `--model weft`."""

from .model import WeftLM as WeftLM

__all__ = ["WeftLM"]
