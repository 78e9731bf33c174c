"""Looms: trees of generated text whose nodes can be grown, edited, scored and saved."""

from .grow import Branches
from .heddle import Heddle
from .kv_fragments import KVFrag
from .loom import Loom
from .n8loom_names import StreamItem

__all__ = ["Branches", "Heddle", "KVFrag", "Loom", "StreamItem"]
