"""`PieceTokenizer`: trees without a tokenizer, over pieces of text as a server names its tokens.

A piece's id is its bytes, read as a number with a leading 1. No table is needed, so any process can
read a saved loom. Roles of a chat have ids with a leading 2.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from ..._core.tokens.special_tokens import segments
from ..._core.tokens.text import TextStream
from ..._core.tokens.tokenizer import Tokenizer
from ...errors import ConfigError, Unsupported

MAX_BYTES = 64
GIVE_TOKENIZER = "tokenizer=…, or in the address: -m 'URL?tokenizer=./folder'"
N_PIECES = 3 << (8 * MAX_BYTES)  # one more than the highest id
_WORDS = re.compile(rb"\s*\S+|\s+")
_ROLE = re.compile(r"<\|(system|user|assistant|tool)\|>")
_ROLE_NAMES = re.compile(r"(<\|(?:system|user|assistant|tool)\|>)")
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def piece_id(piece: bytes) -> int:
    """Return a piece's id: its bytes as a big-endian number with a leading byte 1.

    `piece_bytes` is the inverse. piece: at most 64 bytes (not checked); may be empty.
    """
    return int.from_bytes(b"\x01" + piece, "big")


def _role_id(role: str) -> int:
    """Return the id of a chat role, such as "user"."""
    return int.from_bytes(b"\x02" + role.encode(), "big")


END = _role_id("")
ROLES = {_role_id(role): role for role in ("system", "user", "assistant", "tool")}


def piece_bytes(token_id: int) -> bytes:
    """Return a piece's bytes; a role as it is written in prompts; b"" for the end token."""
    if token_id in ROLES:
        return f"<|{ROLES[token_id]}|>".encode()
    raw = token_id.to_bytes(max((token_id.bit_length() + 7) // 8, 1), "big")
    return raw[1:] if raw[0] == 1 else b""


def is_piece(token_id: int) -> bool:
    """Return True if an id is that of a piece, a role or the end token."""
    if token_id in ROLES or token_id == END:
        return True
    n_bytes = (token_id.bit_length() + 7) // 8
    return token_id > 0 and n_bytes <= MAX_BYTES + 1 and token_id >> (8 * (n_bytes - 1)) == 1


class PieceTokenizer(Tokenizer):
    """Tokenizer methods that work on text alone; the others raise Unsupported.

    Args:
        is_chat: prompts are messages, which the server's own template renders.
        base_model: the server's name of the base model, whose repository may have the tokenizer.
    """

    def __init__(self, *, is_chat: bool, base_model: str = "") -> None:
        where = f" (the server's model is {base_model})" if base_model else ""
        self._needs = f"needs the model's tokenizer; give {GIVE_TOKENIZER}{where}"
        self._special_tokens = {}
        self.chat_template = _TEMPLATE if is_chat else None
        self.name = "pieces of text"
        self.object: Any = self
        self.bos_token_id = None
        self.eos_token_id = END
        self.pad_token_id = None
        self.stop_ids = frozenset({END})

    def __len__(self) -> int:
        raise Unsupported(f"the size of the vocabulary {self._needs}")

    @property
    def n_vocab(self) -> int:
        """Upper bound of all ids."""
        return N_PIECES

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raise ConfigError for a number that is not the id of a piece."""
        wrong = next((token for token in ids if not is_piece(token)), None)
        if wrong is not None:
            raise ConfigError(f"token id {str(wrong)[:24]}: taking ids {self._needs}; or give text")

    @cached_property
    def vocab_bytes(self) -> list[bytes]:
        """Raises Unsupported: pieces have no table."""
        raise Unsupported(f"the vocabulary (constraints, byte_vocab) {self._needs}")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the chat roles."""
        return frozenset(ROLES)

    def min_token_count(self, text: str) -> int:
        """Return 0: the server's tokenization is unknown."""
        return 0

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Return the ids of a text: one per word, several for a word of more than 64 bytes.

        special: parse role names such as <|user|> as roles. Raises: Unsupported with `add_bos`.
        """
        if add_bos:
            raise Unsupported(f"a begin token {self._needs}")
        return self._encode(text, special=special)

    def continuation(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text that continues another; see `encode`."""
        return self._encode(text, special=special)

    def chat_ids(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Return the ids of a rendered chat.

        pieces: (text, True if it is plain text, so that role names in it are not roles).
        """
        ids: list[int] = []
        for text, is_plain in segments(pieces, _ROLE_NAMES):
            ids += self._encode(text, special=not is_plain)
        return ids

    def decode(self, ids: Iterable[int], *, first: bool = False) -> str:
        """Return the text of ids."""
        return b"".join(map(piece_bytes, ids)).decode(errors="replace")

    def stream(self, *, first: bool = False) -> TextStream:
        """Return a decoder that turns ids to text one by one."""
        return PieceStream()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a piece."""
        return piece_bytes(token_id)

    def spelling(self, token_id: int) -> str:
        """Return the text of a piece."""
        return self.token_text(token_id)

    def _encode(self, text: str, *, special: bool, decorated: bool = False) -> list[int]:
        """Return the ids of a text; see `encode`. `decorated` has no effect: there is no BOS."""
        if not special:
            return pieces_of(text.encode(errors="replace"))
        ids: list[int] = []
        for at, part in enumerate(_ROLE.split(text)):
            ids += [_role_id(part)] if at % 2 else pieces_of(part.encode(errors="replace"))
        return ids

    @staticmethod
    def has_roles(ids: Iterable[int]) -> bool:
        """Return True if a path contains roles: it is a chat."""
        return any(token in ROLES for token in ids)

    def messages(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """Return the messages of a path. The last one may be the start of an answer, or empty."""
        messages: list[tuple[str, list[int]]] = []
        for token in ids:
            if token in ROLES:
                messages.append((ROLES[token], []))
            elif token != END:
                if not messages:
                    messages.append(("user", []))
                messages[-1][1].append(token)
        return [{"role": role, "content": self.decode(content)} for role, content in messages]


def pieces_of(text: bytes) -> list[int]:
    """Return the ids of a text: one per word, several for a word of more than `MAX_BYTES`."""
    ids = []
    for match in _WORDS.finditer(text):
        word = match[0]
        ids += [piece_id(word[at : at + MAX_BYTES]) for at in range(0, len(word), MAX_BYTES)]
    return ids


class PieceStream(TextStream):
    """A `TextStream` of pieces, whose ids contain their bytes."""

    def __init__(self) -> None:
        super().__init__(())
        self._text = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Add a piece; return the complete characters that it ends."""
        return self._text.decode(piece_bytes(token_id))

    def peek(self, token_id: int) -> str:
        """Return what `push` would return, without adding the piece."""
        return self.clone().push(token_id)

    def clone(self) -> PieceStream:
        """Return a copy that continues independently."""
        twin = PieceStream()
        twin._text.setstate(self._text.getstate())
        return twin

    def flush(self) -> str:
        """Return the text of incomplete characters at the end."""
        return self._text.decode(b"", final=True)
