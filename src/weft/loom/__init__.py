"""The reasoning face: a tree of heddles under a loom."""

from .ask import KVFrag
from .grow import Branches
from .heddle import Heddle
from .known import StreamItem
from .loom import Loom

__all__ = ["Branches", "Heddle", "KVFrag", "Loom", "StreamItem"]
