"""The reasoning face: a tree of heddles under a loom."""

from .grow import Branches
from .heddle import Heddle
from .known import StreamItem
from .kvfrag import KVFrag
from .loom import Loom

__all__ = ["Branches", "Heddle", "KVFrag", "Loom", "StreamItem"]
