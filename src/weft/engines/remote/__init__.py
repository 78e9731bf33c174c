"""Models behind an address: any server of OpenAI's completions or chat protocol."""

from .engine import RemoteEngine

__all__ = ["RemoteEngine"]
