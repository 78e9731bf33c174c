"""The tokenizer of a GGUF file, built from the file alone and equal to llama.cpp's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..._core.atomic_files import repr_short
from ..._core.tokens.codec import Codec, is_library_error
from ..._core.tokens.sentencepiece import PieceTable, SentencePieceCodec
from ..._core.tokens.tokenizer import Tokenizer, default_template
from ...errors import ModelLoadError, Unsupported, WeftError
from .header import GGUF
from .pretokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_log = logging.getLogger("weft.engines")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NO_TOKEN = 0xFFFFFFFF
_PHI3_KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")
# Role of a token → its key in the file.
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
_SENTENCEPIECE_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
# Spellings of tokens that end a turn or a text in llama.cpp, whatever type the file gives them.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>"
    " <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>"
    " <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~["
    " <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO>"
    " <reponame> <|file_sep|>".split()
)
_FILL_IN_MIDDLE = frozenset(
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|>"
    " <|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF>"
    " <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID>"
    " ▁<MID> <|code_middle|> <|middle|>".split()
)
_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # always rendered


def read_tokenizer(header: GGUF) -> Tokenizer:
    """Build the tokenizer of a GGUF file from its header.

    An unknown pre-tokenizer only logs a warning; the result may then split text differently.

    Cost: 0.1 to 0.9 s for 50,000 to 260,000 tokens; 1.8 s for Gemma 4.

    Raises:
        ModelLoadError: the file has no tokenizer.
        Unsupported: it is neither byte-level BPE, nor SentencePiece BPE, nor Gemma 4's.
    """
    values = header.values
    kind = values.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        raise ModelLoadError(f"{header.file} has no tokenizer; pass tokenizer=")
    if kind not in _BUILDERS:
        raise Unsupported(
            f"{header.file.name} has a tokenizer of the type {repr_short(kind)}; allowed are"
            f' {", ".join(_BUILDERS)}. Pass tokenizer=, or take engine="llamacpp"'
        )
    try:
        return _build_tokenizer(header)
    except BaseException as error:
        if isinstance(error, WeftError) or not is_library_error(error):
            raise
        raise ModelLoadError(
            f"the tokenizer in {header.file} cannot be read: {error!s:.200}; download it again"
        ) from error


def _build_tokenizer(header: GGUF) -> Tokenizer:
    """Build the tokenizer: SentencePiece, byte-level BPE or Gemma 4's."""
    vocabulary = _Vocabulary(header.values)
    build = _BUILDERS[vocabulary.values["model"]]
    return Tokenizer(
        build(vocabulary, header.file.name),
        special_tokens=vocabulary.special_tokens,
        chat_template=default_template(header.values.get("tokenizer.chat_template")),
        stop_ids=vocabulary.end_ids,
        name=f"the tokenizer of {header.file}",
    )


class _Vocabulary:
    """The tokens of a GGUF file with their types and roles (end of text, unknown, …).

    Some types differ from the file's: they are corrected as in llama.cpp.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in values.items()
            if key.startswith("tokenizer.ggml.")
        }
        if self.values["model"] == "llama":
            self.values = {**_SENTENCEPIECE_DEFAULTS, **self.values}
        self.model_name = str(values.get("general.name", "")).lower()
        tokens = self.values["tokens"]
        self.tokens: list[str] = [
            token.partition("\0")[0] or f"[EMPTY_{i}]" for i, token in enumerate(tokens)
        ]
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        types = self.values.get("token_type") or [_NORMAL] * len(tokens)
        self._ends = {i for text in _ENDS if (i := self._ids.get(text)) is not None}
        self.types = self._correct_types(list(types))

    @property
    def special_tokens(self) -> dict[str, str]:
        """Spelling of each role, such as "eos_token"."""
        ids = {role: self.role_id(key) for role, key in _ROLES.items()}
        return {role: self.tokens[i] for role, i in ids.items() if i is not None}

    @property
    def end_ids(self) -> list[int]:
        """Ids that end a turn, a message or a text."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        named = {i for key in keys if (i := self.role_id(key)) is not None}
        return sorted(self._ends | named)

    def role_id(self, key: str) -> int | None:
        """Return the token id of a role; None if the file has none.

        key: end of its metadata key, such as "eos_token_id".
        """
        value = self.values.get(key)
        is_id = isinstance(value, int) and 0 <= value < len(self.tokens) and value != _NO_TOKEN
        return value if is_id else None

    def of_type(self, *types: int) -> frozenset[int]:
        """Return the ids of tokens of these types."""
        return frozenset(i for i, kind in enumerate(self.types) if kind in types)

    def affixes(self, *, adds_bos: bool) -> tuple[list[int], list[int]]:
        """Return the ids before and after a text.

        Args:
            adds_bos: default if the file does not specify it.
        """
        begin, end = self.role_id("bos_token_id"), self.role_id("eos_token_id")
        has_begin = self.values.get("add_bos_token", adds_bos) and begin is not None
        has_end = self.values.get("add_eos_token", False) and end is not None
        return [begin] if has_begin else [], [end] if has_end else []  # type: ignore[list-item]

    def _correct_types(self, types: list[int]) -> list[int]:
        """Correct the types of control tokens by their spelling, as llama.cpp does; return `types`.

        Also removes tokens that do not end a text from `_ends`.
        """
        ids = self._ids
        for text in _ENDS | _FILL_IN_MIDDLE:
            if text in ids:
                types[ids[text]] = _CONTROL
        for text in _HARMONY:
            if text in ids:
                types[ids[text]] = _USER_DEFINED
        calls = "<|call|>" in ids or "<|calls|>" in ids
        if "<|end|>" in ids and calls and ("<|return|>" in ids or "<|flush|>" in ids):
            types[ids["<|end|>"]] = _USER_DEFINED  # it ends a message, but not the turn
            self._ends.discard(ids["<|end|>"])
        if "</s>" in ids and ("<|tool_response>" in ids or "<|plamo:eos|>" in ids):
            types[ids["</s>"]] = _NORMAL
            self._ends.discard(ids["</s>"])
        return types


# SentencePiece ----------------------------------------------------------------------------------


def _sentencepiece_codec(vocabulary: _Vocabulary, _: str) -> SentencePieceCodec:
    """Build a SentencePiece BPE codec, with Phi-3's stripping of blanks."""
    values, tokens = vocabulary.values, vocabulary.tokens
    controls = vocabulary.of_type(_CONTROL, _UNKNOWN)
    text_ids = vocabulary.of_type(_USER_DEFINED)
    stripping: frozenset[int] = frozenset()
    if "phi-3" in vocabulary.model_name or "phi3" in vocabulary.model_name:
        keeping = {i for i, token in enumerate(tokens) if token in _PHI3_KEEPS_BLANKS}
        stripping = (controls | text_ids) - keeping
    begin, end = vocabulary.affixes(adds_bos=True)
    ids = {token: i for i, token in enumerate(tokens)}
    return SentencePieceCodec(
        PieceTable(
            spellings=tokens,
            scores=values.get("scores") or [0.0] * len(tokens),
            byte_ids=[ids.get(f"<0x{b:02X}>", ids.get(chr(b), 0)) for b in range(256)],
            control_ids=controls,
            text_ids=text_ids,
            unknown_id=vocabulary.role_id("unknown_token_id"),
            stripping_ids=stripping,
            begin_ids=tuple(begin),
            end_ids=tuple(end),
            puts_space=bool(values.get("add_space_prefix", True)),
        )
    )


# Byte-level BPE ---------------------------------------------------------------------------------


def _byte_level_backend(vocabulary: _Vocabulary, name: str) -> Backend:
    """Build a byte-level BPE tokenizer of the `tokenizers` library."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    pre = _pre_tokenizer(vocabulary.values.get("pre"), name)
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = _parse_merges(vocabulary.values.get("merges"), ids, name)
    backend = Backend(models.BPE(ids, merges, ignore_merges=pre.ignores_merges))
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, vocabulary)
    _set_affixes(backend, vocabulary, *vocabulary.affixes(adds_bos=pre.adds_bos))
    return backend


def _gemma4_backend(vocabulary: _Vocabulary, name: str) -> Backend:
    """Build Gemma 4's tokenizer: BPE merges over full lines, with "▁" for a space."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = _parse_merges(vocabulary.values.get("merges"), ids, name)
    backend = Backend(models.BPE(ids, merges, ignore_merges=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[^\\n]+|[\\n]+"), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add_tokens(backend, vocabulary)
    vocabulary.values["add_bos_token"] = True  # regardless of the file, as in llama.cpp
    _set_affixes(backend, vocabulary, *vocabulary.affixes(adds_bos=True))
    return backend


def _pre_tokenizer(pre: object, name: str) -> PreTokenizer:
    """Return the pre-tokenizer `pre`; if it is unknown, a default one, with a warning."""
    pre_tokenizer = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    if pre_tokenizer is not None:
        return pre_tokenizer
    if pre != "default":
        _log.warning(
            "%s has the unknown pre-tokenizer %s: the default expressions split its text, and token"
            " ids may differ from those in training; use engine='llamacpp', or tokenizer= with the"
            " model's own",
            name,
            repr_short(pre),
        )
    return DEFAULT


def _parse_merges(merges: object, ids: Mapping[str, int], name: str) -> list[tuple[str, str]]:
    """Parse BPE merges ("left right"); those with unknown tokens are left out.

    Raises:
        ModelLoadError: the list is missing. The message contains `name`.
    """
    if not isinstance(merges, list) or not all(isinstance(each, str) for each in merges):
        raise ModelLoadError(f"{name}: tokenizer.ggml.merges is missing; download the file again")
    pairs: dict[tuple[str, str], None] = {}
    for merge in merges:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at > 0 and left in ids and right in ids and left + right in ids:
            pairs.setdefault((left, right))
    return list(pairs)


def _add_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Register the tokens that are split off before merging."""
    from tokenizers import AddedToken

    special = vocabulary.of_type(_CONTROL, _UNKNOWN)
    added = sorted(special | vocabulary.of_type(_USER_DEFINED))
    backend.add_tokens(
        [AddedToken(vocabulary.tokens[i], special=i in special, normalized=False) for i in added]
    )


def _set_affixes(
    backend: Backend, vocabulary: _Vocabulary, begin: Sequence[int], end: Sequence[int]
) -> None:
    """Make the tokenizer add the ids `begin` and `end` around each text."""
    from tokenizers import processors

    if not begin and not end:
        return
    affixes = [vocabulary.tokens[i] for i in (*begin, *end)]
    backend.post_processor = processors.TemplateProcessing(
        single=[*affixes[: len(begin)], "$A", *affixes[len(begin) :]],
        special_tokens=[(vocabulary.tokens[i], i) for i in {*begin, *end}],
    )


_BUILDERS: dict[str, Callable[[_Vocabulary, str], Backend | Codec]] = {
    "gpt2": _byte_level_backend,
    "llama": _sentencepiece_codec,
    "gemma4": _gemma4_backend,
}
