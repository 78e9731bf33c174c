"""The tokenizer of a GGUF file: a Weft tokenizer that calls llama.cpp's."""

from __future__ import annotations

import ctypes
from functools import cached_property, partial

import numpy as np
from llama_cpp import llama_cpp as C

from ..._core.tokens.codec import Codec
from ..._core.tokens.special_tokens import encode_literally
from ..._core.tokens.tokenizer import Tokenizer, default_template
from ...errors import ConfigError
from ..gguf import GGUF
from .library import Handle, load_model

_SPECIAL = C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN
_WITH_DUMMY_SPACE = (C.LLAMA_VOCAB_TYPE_SPM, C.LLAMA_VOCAB_TYPE_UGM)
_PIECE_BYTES = 256  # initial buffer; longer pieces are read a second time
_NAMED = ("bos", "eos", "pad", "sep", "mask")


def read_tokenizer(header: GGUF) -> Tokenizer:
    """Load the tokenizer of a GGUF file, without the weights.

    header: of a file that `read_gguf` accepts. Raises: ModelLoadError if llama.cpp cannot load it.
    """
    codec = VocabCodec(load_model(header.file, vocab_only=True), header)
    named = {f"{name}_token": codec.named(name) for name in _NAMED}
    return Tokenizer(
        codec,
        special_tokens={name: text for name, text in named.items() if text},
        chat_template=default_template(header.values.get("tokenizer.chat_template")),
        stop_ids=codec.end_ids,
        name=f"the tokenizer of {header.file}",
    )


class VocabCodec(Codec):
    """Text encoder and decoder that calls llama.cpp's tokenizer. Thread-safe."""

    def __init__(self, model: Handle, header: GGUF) -> None:
        """Keep `model`, whose vocabulary is loaded; `header` is of the same file."""
        self._model = model
        self._vocab = C.llama_model_get_vocab(model.pointer)
        self._n = int(C.llama_vocab_n_tokens(self._vocab))
        kind = C.llama_vocab_type(self._vocab)
        puts_space = header.values.get("tokenizer.ggml.add_space_prefix", True)
        self.first_space_is_dummy = bool(kind in _WITH_DUMMY_SPACE and puts_space)
        # From the header: one llama.cpp call per token would take 2 µs each.
        self._texts: list[str] = header.values["tokenizer.ggml.tokens"]
        self._unknown = header.values.get("tokenizer.ggml.unknown_token_id")

    def __len__(self) -> int:
        return self._n

    @cached_property
    def vocab_bytes(self) -> list[bytes]:  # type: ignore[override]
        """The bytes of every token, by id."""
        room = ctypes.create_string_buffer(_PIECE_BYTES)
        view = memoryview(room).cast("B")
        pieces = []
        for token_id in range(self._n):
            n = C.llama_token_to_piece(self._vocab, token_id, room, _PIECE_BYTES, 0, True)
            pieces.append(view[:n].tobytes() if n >= 0 else self._long_piece(token_id, -n))
        return pieces

    @cached_property
    def special_ids(self) -> frozenset[int]:  # type: ignore[override]
        """Ids of control, unknown and user-defined tokens."""
        attributes = (C.llama_vocab_get_attr(self._vocab, i) for i in range(self._n))
        return frozenset(i for i, mark in enumerate(attributes) if mark & _SPECIAL)

    @property
    def end_ids(self) -> list[int]:
        """Ids of llama.cpp's end-of-generation tokens: end of turn, of text, of message."""
        return [i for i in range(self._n) if C.llama_vocab_is_eog(self._vocab, i)]

    def named(self, name: str) -> str:
        """Return the spelling of a special token; "" if the vocabulary has none.

        name: its role: "bos", "eos", "pad", "sep" or "mask".
        """
        token_id: int = getattr(C, f"llama_vocab_{name}")(self._vocab)
        return self.spelling(token_id) if 0 <= token_id < self._n else ""

    def encode(self, text: str, *, special: bool, decorated: bool) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: text to encode.
            special: parse spellings of special tokens, such as "<|im_end|>", as those tokens.
            decorated: add the ids that the model expects around a text, such as BOS.
        """
        ids = self._tokenized(text, special=special, decorated=decorated)
        if special:
            return ids
        plain = self._tokenized(text, special=False, decorated=False) if decorated else ids
        if self._controls.keys().isdisjoint(plain):
            return ids
        # Plain text was merged into a control token: encode around the spellings of these.
        names = {name: token for token, name in self._controls.items()}
        ids = encode_literally(
            text, partial(self._tokenized, special=False, decorated=False), names
        )
        if decorated and C.llama_vocab_get_add_bos(self._vocab):
            ids.insert(0, C.llama_vocab_bos(self._vocab))
        if decorated and C.llama_vocab_get_add_eos(self._vocab):
            ids.append(C.llama_vocab_eos(self._vocab))
        return ids

    def spelling(self, token_id: int) -> str:
        """Return the text of a token as the vocabulary spells it."""
        if not 0 <= token_id < self._n:
            return ""
        spelled: str = C.llama_vocab_get_text(self._vocab, token_id).decode(errors="replace")
        return spelled

    def id_of(self, spelling: str) -> int | None:
        """Return the id of a token by its spelling; None if there is none."""
        return self._ids.get(spelling)

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Lowest id of each spelling."""
        texts = [text.partition("\0")[0] for text in self._texts]  # C strings end at a zero byte
        return dict(zip(reversed(texts), range(self._n - 1, -1, -1), strict=True))

    @cached_property
    def _controls(self) -> dict[int, str]:
        """Control tokens, which plain text must not encode to: id to spelling. Without <unk>."""
        control = C.LLAMA_TOKEN_ATTR_CONTROL
        controls = (i for i in self.special_ids if C.llama_vocab_get_attr(self._vocab, i) & control)
        return {i: self.spelling(i) for i in controls if i != self._unknown}

    def _tokenized(self, text: str, *, special: bool, decorated: bool) -> list[int]:
        """Call llama.cpp's tokenizer; see `encode`."""
        try:
            raw = text.encode()
        except (UnicodeEncodeError, AttributeError) as error:
            raise ConfigError(f"{text!r:.60} is no text that can be tokenised: {error}") from error
        size = len(raw) + 8
        while True:
            ids = np.empty(size, np.int32)
            pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            n = C.llama_tokenize(self._vocab, raw, len(raw), pointer, size, decorated, special)
            if n >= 0:
                result: list[int] = ids[:n].tolist()
                return result
            size = -n

    def _long_piece(self, token_id: int, size: int) -> bytes:
        """Return the bytes of a token that needs a buffer of `size` bytes."""
        room = ctypes.create_string_buffer(size)
        C.llama_token_to_piece(self._vocab, token_id, room, size, 0, True)
        return room.raw
