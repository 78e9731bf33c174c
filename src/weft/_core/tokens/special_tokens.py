"""Encode users' text so that no special token can occur in it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def without_special_tokens(
    backend: Backend, specials: Mapping[str, int]
) -> tuple[Backend, dict[str, str]]:
    """Copy a tokenizer, with random names for its special tokens; return the copy and the names.

    Ids do not change. So the copy encodes the usual name of a special token as ordinary text,
    however the text is normalized. Some names stay, because the model also writes ordinary text
    with these tokens: bytes, and single characters (such as a pad token "!").

    Cost: three seconds for 256k tokens and twice as many merges.

    specials: name → id.

    Returns: the copy, and a mapping from usual to random names.
    """
    from tokenizers import Tokenizer as Backend

    data = json.loads(backend.to_str())
    ordinary = _names_in_ordinary_text(data, specials)
    # NOTE: private-use characters, which no normalizer changes and no merge joins with others.
    nonce = secrets.token_hex(8)
    hidden = {
        name: f"\ue000{nonce}.{token}\ue001"
        for name, token in specials.items()
        if name not in ordinary
    }
    for token in data["added_tokens"]:
        if token["content"] in hidden:
            token |= {"content": hidden[token["content"]], "special": False, "normalized": False}
            token["single_word"] = False  # wherever a template puts it
    _rename_pieces(data["model"], hidden)
    twin = Backend.from_str(json.dumps(data))
    twin.encode_special_tokens = True
    moved = next((name for name in hidden if twin.token_to_id(hidden[name]) != specials[name]), "")
    if moved:
        raise ConfigError(f"the special token {moved!r} has another id in a copy")
    return twin, hidden


@lru_cache(maxsize=64)
def pattern_of(names: frozenset[str]) -> re.Pattern[str]:
    """Compile a pattern that finds the longest of these names at a place, as its only group.

    Without names it matches nothing. Cost: a search is one scan, for any number of names.
    """
    spelled = sorted(names - {""})
    return re.compile(f"({_prefix_tree_pattern(spelled) if spelled else '(?!)'})")


def _prefix_tree_pattern(names: Sequence[str]) -> str:
    """Return a pattern of distinct names, as a prefix tree that reads each character once."""
    shared = commonprefix(names)
    rests: dict[str, list[str]] = {}
    for name in names:
        rest = name[len(shared) :]
        rests.setdefault(rest[:1], []).append(rest)
    ends = rests.pop("", None) is not None
    parts = [*map(_prefix_tree_pattern, rests.values()), *([""] if ends else [])]
    return re.escape(shared) + (f"(?:{'|'.join(parts)})" if rests else "")


def segments(
    pieces: Iterable[tuple[str, bool]], names: re.Pattern[str]
) -> Iterator[tuple[str, bool]]:
    """Split a rendered chat into special tokens and the text between them.

    Args:
        pieces: pairs of a text and a flag: it is the name of a special token that a user typed.
        names: finds special tokens (see `pattern_of`).

    Yields: pairs of a text and a flag: it contains a typed name. Special tokens have False.
    """
    text, is_plain = "", False
    for piece, is_typed in pieces:
        for at, part in enumerate([piece] if is_typed else names.split(piece)):
            if at % 2:
                yield text, is_plain
                yield part, False
                text, is_plain = "", False
            else:
                text, is_plain = text + part, is_plain or is_typed
    yield text, is_plain


def encode_literally(
    text: str, encode: Callable[[str], list[int]], specials: Mapping[str, int]
) -> list[int]:
    """Tokenize a text as plain text, even where it contains names of special tokens.

    Each such name is split after its first character, and the parts are encoded separately.

    Args:
        text: the text.
        encode: returns the ids of a text; it may return a special token for a complete name.
        specials: name → id.

    Raises: ConfigError if `encode` returns a special token for a part of a name.
    """
    starts = re.finditer(f"(?={pattern_of(frozenset(specials)).pattern})", text)
    cuts = [0, *(match.start() + 1 for match in starts), len(text)]
    anchor, ids = encode("x"), encode(text[: cuts[1]])
    for start, stop in pairwise(cuts[1:]):
        # Behind an x no dummy space comes in.
        with_anchor = encode(f"x{text[start:stop]}")
        is_fit = with_anchor[: len(anchor)] == anchor
        ids += with_anchor[len(anchor) :] if is_fit else encode(text[start:stop])
    names = {token: name for name, token in specials.items()}
    special_name = next((names[token] for token in ids if token in names), None)
    if special_name is not None:
        raise ConfigError(
            f"{text!r:.60} contains {special_name!r}, which this tokenizer can only write as its"
            " special token; leave it out"
        )
    return ids


def _names_in_ordinary_text(data: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return the special tokens' names that the model also needs for ordinary text.

    data: the tokenizer's JSON. names: the names of the special tokens.
    """
    model = data["model"]
    kept = {name for name in names if model.get("byte_fallback") and _BYTE_TOKEN.fullmatch(name)}
    characters = {name for name in names if len(name) == 1}
    return kept | (characters & _pieces_of_ordinary_text(data) if characters else set())


def _pieces_of_ordinary_text(data: Mapping[str, Any]) -> set[str]:
    """Return the vocabulary entries that the model uses for ordinary text.

    The result is exact for single characters only.

    data: the tokenizer's JSON.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    model = data["model"]
    if '"ByteLevel"' in json.dumps([data["pre_tokenizer"], data["normalizer"]]):
        return set(ByteLevel.alphabet())
    if model["type"] == "Unigram":
        # Trainers give 0 to special tokens, and log-probabilities to all others.
        return {piece for piece, score in model["vocab"] if score < 0}
    if model["type"] == "BPE" and model.get("byte_fallback"):
        return {part for merge in model["merges"] for part in _split_merge(merge)}
    return set(model["vocab"])  # what is not there is unknown


def _rename_pieces(model: dict[str, Any], hidden: Mapping[str, str]) -> None:
    """Rename pieces of a model in place, and remove merges that would create them.

    Args:
        model: the model part of the tokenizer's JSON.
        hidden: old name → new name.
    """
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocab]
        return
    model["vocab"] = {hidden.get(piece, piece): token for piece, token in vocab.items()}
    if model["unk_token"] is not None:
        model["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        skipped = len(model.get("continuing_subword_prefix") or "")

        def creates_hidden(left: str, right: str) -> bool:
            """Return True if a merge uses or creates a renamed piece."""
            return left in hidden or right in hidden or left + right[skipped:] in hidden

        model["merges"] = [
            each for each in model["merges"] if not creates_hidden(*_split_merge(each))
        ]


def _split_merge(merge: Any) -> list[str]:
    """Return the two pieces of a merge, which files write as a text or as a pair."""
    return merge.split(" ") if isinstance(merge, str) else list(merge)
