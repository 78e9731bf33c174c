"""The names of genlm-backend over Weft: change the import lines and the program runs.

    from weft.compat.genlm import AsyncTransformer, load_model_by_name

Programs that use it, such as genlm-control, need no change: see `install`.
"""

from __future__ import annotations

from typing import Any

from ..._core.tokens.codec import Token
from ...asynclm import AbstractAsyncLM as AsyncLM
from ...asynclm import load_model_by_name
from ...errors import BatchAbandoned
from .cache import CachedContext, OutputCache, TokenTrie
from .install import install
from .mlx import AsyncMlxLM
from .models import AsyncTransformer, AsyncVirtualLM, MockAsyncLM, Query
from .tries import AsyncTokenCharacterTrie, ParallelTokenCharacterTrie, TokenCharacterTrie
from .vocab import (
    ByteDecoderError,
    ByteVocabError,
    as_bytes,
    check_byte_decoder,
    decode_vocab,
    get_byte_vocab,
    is_plain_bytes,
)

__all__ = [
    "AsyncLM",
    "AsyncMlxLM",
    "AsyncTokenCharacterTrie",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "BatchAbandoned",
    "ByteDecoderError",
    "ByteVocabError",
    "CachedContext",
    "MockAsyncLM",
    "OutputCache",
    "ParallelTokenCharacterTrie",
    "Query",
    "Token",
    "TokenCharacterTrie",
    "TokenTrie",
    "as_bytes",
    "check_byte_decoder",
    "decode_vocab",
    "get_byte_vocab",
    "install",
    "is_plain_bytes",
    "load_model_by_name",
]

# Back-end names that `load_model_by_name` accepts.
BACKENDS: dict[str, Any] = {
    "hf": AsyncTransformer,
    "vllm": AsyncVirtualLM,
    "mlx": AsyncMlxLM,
    "mock": MockAsyncLM,
}
