"""An HTTP server with stored looms and one model for many clients. `weft serve` runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .app import create_app as create_app
    from .config import ServerConfig as ServerConfig

__all__ = ["ServerConfig", "create_app"]

__getattr__ = lazy_getattr(__name__, {"app": "create_app", "config": "ServerConfig"})
