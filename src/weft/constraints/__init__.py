"""Constraints: what text a generation may produce."""

from __future__ import annotations

from .base import Constraint, Matcher

__all__ = ["Constraint", "Matcher"]
