"""Clients of a Weft server: `Client`, and `AsyncClient` for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .client import AsyncClient, Client
    from .growth import BranchDelta

__all__ = ["AsyncClient", "BranchDelta", "Client"]

__getattr__ = lazy_getattr(__name__, {"client": "AsyncClient Client", "growth": "BranchDelta"})
