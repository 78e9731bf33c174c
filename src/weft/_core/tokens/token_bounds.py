"""The maximum bytes per token, to reject too long texts before tokenizing them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# What NFC makes of a text has at least a fourth of its bytes: four characters become one, at most.
_NFC_SHRINKS = 4
_KEEPS = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that leave no text out


def max_token_bytes(backend: Backend) -> int | None:
    """Return the maximum UTF-8 bytes of a text that one token can represent; None if unknown.

    It is known for BPEs that can write every byte and drop no text. Other models make one token of
    a long unknown word, or none of many spaces.

    Cost: O(tokens).
    """
    try:
        before = _steps(backend.normalizer, "normalizers")
        cuts = _steps(backend.pre_tokenizer, "pretokenizers")
    except Exception:  # so the library says that they are written in Python
        return None
    shrinks = _max_shrink_factor(before)
    names = backend.get_vocab(with_added_tokens=False)
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*before, *cuts))
    added = backend.get_added_tokens_decoder().values()
    if (
        shrinks is None
        or not all(map(_keeps_all_text, cuts))
        or not _can_write_every_text(backend.model, names, is_byte_level=is_byte_level)
        or any(token.lstrip or token.rstrip for token in added)  # they take spaces in
    ):
        return None
    own = max((len(name) if is_byte_level else len(name.encode()) for name in names), default=0)
    return shrinks * max(own, *_added_lengths(backend, (token.content for token in added)), 1)


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in order, as JSON objects of its file.

    Args:
        part: the library's object; None means no steps.
        inner: the key under which a sequence has its steps.
    """
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(state[inner]) if state["type"] == "Sequence" else [state]


def _max_shrink_factor(steps: Iterable[dict[str, Any]]) -> int | None:
    """Return the maximum factor by which a normalizer shrinks a text's bytes; None if unknown.

    steps: see `_steps`.
    """
    factor = 1
    for step in steps:
        kind = step["type"]
        if kind == "NFC":
            factor = _NFC_SHRINKS
        elif kind == "Replace":
            old = step["pattern"].get("String")
            if old is None or len(old.encode()) > len(step["content"].encode()):
                return None
        elif kind not in ("ByteLevel", "Prepend"):
            return None
    return factor


def _keeps_all_text(step: dict[str, Any]) -> bool:
    """Return True if a step of a pre-tokenizer drops nothing of a text.

    step: the step's JSON.
    """
    return step["type"] in _KEEPS or (step["type"] == "Split" and step["behavior"] != "Removed")


def _can_write_every_text(model: Any, names: dict[str, int], *, is_byte_level: bool) -> bool:
    """Return True if the model has tokens for every byte, so that it can write every text.

    Args:
        model: the library's model object.
        names: spelling → id.
        is_byte_level: tokens are spelled in the characters of byte-level BPE.
    """
    if type(model).__name__ != "BPE":
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level:
        from tokenizers.pre_tokenizers import ByteLevel

        return names.keys() >= set(ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in names for byte in range(256))


def _added_lengths(backend: Backend, contents: Iterable[str]) -> list[int]:
    """Return the lengths in bytes of added tokens, both of the text and of its normalized form."""
    texts = list(contents)
    if backend.normalizer is not None:
        texts += [backend.normalizer.normalize_str(each) for each in texts]
    return [len(each.encode()) for each in texts]
