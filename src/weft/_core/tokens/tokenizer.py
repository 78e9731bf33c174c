"""Tokenizer: text to token ids and back, for all tokenizer libraries."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...errors import ConfigError, ModelLoadError, Unsupported
from ..atomic_files import display_path, read, read_json, read_text, repr_short
from ..validation import warn_of_prompt
from .chat import check_messages, check_roles, check_variables, needs_form, render_chat
from .codec import Codec, TokenizersCodec, copy_of, is_library_error
from .messages import describe_tools_in_text, normalize_messages
from .special_tokens import pattern_of
from .text import TextStream
from .tool_call_format import ChatForm, chat_form

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Texts before a continuation, tried in order until one stays a token prefix of its own.
_ANCHORS = ("x", "\n", "a")


class Tokenizer:
    """One model's tokenizer. It never modifies an object passed in, and its methods change nothing.

    Decoding works on bytes: the text of a list of ids is their joined bytes, decoded. So complete
    and incremental decoding agree. Special tokens are rendered.

    object: the object passed in, or this tokenizer itself.

    stop_ids: every id that ends a text.

    name: for error messages, such as its file.
    """

    _has_warned_of_bos = False

    def __init__(
        self,
        backend: Backend | Codec,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        stop_ids: Iterable[int] = (),
        given: Any = None,
        name: str = "the tokenizer",
    ) -> None:
        """Create a tokenizer that owns `backend`: the caller must not use it afterwards.

        Args:
            backend: a tokenizer of the tokenizers library, or a Codec.
            special_tokens: name → text, such as "eos_token" → "</s>".
            chat_template: the Jinja template of chats. None means there is none.
            stop_ids: end tokens in addition to the one that `special_tokens` names.
            given: the object that the user passed, for `object`.
            name: the tokenizer's name in error messages.
        """
        self._special_tokens = dict(special_tokens or {})
        stop_ids = tuple(stop_ids)
        self._codec = (
            backend
            if isinstance(backend, Codec)
            else TokenizersCodec(
                backend, name, specials=self._special_tokens.values(), stop_ids=stop_ids
            )
        )
        self._anchors: dict[tuple[str, bool], list[int]] = {}
        self.chat_template = chat_template
        self.name = name
        self.object: Any = self if given is None else given
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.pad_token_id = self._special_id("pad_token")
        ends = () if self.eos_token_id is None else (self.eos_token_id,)
        self.stop_ids = frozenset((*stop_ids, *ends))

    @classmethod
    def from_folder(cls, path: str | Path, *, stop_ids: Iterable[int] = ()) -> Tokenizer:
        """Read the tokenizer of a folder in the format of Transformers.

        stop_ids: end tokens in addition to those that the folder's files name.

        Raises: ModelLoadError naming the file that is missing or broken.
        """
        files = read_folder(Path(path))
        return cls(
            files.backend,
            special_tokens=files.special_tokens,
            chat_template=files.chat_template,
            stop_ids=(*files.stop_ids, *stop_ids),
            name=display_path(Path(path) / "tokenizer.json"),
        )

    @classmethod
    def wrap(cls, given: Any, *, stop_ids: Iterable[int] = ()) -> Tokenizer:
        """Wrap an already loaded Transformers tokenizer, or one of the tokenizers library.

        The object is copied; later changes to it have no effect. A Tokenizer is returned itself.

        stop_ids: end tokens in addition to the tokenizer's own.

        Raises: Unsupported for a tokenizer written in Python.
        """
        from tokenizers import Tokenizer as Backend

        if isinstance(given, Tokenizer):
            return given
        if isinstance(given, Backend):
            return cls(copy_of(given), stop_ids=stop_ids, given=given)
        # NOTE: the one place that looks into a Transformers tokenizer.
        backend = getattr(given, "backend_tokenizer", None) or getattr(given, "_tokenizer", None)
        if not isinstance(backend, Backend):
            raise Unsupported(
                f"a tokenizer of type {type(given).__name__} has no tokenizers backend. Hand over "
                "a fast tokenizer (AutoTokenizer with use_fast=True) or a tokenizers.Tokenizer"
            )
        tokens = dict(getattr(given, "special_tokens_map", {}))
        more = getattr(given, "eos_token_ids", None)  # mlx-lm's are all that end a text
        stop_ids = [*stop_ids, *(more if isinstance(more, list | tuple | set) else ())]
        return cls(
            copy_of(backend),
            special_tokens={name: str(text) for name, text in tokens.items()},
            chat_template=default_template(getattr(given, "chat_template", None)),
            stop_ids=stop_ids,
            given=given,
        )

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return len(self._codec)

    @property
    def n_vocab(self) -> int:
        """One more than the highest token id."""
        return len(self.vocab_bytes)

    def with_chat_template(self, template: str) -> Tokenizer:
        """Return a tokenizer that differs from this one only in its chat template."""
        other = copy(self)
        other.chat_template = template
        if self.object is self:
            other.object = other
        return other

    def is_like(self, other: Tokenizer) -> bool:
        """Return True if ids, special tokens and chat format are equal in both."""
        return self is other or (
            self.chat_template == other.chat_template
            and self._special_tokens == other._special_tokens
            and self.special_ids == other.special_ids
            and self.vocab_bytes == other.vocab_bytes
        )

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raise ConfigError for an id outside the vocabulary."""
        n_vocab = self.n_vocab
        wrong = next((token for token in ids if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise ConfigError(f"token id {wrong}; allowed are 0 to {n_vocab - 1}")

    @property
    def vocab_bytes(self) -> list[bytes]:
        """The bytes of every token, by id; cached and read-only."""
        return self._codec.vocab_bytes

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        return self._codec.special_ids

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Return the token ids of a full text.

        special: special tokens spelled in the text become those tokens, instead of plain text.

        add_bos: True puts the BOS token first, False nothing; None leaves it to the tokenizer.
        """
        ids = self._encode(text, special=special, decorated=add_bos is None)
        if not add_bos:
            return ids
        if self.bos_token_id is None:
            raise ConfigError("this tokenizer has no begin token; leave add_bos out")
        return [self.bos_token_id, *ids]

    @cached_property
    def adds_bos(self) -> bool:
        """True if tokenizing a full text adds the BOS token."""
        return self.bos_token_id is not None and self.encode("a")[:1] == [self.bos_token_id]

    def warn_without_bos(self, ids: Sequence[int]) -> None:
        """Log a warning, once, if a prompt of token ids lacks the BOS token that `tokenize` adds.

        A prompt that begins with another special token, as chats do, gives no warning.
        """
        if self._has_warned_of_bos or not ids or not self.adds_bos:
            return
        if ids[0] != self.bos_token_id and ids[0] not in self.special_ids:
            self._has_warned_of_bos = True
            warn_of_prompt(
                f"the token ids do not begin with BOS ({self.bos_token_id}), which this model"
                " expects: answers differ without it. lm.tokenize(text) adds it"
            )

    def is_spaces(self, token_id: int) -> bool:
        """Return True if a token's text is nothing but spaces, at least one."""
        spelled = self.token_bytes(token_id)
        return bool(spelled) and not spelled.strip(b" ")

    def warn_of_end_space(self, ids: Sequence[int], beginnings: Iterable[str]) -> None:
        """Log a warning if the tokenizer joins a prompt's end space with the text that follows.

        ids: a prompt that ends in a token of spaces. beginnings: possible beginnings of that text.
        """
        spaces = self.token_text(ids[-1])
        for begin in beginnings:
            if self.continuation(spaces + begin)[0] != ids[-1]:
                warn_of_prompt(
                    "the text before the constraint ends in a space, but this model's tokens join"
                    f" the space with the text after it, as in {' ' + begin!r}. That text is"
                    " unlikely here: leave out the space and let the constraint's text begin with"
                    " it, or make the loom with heal=True"
                )
                return

    def min_token_count(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens, from its length; 0 if unknown."""
        longest = self._codec.max_token_bytes
        if longest is None:
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // longest)

    def continuation(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text that continues other text.

        Neither a BOS token nor a space is added before it.

        special: special tokens spelled in the text become those tokens, instead of plain text.
        """
        for anchor in _ANCHORS:
            before = self._anchor_ids(anchor, special=special)
            ids = self._encode(anchor + text, special=special)
            # Without a rest, anchor and text are one unknown token.
            if before and ids[: len(before)] == before and (rest := ids[len(before) :]):
                return rest
        return self._encode(text, special=special)

    def decode(self, ids: Iterable[int], *, first: bool = False) -> str:
        """Return the text of token ids, special tokens rendered.

        first: the ids start a text, so the dummy space that some tokenizers begin with is left out.
        """
        vocab_bytes = self.vocab_bytes
        n_vocab = len(vocab_bytes)
        joined = b"".join([vocab_bytes[token] if token < n_vocab else b"" for token in ids])
        if first and self._codec.first_space_is_dummy:
            joined = joined.removeprefix(b" ")
        return joined.decode(errors="replace")

    def stream(self, *, first: bool = False) -> TextStream:
        """Return a TextStream that decodes tokens one by one. first: as for `decode`."""
        strip = first and self._codec.first_space_is_dummy
        return TextStream(self.vocab_bytes, strip_first_space=strip)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes; b"" for the ids above the vocabulary that padded models have."""
        table = self._codec.vocab_bytes
        return table[token_id] if token_id < len(table) else b""

    def spelling(self, token_id: int) -> str:
        """Return the tokenizer's own spelling of a token, such as "Ġhello"; "" for unknown ids."""
        return self._codec.spelling(token_id)

    def token_text(self, token_id: int) -> str:
        """Return a token's text; bytes that are a part of a character become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **options: Any,
    ) -> str:
        """Return the prompt text of chat messages; encode it with `special=True, add_bos=False`.

        Args:
            messages: the chat.
            add_generation_prompt: end with the start of an assistant's turn.
            template: a template to use; None means the model's own.
            options: further variables for the template.

        Raises: ConfigError if there is no template.
        """
        template = self.chat_template if template is None else template
        if template is None:
            raise ConfigError(
                "this model has no chat template; give the prompt as plain text with template=False"
            )
        names = {"bos_token": "", "eos_token": "", **self._special_tokens, **options}
        chat = check_messages(messages)
        if names.get("tools") or any(needs_form(message) for message in chat):
            form = self.chat_form(template)
            chat = normalize_messages(chat, form)
            if form.is_generic:
                chat = describe_tools_in_text(chat, names.pop("tools", None) or (), form)
        rendered = render_chat(template, chat, add_generation_prompt=add_generation_prompt, **names)
        check_roles(template, chat, rendered, **names)
        return rendered

    def chat_form(self, template: str | None = None) -> ChatForm:
        """Return the format in which a template writes an assistant's turn.

        template: None means the model's own.
        """
        template = self.chat_template if template is None else template
        if template is None:
            return ChatForm()
        names = {"bos_token": "", "eos_token": "", **self._special_tokens}
        return chat_form(template, names["bos_token"], names["eos_token"])

    def check_chat_options(self, options: Iterable[str], template: str | None = None) -> None:
        """Raise ConfigError for a template variable that would have no effect.

        "tools" is always accepted: if the template does not read it, a message describes the tools.

        Args:
            options: the names of the variables.
            template: None means the model's own.
        """
        used = self.chat_template if template is None else template
        if used is not None:
            is_generic = self.chat_form(template).is_generic
            check_variables(used, [name for name in options if name != "tools" or not is_generic])

    @property
    def tool_form(self) -> Literal["template", "generic"] | None:
        """The form of tool calls: "template" for the chat template's own, "generic" for Weft's.

        None without a chat template.
        """
        if self.chat_template is None:
            return None
        return "generic" if self.chat_form().is_generic else "template"

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """Return the token ids of chat messages in the format of the template.

        Special tokens that the template writes are special. The same strings in a message are
        plain text.

        options: as for `apply_chat_template`.
        """
        pieces = self.render_pieces(
            messages, add_generation_prompt=add_generation_prompt, **options
        )
        return self.chat_ids(pieces)

    def render_pieces(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **options: Any
    ) -> list[tuple[str, bool]]:
        """Return the rendered chat in pieces, for `chat_ids`.

        Each piece is a pair of a text and a flag. True: the text is the name of a special token in
        a message, which stays plain text. The joined texts are the result of
        `apply_chat_template`.
        """
        names = [self.token_text(token) for token in self.special_ids]
        template = options.pop("template", None)
        checked, pattern = check_messages(messages), pattern_of(frozenset(filter(None, names)))

        def rendered(*, joins: bool) -> list[tuple[str, bool]]:
            """Render the chat with hidden names; return its pieces."""
            marked, given, restore = mark_specials(checked, names, options, joins=joins)
            text = self.apply_chat_template(
                marked, add_generation_prompt=add_generation_prompt, template=template, **given
            )
            return list(restore(text))

        def read(pieces: list[tuple[str, bool]]) -> list[str]:
            """Return the names of special tokens in the pieces that the template wrote."""
            return [
                name for piece, is_text in pieces if not is_text for name in pattern.findall(piece)
            ]

        # A template may read how texts end, so a name's beginning is hidden only if the rendered
        # text then completes the name.
        pieces = rendered(joins=False)
        longest = sorted(filter(None, names), key=len, reverse=True)
        if all(_begun_at(text, longest) is None for text in _texts([*checked, options])):
            return pieces
        safe = rendered(joins=True)
        return pieces if read(pieces) == read(safe) else safe

    def chat_ids(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Return the token ids of a rendered chat in pieces, or of a part of one."""
        return self._codec.encode_pieces(pieces)

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._codec.id_of(text)

    def _encode(self, text: str, *, special: bool, decorated: bool = False) -> list[int]:
        """Tokenize a text by the codec."""
        return self._codec.encode(text, special=special, decorated=decorated)

    def _anchor_ids(self, anchor: str, *, special: bool) -> list[int]:
        """Return the ids of a text that `continuation` puts before the text to encode."""
        kept = self._anchors.get((anchor, special))
        if kept is None:
            kept = self._anchors[anchor, special] = self._encode(anchor, special=special)
        return kept


# What templates look at and write themselves; a role is checked by name.
_NAMES = frozenset({"role", "type"})


def mark_specials(
    messages: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    joins: bool = True,
) -> tuple[
    Sequence[Mapping[str, Any]], dict[str, Any], Callable[[str], Iterator[tuple[str, bool]]]
]:
    """Hide special tokens' strings in a chat, so that they stay text in a template.

    It covers all strings of messages (content and its parts, tool calls, reasoning) and the
    template's other variables, such as tools. Variables that are tokens, such as bos_token, stay.

    Args:
        messages: the chat.
        names: the texts of special tokens.
        options: the template's other variables; None means none.
        joins: also hide the start of a name at the end of a text. A template may append other text
            that completes the name.

    Returns: the messages and the options, in which each such string is replaced by a mark. The
        third value is a function that splits the rendered text at the marks. It yields pairs of a
        text and a flag: it is a hidden string.
    """
    given = dict(options or {})
    plain = {name: value for name, value in given.items() if not name.endswith("_token")}
    texts = list(_texts([*messages, plain]))
    names = sorted(filter(None, names), key=len, reverse=True)
    pattern = pattern_of(frozenset(names))

    def cut(text: str) -> list[str]:  # every second part is to be hidden
        """Split a text at names of special tokens; every second part is a name to hide."""
        *before, last = pattern.split(text)
        at = _begun_at(last, names) if joins else None
        end = last.rstrip()
        return [*before, last] if at is None else [*before, last[:at], end[at:], last[len(end) :]]

    if all(len(cut(text)) == 1 for text in texts):
        return messages, given, lambda rendered: iter([(rendered, False)])
    # NOTE: only a-z and 0-9, which no template escapes or trims.
    nonce = f"weft{secrets.token_hex(8)}n"
    kept: list[str] = []

    def hidden(value: Any) -> Any:
        """Return a value with names of special tokens replaced by marks, in nested values too."""
        if isinstance(value, str):
            parts = cut(value)
            for at in range(1, len(parts), 2):
                kept.append(parts[at])
                parts[at] = f"{nonce}{len(kept) - 1}w"
            return "".join(parts)
        if isinstance(value, Mapping):
            return {
                hidden(key): each if key in _NAMES and isinstance(each, str) else hidden(each)
                for key, each in value.items()
            }
        return [hidden(each) for each in value] if isinstance(value, list | tuple) else value

    def restore(rendered: str) -> Iterator[tuple[str, bool]]:
        """Split a rendered text at the marks: yield (text, True for a hidden name)."""
        for i, piece in enumerate(re.split(f"{nonce}(\\d+)w", rendered)):
            if i % 2:
                yield kept[int(piece)], True
            elif piece:
                yield piece, False

    marked = [hidden(message) for message in messages]
    return marked, {**given, **hidden(plain)}, restore


def _begun_at(text: str, names: Sequence[str]) -> int | None:
    """Return the index of an incomplete name at the end of a text; None if there is none.

    Whitespace after it is ignored. So are names that start like words, because many texts end so.

    names: texts of special tokens, the longest first.
    """
    end = text.rstrip()
    firsts = {name[0] for name in names if not name[0].isalnum()}
    for at in range(max(0, len(end) - len(names[0] if names else "") + 1), len(end)):
        if end[at] in firsts and any(name.startswith(end[at:]) for name in names):
            return at
    return None


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in messages and options that users may have written."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            if not (key in _NAMES and isinstance(item, str)):
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parts of a tokenizer, read and checked.

    special_tokens: name → text, such as "eos_token" → "</s>".
    """

    backend: Backend
    special_tokens: dict[str, str]
    chat_template: str | None
    stop_ids: frozenset[int]


def read_folder(path: Path) -> TokenizerFiles:
    """Read tokenizer.json and the optional files next to it.

    Raises: ModelLoadError naming the file that is missing or broken.
    """
    config = _read_json(path / "tokenizer_config.json")
    special = _read_specials(path / "special_tokens_map.json")
    special |= _read_specials(path / "tokenizer_config.json")
    file = path / "generation_config.json"
    try:
        stop_ids = id_list(_read_json(file).get("eos_token_id"))
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    return TokenizerFiles(
        backend=_read_backend(path),
        special_tokens=special,
        chat_template=_read_template(path, config),
        stop_ids=frozenset(stop_ids),
    )


def special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens in a tokenizer's configuration, by name."""
    texts = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def default_template(given: object) -> str | None:
    """Return the default chat template of a setting; None if there is none.

    given: one template, or a list of templates with names.
    """
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        chosen = given.get("default")
    elif isinstance(given, list | tuple):
        named = [each for each in given if isinstance(each, Mapping)]
        chosen = next((e.get("template") for e in named if e.get("name") == "default"), None)
    else:
        return None
    return chosen if isinstance(chosen, str) else None


def id_list(given: object) -> list[int]:
    """Return the token ids of a setting as a list.

    given: one id, a list of ids, or None.

    Raises: ModelLoadError for other values.
    """
    if given is None:
        return []
    ids: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelLoadError(
                f"eos_token_id is {repr_short(given)}; allowed is a token id or a list of them"
            )
    return ids


def _read_backend(path: Path) -> Backend:
    """Load tokenizer.json by the tokenizers library. Raises: ModelLoadError."""
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{path} has no tokenizer.json. Weft reads tokenizers in that format only; "
            "Transformers writes one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    data = read(file, ModelLoadError)
    try:
        backend = Backend.from_buffer(data)
        backend.encode("a")  # or a part that is missing is missed by every prompt
        return backend
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise ModelLoadError(
            f"{file} cannot be read as a tokenizer: {error}. Download the file again"
        ) from error


def _read_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a model's folder; None if it has none."""
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file, ModelLoadError)
    return default_template(config.get("chat_template"))


def _read_specials(file: Path) -> dict[str, str]:
    """Return the special tokens of a configuration file: name → text; {} without the file."""
    texts = special_texts(_read_json(file))
    for name, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ModelLoadError(f"{file}: {name} is {repr_short(text)}: {error}") from error
    return texts


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} without the file. Raises: ModelLoadError."""
    if not file.exists():
        return {}
    data = read_json(file, ModelLoadError, "not readable JSON", nan=True)
    if not isinstance(data, dict):
        raise ModelLoadError(f"{file} holds {type(data).__name__}; a JSON object belongs there")
    return data
