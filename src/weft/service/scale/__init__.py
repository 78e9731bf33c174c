"""Replicas of the server over one database, placed and reached by Ray Serve.

`weft.service.scale:app` is the import path of a Ray Serve config file. Needs the packages of
Weft's extra `ray`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .deploy import app as app

__all__ = ["app"]

__getattr__ = lazy_getattr(__name__, {"deploy": "app"})
