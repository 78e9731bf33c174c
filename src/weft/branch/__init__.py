"""Branches: decoding state that can be forked and advanced one token at a time."""

from __future__ import annotations

from .branch import Branch
from .rerank import Ranked, Rerank
from .session import Session
from .state import Metrics, Pressure, Produced
from .store import BranchStore

__all__ = [
    "Branch",
    "BranchStore",
    "Metrics",
    "Pressure",
    "Produced",
    "Ranked",
    "Rerank",
    "Session",
]
