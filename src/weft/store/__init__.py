"""Looms on disk."""

from .file import VERSION, load, save

__all__ = ["VERSION", "load", "save"]
