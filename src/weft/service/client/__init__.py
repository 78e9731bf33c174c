"""A client of a Weft server: `Client`, and `AsyncClient` beside a running loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.doors import lazily

if TYPE_CHECKING:
    from .client import AsyncClient, Client
    from .growth import BranchDelta

__all__ = ["AsyncClient", "BranchDelta", "Client"]

__getattr__ = lazily(__name__, {"client": "AsyncClient Client", "growth": "BranchDelta"})
