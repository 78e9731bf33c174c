"""The names of genlm-backend over Weft: change the import lines and the program runs.

from weft.compat.genlm import AsyncTransformer, load_model_by_name
"""

from __future__ import annotations

from ...aio import AsyncLM, load_model_by_name
from ...errors import BatchAbandoned
from ...tokens.token import Token
from .cache import OutputCache, TokenTrie
from .mock import MockAsyncLM
from .queries import Query
from .tries import AsyncTokenCharacterTrie, ParallelTokenCharacterTrie, TokenCharacterTrie
from .vocab import as_bytes, decode_vocab, get_byte_vocab, is_plain_bytes
from .wrappers import AsyncMlxLM, AsyncTransformer, AsyncVirtualLM

__all__ = [
    "AsyncLM",
    "AsyncMlxLM",
    "AsyncTokenCharacterTrie",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "BatchAbandoned",
    "MockAsyncLM",
    "OutputCache",
    "ParallelTokenCharacterTrie",
    "Query",
    "Token",
    "TokenCharacterTrie",
    "TokenTrie",
    "as_bytes",
    "decode_vocab",
    "get_byte_vocab",
    "is_plain_bytes",
    "load_model_by_name",
]
