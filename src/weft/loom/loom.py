"""`Loom`: the root of a tree of generated text, and its prompt."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Self, overload

from .._core.sampling.params import rejects_unknown_options
from .._core.validation import check_bool
from ..errors import ConfigError
from ..lm.chat import ChatPrompt
from .author_note import AUTHOR_NOTE, AuthorNote, note_of
from .constrained_text import HEAL, strip_end_spaces
from .heddle import Heddle
from .model_binding import ModelBinding, is_lm
from .node import checked_ids, clear_places, imported_display

if TYPE_CHECKING:
    from .._core.tokens.tokenizer import Tokenizer
    from ..lm.lm import LM
    from ..service.store.file import ModelIdentity


MESSAGES = "messages"  # key in a root's meta: the chat messages of its prompt, if several


class Loom(Heddle):
    """The root of a tree of heddles; its tokens are the prompt.

    As a context manager it closes the loom at the end.

    Attributes:
        heddle_class: the class of the nodes below the root.
        dropped: descriptions of data that `open` left out of the file, one sentence each.
    """

    heddle_class: type[Heddle] = Heddle
    _is_root = True
    saved_by: ModelIdentity  # the model whose tokens an opened loom has; set by the store
    dropped: tuple[str, ...] = ()

    @overload
    def __init__(
        self,
        model: LM | None,
        tokenizer: str | Messages | Sequence[int],
        /,
        *,
        template: bool = True,
        special: bool | None = None,
        system: str | None = None,
        adapter: str | None = None,
        heal: bool = False,
        heddle_class: type[Heddle] | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        prompt: str | Messages | Sequence[int] | None = None,
        *,
        template: bool = True,
        special: bool | None = None,
        system: str | None = None,
        adapter: str | None = None,
        heal: bool = False,
        heddle_class: type[Heddle] | None = None,
    ) -> None: ...

    @rejects_unknown_options("Loom")
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        prompt: Any = None,
        *,
        template: bool = True,
        special: bool | None = None,
        system: str | None = None,
        adapter: str | None = None,
        heal: bool = False,
        heddle_class: type[Heddle] | None = None,
    ) -> None:
        """Create a loom: `Loom(lm, prompt)`, or `Loom(model, tokenizer, prompt)`.

        Args:
            model: an LM, or a loaded model with its `tokenizer`. None: a loom of texts without
                token ids, for trees that no model grows.
            prompt: a text, chat messages, or token ids. A text is rendered by the model's chat
                template, if it has one.
            template: False takes a text without the chat template.
            special: for a text without a chat template: True parses special tokens, False keeps
                them as plain text. None: as the class does (`reads_special`, False here). Text in a
                chat template is always plain.
            system: a system message before the prompt; needs a chat template.
            adapter: the name of a LoRA adapter, see `LM.add_adapter`; all nodes run with it.
            heal: True moves the spaces at the end of a raw prompt (`template=False`) to the start
                of the text that a `constraint=` generates. Most models' word tokens begin with a
                space.
            heddle_class: the class of the nodes below; None: that of the loom's class.

        Raises:
            ConfigError: an argument is outside what is allowed, or the template rejects the
                messages.
            ContextOverflow: the prompt is longer than the context.
        """
        if is_lm(tokenizer) or is_lm(prompt):
            raise ConfigError("the model comes first, then the prompt: Loom(lm, prompt)")
        if prompt is None:
            prompt, tokenizer = tokenizer, None
        if prompt is None:
            raise ConfigError("a loom needs a prompt: Loom(lm, prompt)")
        if model is None:
            given = {"special": special, "system": system, "adapter": adapter}
            given |= {"heal": True} if heal else {}
            for name, value in given.items():
                if value is not None:
                    raise ConfigError(f"{name} has no meaning for a loom without a model")
            self._initialize_text(prompt, heddle_class)
            return
        binding = ModelBinding.from_model(model, tokenizer)
        lm = binding.text_lm()
        rendered = read_prompt(
            lm.text,
            prompt,
            template=template,
            special=special,
            reads_special=self.reads_special,
            system=system,
            check=lm.check_length,
        )
        left = ""
        if check_bool("heal", heal):
            if not isinstance(prompt, str) or rendered.chat_template_used:
                raise ConfigError(
                    "heal=True is for a text that is taken as it is: give it with template=False."
                    " A chat template's spaces, and token ids, are what they are"
                )
            ids, left = strip_end_spaces(lm.text, rendered.ids)
            rendered = rendered._replace(ids=ids)
        self._initialize(binding, rendered, heddle_class)
        if left:
            self.meta[HEAL] = left
        if len(rendered.messages) > 1:
            self.meta[MESSAGES] = list(rendered.messages)
        binding.adapter = adapter
        self._place = lm.place(rendered.ids, namespace=adapter)

    def _initialize(
        self, binding: ModelBinding, prompt: Prompt, heddle_class: type[Heddle] | None
    ) -> None:
        """Set the attributes of a new loom with this prompt."""
        super().__init__(binding, None, prompt.ids)
        self.user_prompt = prompt.user_prompt
        self.chat_template_used = prompt.chat_template_used
        if heddle_class is not None:
            self.heddle_class = heddle_class
        self.created = datetime.now(UTC).isoformat(timespec="seconds")

    def _initialize_text(self, prompt: object, heddle_class: type[Heddle] | None) -> None:
        """Set the attributes of a loom of texts, which has no model."""
        from ..service.store.file import NO_MODEL

        if not isinstance(prompt, str):
            raise ConfigError(
                f"a loom without a model takes a text as its prompt, not {type(prompt).__name__}"
            )
        self._initialize(ModelBinding(None, is_text=True), Prompt([], prompt, False), heddle_class)
        self._text, self.saved_by = prompt, NO_MODEL

    @classmethod
    def restored(
        cls, binding: ModelBinding, prompt: Prompt, heddle_class: type[Heddle] | None
    ) -> Self:
        """Create a loom from a file's content, without rendering its prompt again.

        Args:
            binding: the model, or the absence of one.
            prompt: the prompt as it was saved.
            heddle_class: the class of the nodes below; None: that of the loom's class.
        """
        loom = cls.__new__(cls)
        loom._initialize(binding, prompt, heddle_class)
        return loom

    def _encode_own(self, text: str) -> list[int]:
        """Tokenize a new text of the root: special tokens in it are parsed, and no BOS is added."""
        # The text of a root shows its special tokens, so they are parsed again.
        return self._binding.text_lm().text.encode(text, special=True, add_bos=False)

    @property
    def adapter(self) -> str | None:
        """The name of the LoRA adapter that the loom's nodes run with; None: the base model."""
        return self._binding.adapter

    @property
    def note(self) -> AuthorNote | None:
        """The author's note, which `grow`, `stream` and searches insert into the context.

        Assign a text, an AuthorNote, or None. Nodes do not contain the note, and their KV is not
        that of the growth: it is computed when a node without the note is used.
        """
        return note_of(self.meta)

    @note.setter
    def note(self, note: AuthorNote | str | None) -> None:
        if note is None:
            self.meta.pop(AUTHOR_NOTE, None)
            return
        note = AuthorNote(note) if isinstance(note, str) else note
        self.meta[AUTHOR_NOTE] = {"text": note.text, "depth": note.depth}

    @property
    def chat_template_used(self) -> bool:
        """True if the prompt used a chat template; nodes then grow with `lm.chat_defaults`."""
        return self._binding.is_chat

    @chat_template_used.setter
    def chat_template_used(self, is_used: bool) -> None:
        self._binding.is_chat = is_used

    def display_text(self) -> str:
        """Return the prompt to display: the user's text, if a chat template was used.

        An imported loom returns the display text of its file until its prompt changes.
        """
        if self.chat_template_used and imported_display(self) is None:
            return f"Prompt: {self.user_prompt}\n\nResponse:\n\n"
        return super().display_text()

    def save(self, path: str | os.PathLike[str], *, kv: bool = False) -> None:
        """Write the loom to a file, atomically.

        Args:
            path: the file to write.
            kv: also write the KV of all nodes, to `NAME.kv.safetensors` in the same folder; `open`
                reads it.

        Raises:
            StoreError: the file cannot be written.
            ConfigError: a `meta` is not JSON.
            Unsupported: `kv` on an engine whose KV cannot be stored; the loom is saved.
        """
        from ..service.store.file import save

        save(self, path, kv=kv)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        lm: LM | None = None,
        *,
        force: bool = False,
        heddle_class: type[Heddle] | None = None,
        kv: bool = True,
    ) -> Self:
        """Read a saved loom. Without an LM it can be read, searched and saved, but not grown.

        If a node's logprobs cover only some of its tokens, they are ignored, and `dropped` names
        the nodes. Saved KV is loaded if it matches this model and these tokens; other KV is
        computed when it is used.

        Args:
            path: a file that `save` or an export wrote.
            lm: the model that grows the loom, or None.
            force: accept the tokens even if another model with the same vocabulary size saved them.
            heddle_class: the class of the nodes; None: that of the loom's class.
            kv: False ignores a file with saved KV.

        Raises:
            FormatError: the file is no loom, is broken, or has a newer version.
            StoreError: the file cannot be read.
            ModelMismatch: another model saved it.
        """
        from ..service.store.file import load

        return load(
            path,
            lm,
            force=force,
            loom_class=cls,
            heddle_class=heddle_class or cls.heddle_class,
            kv=kv,
        )

    def close(self) -> None:
        """Release all places in the token tree; idempotent. Reading and saving still work."""
        self._binding.closed = True
        clear_places(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


Messages = Sequence[dict[str, Any]]

_EMPTY = "the prompt is empty: there are no tokens to continue. Give it some text"


class Prompt(NamedTuple):
    """A prompt as token ids, with the texts that it was rendered from.

    ids: the token ids.
    user_prompt: the last user message, or the raw text.
    chat_template_used: True if a chat template rendered it.
    messages: the chat messages; () if there are none, or not only texts.
    """

    ids: list[int]  # [] in a loom of texts
    user_prompt: str  # the user's text, without a template
    chat_template_used: bool
    messages: Sequence[dict[str, Any]] = ()  # the rendered messages, if all are text


def read_prompt(
    tokenizer: Tokenizer,
    prompt: str | Messages | Sequence[int],
    *,
    template: bool = True,
    special: bool | None = None,
    reads_special: bool = False,
    system: str | None = None,
    check: Callable[[str], None] | None = None,
) -> Prompt:
    """Tokenize a prompt, rendered by the chat template if necessary.

    Args:
        tokenizer: the model's tokenizer.
        prompt: a str, which uses the chat template if there is one and `template` is True. Or chat
            messages, which need a template. Or token ids or a prompt of `format_chat`, which are
            taken unchanged.
        template: False takes a str as it is.
        special: parse special tokens in a str without a template; None: as `reads_special`.
        reads_special: the default of `special`.
        system: a system message before the prompt; None: none.
        check: called with the text before it is tokenized, to raise if it is too long. None: no
            check.

    Raises: ConfigError for a wrong prompt, and what the chat template raises.
    """
    if isinstance(prompt, ChatPrompt):
        if system is not None:
            raise ConfigError("the prompt is a rendered chat; give format_chat the system message")
        return Prompt(list(prompt.ids), prompt.user_prompt, True)
    is_raw = isinstance(prompt, str) and not (template and tokenizer.chat_template is not None)
    if special and not is_raw:
        raise ConfigError(
            "special=True needs a text without a chat template: give template=False. Chat messages"
            " are always plain text, and token ids are not parsed"
        )
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigError(_EMPTY)
        if is_raw:
            reads = reads_special if special is None else special
            result = _from_text(tokenizer, prompt, reads, system, check)
        else:
            messages = [{"role": "user", "content": prompt}]
            result = _from_messages(tokenizer, messages, template, system, check)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], dict):
        result = _from_messages(tokenizer, list(prompt), template, system, check)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        if system is not None:
            raise ConfigError("system needs a text prompt; put it into the token ids yourself")
        ids = checked_ids(prompt)  # type: ignore[arg-type]
        tokenizer.warn_without_bos(ids)
        result = Prompt(ids, tokenizer.decode(ids) if _are_valid_ids(tokenizer, ids) else "", False)
    else:
        raise ConfigError(
            "a prompt is a text, a list of chat messages or a list of token ids, "
            f"not {type(prompt).__name__}"
        )
    if not result.ids:
        raise ConfigError(_EMPTY)
    return result


def _from_text(
    tokenizer: Tokenizer,
    text: str,
    special: bool,
    system: str | None,
    check: Callable[[str], None] | None,
) -> Prompt:
    """Tokenize a raw text, without a chat template."""
    if system is not None:
        raise ConfigError(
            "system needs a chat template: this model has none, or template=False. Put it into "
            "the prompt"
        )
    if check is not None:
        check(text)
    ids, begin = tokenizer.encode(text, special=special), tokenizer.bos_token_id
    # A text that contains its own begin token needs no second one.
    is_doubled = special and begin is not None and ids[:2] == [begin, begin]
    return Prompt(ids[1:] if is_doubled else ids, text, False)


def _from_messages(
    tokenizer: Tokenizer,
    messages: list[Any],
    template: bool,
    system: str | None,
    check: Callable[[str], None] | None,
) -> Prompt:
    """Render chat messages by the chat template, and tokenize them.

    The arguments are those of `read_prompt`.

    Raises: ConfigError without a chat template, or for `system` if there is a system message.
    """
    if not template or tokenizer.chat_template is None:
        raise ConfigError(
            "chat messages need a chat template: this model has none, or template=False. Give a "
            "text"
        )
    if system is not None:
        if messages[0].get("role") == "system":
            raise ConfigError("there is a system message already; leave system out, or the message")
        messages = [{"role": "system", "content": system}, *messages]
    pieces = tokenizer.render_pieces(messages, add_generation_prompt=True)
    if check is not None:
        check("".join(piece for piece, _ in pieces))
    ids = tokenizer.chat_ids(pieces)  # with its BOS, if the template writes one
    contents = [m.get("content") for m in messages if isinstance(m, dict) and m["role"] == "user"]
    user_prompt = contents[-1] if contents and isinstance(contents[-1], str) else ""
    return Prompt(ids, user_prompt, True, _text_messages(messages))


def _text_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages, to save with the loom, if all contents are texts.

    [] if a message has other content, such as an image.
    """
    kept = [{"role": m.get("role"), "content": m.get("content")} for m in messages]
    plain = all(isinstance(value, str) for each in kept for value in each.values())
    return kept if plain and kept == messages else []


def _are_valid_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Return True if all ids are in the tokenizer's vocabulary."""
    n_vocab = tokenizer.n_vocab
    return all(0 <= token < n_vocab for token in ids)
