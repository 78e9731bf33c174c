"""Looms on disk."""

from .format import VERSION
from .load import load
from .save import save

__all__ = ["VERSION", "load", "save"]
