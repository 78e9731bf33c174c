"""`LM`: one model with its tokenizer, token tree, scheduler and adapters; what all faces use."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, Unpack
from weakref import WeakValueDictionary

import numpy as np

from .._core.kv.place import Place
from .._core.kv.tree import TokenTree
from .._core.nopickle import NotPicklable
from .._core.remedies import OF_LM, Listed, remedied
from .._core.sampling.params import (
    BranchOptions,
    ModelDefaults,
    SamplingParams,
    accepts_params_first,
)
from .._core.sampling.sampler import Sampler
from .._core.sched.driver import Channel, Driver
from .._core.sched.engine_runs import check_steps
from .._core.sched.scheduler import Scheduler
from .._core.sched.work import Extend, Item, Logits, Run, Ticket
from .._core.tokens.parse import ChatOutput, parse_chat_output
from .._core.tokens.tokenizer import Tokenizer
from .._core.tokens.turns import turn_delta, turn_separator
from .._core.validation import check_int
from ..constraints import json_schema_to_grammar
from ..constraints.base import Compiler
from ..engines.base import UNKNOWN_CONTEXT_LENGTH, Engine, EngineInfo, Pooling
from ..errors import ConfigError, ContextOverflow, StaleHandle, Unsupported
from .adapters import Adapters as Adapters
from .chat import ChatPrompt
from .embedding import embed
from .path_kv import PathKV
from .stats import Stats, gather_stats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..loom import Branches

ROW_CACHE_BYTES = 64 << 20
N_BATCH = 512
N_SEQ_MAX = 65_536  # live branches that `BranchStore.available` counts down from

# The one registry: models that were handed over already loaded → their LM, while somebody has it.
_adopted: WeakValueDictionary[int, LM] = WeakValueDictionary()
_adopting = threading.Lock()


@remedied(OF_LM, camel_case=True)
class LM(
    NotPicklable,
    Listed,
    instead="load the model there from what it was loaded from (weft.load), or ask weft serve",
):
    """A loaded model: engine + tokenizer + token tree + scheduler. Make it with `weft.load`.

    Everything that runs the model goes through `submit` and `drive`, whichever face asks, so equal
    prefixes are computed once and all live branches share each step. Use it from any thread, as a
    context manager, or let it be collected.

    engine, info: what runs the model. text: Weft's own view of the tokenizer. tokenizer, model:
    what was handed in, else `text` and `engine`. n_ctx: tokens a path may have. n_seq_max: branches
    that `BranchStore.available` counts down from.
    defaults: sampling parameters of raw prompts. chat_defaults: those of chat answers and branches.
    Both come from the model's files if these set sampling parameters.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        model: Any = None,
        n_ctx: int | None = None,
        n_batch: int | None = None,
        n_seq_max: int | None = None,
        kv_bytes: int | None = None,
        offload_bytes: int | None = None,
        row_bytes: int | None = None,
        defaults: SamplingParams | ModelDefaults | None = None,
    ) -> None:
        """Put the parts together; see `weft.load`. kv_bytes: None for no limit.

        defaults: sampling parameters that a call does not give. None: temperature 1 without
        filters, in chats too; `weft.load` passes those of the model's files.

        tokenizer: Weft's own `Tokenizer`, or an object that `weft.load` takes.

        offload_bytes: of the host, for KV beyond that. row_bytes: of logits rows that are kept,
        over all faces.
        """
        check_kind(engine)
        self.engine = engine
        self.text = text = Tokenizer.wrap(tokenizer)
        self.model = engine if model is None else model
        self.tokenizer = text.object
        self.n_ctx = check_n_ctx(n_ctx, engine.info)
        self.n_seq_max = N_SEQ_MAX if n_seq_max is None else n_seq_max
        own = ModelDefaults.from_sampling(defaults or SamplingParams())
        self.defaults, self.chat_defaults = own.raw, own.chat
        self.tree = TokenTree(
            engine.fragments,
            capacity=capacity_of(kv_bytes, engine.info),
            max_paths=least(n_seq_max, engine.info),
            host_capacity=host_capacity_of(offload_bytes, engine.info),
            host_uses_free_slots=engine.info.idle_slots is not None,
        )
        self.scheduler = Scheduler(
            engine,
            self.tree,
            n_ctx=self.n_ctx,
            n_batch=check_int("n_batch", N_BATCH if n_batch is None else n_batch, 1),
            row_cache_bytes=ROW_CACHE_BYTES if row_bytes is None else row_bytes,
        )
        self.driver = Driver(self.scheduler)
        self._open = True
        self.adapters = Adapters()
        self.face_state: dict[type[Any], Any] = {}  # what faces keep beside this LM, by its class
        self.made_with: dict[str, Any] = {}  # what an already loaded model was asked to have

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None) -> LM:
        """Return the one LM of an already loaded model object; an LM is its own."""
        from ..loading import load

        return model if isinstance(model, LM) else load(model, tokenizer)

    @cached_property
    def constraints(self) -> Compiler:
        """What makes matchers of constraints, and keeps what it compiled."""
        return Compiler(self.text, self.info.n_vocab)

    @property
    def info(self) -> EngineInfo:
        """What the engine is and can do."""
        return self.engine.info

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self.driver.closed

    def place(
        self, ids: Sequence[int], after: Place | None = None, *, namespace: str | None = None
    ) -> Place:
        """Return the place after `ids`, which follow `after` (None: the root). Runs no model.

        namespace: the adapter whose tree it is in, at the root.
        Raises: ConfigError for ids outside the vocabulary or an unknown adapter, ContextOverflow
        beyond n_ctx.
        """
        self.check_path(ids, 0 if after is None else after.depth)
        name = None if after is None else after.namespace
        if namespace is not None and after is None:
            name = self.adapters.space(namespace)
        return Place(self.tree.holds, name, after, list(ids))

    def root(self, namespace: str | None = None) -> Place:
        """Return the place before all tokens of an adapter's tree, or of the model's own."""
        return Place(self.tree.holds, self.adapters.space(namespace))

    def check_path(self, ids: Sequence[int], n_before: int = 0) -> None:
        """Raise what `place` does for ids that cannot follow so many others."""
        if self.closed:
            raise StaleHandle("this LM is closed; load it again")
        self._check_ids(ids)
        depth = n_before + len(ids)
        if depth > self.n_ctx:
            raise ContextOverflow(
                f"the path has {depth} tokens, but the context is {self.n_ctx}",
                n_tokens=depth,
                n_ctx=self.n_ctx,
                hint="shorten the prompt, clip the path, or load the model with a larger n_ctx",
            )

    def check_length(self, text: str) -> None:
        """Raise ContextOverflow for a text that cannot fit: by its length, before it is tokenised.

        It takes many times its length to be tokenised. A text that may fit is not refused.
        """
        # What is short is tokenised in no time.
        fewest = self.text.fewest(text) if len(text) > self.n_ctx else 0
        if fewest > self.n_ctx:
            raise ContextOverflow(
                f"the text has at least {fewest} tokens, but the context is {self.n_ctx}",
                n_tokens=fewest,
                n_ctx=self.n_ctx,
                hint="shorten the prompt, or load the model with a larger n_ctx",
            )

    def _check_ids(self, ids: Sequence[int]) -> None:
        if len(ids) == 0:
            return
        low, high = least_and_most(ids)
        if self.info.n_vocab == 0:
            self.text.check_ids(ids)
        elif low < 0 or high >= self.info.n_vocab:
            wrong = low if low < 0 else high
            raise ConfigError(
                f"token id {wrong} is outside the vocabulary;"
                f" allowed are 0 to {self.info.n_vocab - 1}"
            )

    def sampler(self, params: SamplingParams, stream: int, *, in_steps: bool = False) -> Sampler:
        """Return a sampler at its beginning. in_steps: it draws from single rows only.

        Raises: ConfigError for biases of no token, GrammarError for a constraint that is none,
        Unsupported in steps where the engine has none, or for what its rows do not carry.
        """
        if in_steps:
            check_steps(params, self.engine)
        if self.info.n_vocab:  # else biases mean nothing, which the engine says
            self._check_ids([token for token, _ in params.logit_bias])
        constraint = params.constraint
        matcher = None if constraint is None else self.constraints.matcher(constraint)
        return Sampler(params, stream, matcher)

    def _check_biases(self, items: Sequence[Item]) -> None:
        for item in items if self.info.n_vocab else ():
            if isinstance(item, Run) and item.sampler.params.logit_bias:
                self._check_ids([token for token, _ in item.sampler.params.logit_bias])

    def submit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """Queue work; nothing runs before somebody drives. See `Scheduler.submit`."""
        self._check_biases(items)
        return self.driver.submit(items, atomic=atomic)

    def drive(self, tickets: Sequence[Ticket]) -> None:
        """Run steps until all tickets are done; see `Driver.drive` for Ctrl-C."""
        self.driver.drive(tickets)

    def pump(self, channel: Channel, tickets: Sequence[Ticket]) -> Iterator[list[Any]]:
        """Yield what sinks put into a channel, a list a step, until all tickets are done."""
        return self.driver.pump(channel, tickets)

    def turn_of_loop(self) -> Awaitable[None] | None:
        """Return what a call waits for first, where one pass of its loop makes very many."""
        return self.driver.start_call()

    async def asubmit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """Queue work from an event loop; what one pass of the loop submits shares a step."""
        self._check_biases(items)
        return await self.driver.asubmit(items, atomic=atomic)

    def adrive(self, tickets: Sequence[Ticket]) -> Awaitable[None]:
        """Wait for tickets without blocking the loop."""
        return self.driver.adrive(tickets)

    def when_done(self, tickets: Sequence[Ticket]) -> asyncio.Future[None]:
        """Return a future of the running loop that is set once all tickets are done."""
        return self.driver.when_done(tickets)

    def apump(self, channel: Channel, tickets: Sequence[Ticket]) -> AsyncIterator[list[Any]]:
        """The async form of `pump`."""
        return self.driver.apump(channel, tickets)

    @accepts_params_first
    def generate(
        self,
        prompt: str | Sequence[dict[str, Any]] | Sequence[int],
        n: int | SamplingParams | None = None,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        template: bool = True,
        **sampling: Unpack[BranchOptions],
    ) -> Branches:
        """Return `n` answers to a prompt: nodes with `text`, `logprob`, `finish_reason`.

        `str(answers[0])` is the first answer's text. The nodes are children of a new loom,
        `answers[0].parent`, and can be grown, measured and searched below.

        Args:
            prompt: a text (asked through the chat template if the model has one), chat messages,
                or token ids.
            n, params, sampling: as for `Heddle.grow`; `n` is 1 and `max_tokens` 256 by default.
            system: a system message before the prompt.
            template: False continues a text as it is.

        Raises: as `Loom` and `Heddle.grow`.
        """
        from ..loom.generate import generate

        return generate(self, prompt, n, params, system=system, template=template, **sampling)

    @accepts_params_first
    async def agenerate(
        self,
        prompt: str | Sequence[dict[str, Any]] | Sequence[int],
        n: int | SamplingParams | None = None,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        template: bool = True,
        **sampling: Unpack[BranchOptions],
    ) -> Branches:
        """As `generate`, in a running event loop; concurrent calls share each step."""
        from ..loom.generate import agenerate

        return await agenerate(
            self, prompt, n, params, system=system, template=template, **sampling
        )

    @property
    def kv(self) -> PathKV:
        """The KV of whole paths: size, pin, offload, copy, trim, export, save and load."""
        return PathKV(self)

    def tokenize(
        self, text: str, *, special: bool = False, add_bos: bool | None = None
    ) -> list[int]:
        """Return the token ids of a whole text; special tokens in it are text unless `special`.

        Of a prompt by `format_chat` they are text where somebody typed them, with `special` too.
        """
        if not isinstance(text, str):
            raise ConfigError(
                f"text is {text!r:.80}; allowed is one text. Of chat messages the token ids are"
                " lm.format_chat(messages).ids, of many texts [lm.tokenize(text) for text in texts]"
            )
        if isinstance(text, ChatPrompt) and special and not add_bos:
            return list(text.ids)
        return self.text.encode(text, special=special, add_bos=add_bos)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens rendered."""
        if not isinstance(ids, Iterable):
            raise ConfigError(
                f"ids are {ids!r:.80}; allowed is a sequence of token ids. Of one token the text is"
                " lm.token_to_text(id)"
            )
        self._check_ids(ids)
        return self.text.decode(ids)

    def token_to_text(self, token_id: int) -> str:
        """Return one token's text; U+FFFD where it is part of a character."""
        self._check_ids([token_id])
        return self.text.token_text(token_id)

    def is_stop_token(self, token_id: int) -> bool:
        """Whether this token ends a text."""
        return token_id in self.text.stop_ids

    @property
    def eog_token(self) -> int:
        """The token that ends a generation. Raises: ConfigError if the tokenizer names none."""
        end: int | None = self.text.eos_token_id
        if end is None:
            end = min(self.text.stop_ids, default=None)
        if end is not None:
            return end
        raise ConfigError("this model's files name no end token")

    def format_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        fits: bool = False,
    ) -> ChatPrompt:
        """Return the prompt of chat messages by the model's template, or by `template`.

        It is a str with `ids`, its tokens, in which special tokens that somebody typed are letters
        (`tokenize(prompt, special=True, add_bos=False)` gives them, too); with `constraint`, which
        makes tool calls valid, and `parse`, which takes the answer apart.

        tools: function descriptions, JSON schema; a template without tools gets them described in
        a message. tool_choice: "auto" (as if left out),
        "required", "none", or a function's name. template_kwargs: further variables of the
        template, such as enable_thinking. fits: what cannot fit in the context, by its length, is
        not tokenised.
        Raises: ConfigError when the template refuses or leaves out a message or does not read a
        variable; ContextOverflow with `fits` alone.
        """
        options = self._chat_options(tools, template, template_kwargs)
        pieces = self.text.render_pieces(
            messages, add_generation_prompt=add_generation_prompt, **options
        )
        if fits:
            self.check_length("".join(piece for piece, _ in pieces))
        asked = [each.get("content") for each in messages if each.get("role") == "user"]
        return ChatPrompt.of(
            self.text,
            pieces,
            user_prompt=asked[-1] if asked and isinstance(asked[-1], str) else "",
            template=template,
            tools=tools,
            tool_choice=tool_choice,
        )

    def turn_delta(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        history: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return only the tokens that new messages add after an answer; see `turns.turn_delta`.

        history: the chat they follow, where the template looks at more than the last turn.
        """
        options = self._chat_options(tools, template, template_kwargs)
        return turn_delta(
            self.text,
            messages,
            history=history,
            add_generation_prompt=add_generation_prompt,
            **options,
        )

    @property
    def turn_separator(self) -> list[int]:
        """The tokens that close an assistant's turn: its end token and blank text after it."""
        return turn_separator(self.text)

    def _chat_options(
        self, tools: Any, template: str | None, given: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        options = dict(given or {})
        if tools is not None:
            options["tools"] = list(tools)
        self.text.check_chat_options(options, template)
        return {**options, "template": template}

    def json_schema_to_grammar(
        self, schema: Mapping[str, Any] | str, *, open_objects: bool = False
    ) -> str:
        """Return a JSON schema as GBNF text; see `constraints.json_schema_to_grammar`."""
        return json_schema_to_grammar(schema, open_objects=open_objects)

    def parse_chat_output(
        self,
        text: str,
        *,
        thinking_open: bool = False,
        is_partial: bool = False,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
    ) -> ChatOutput:
        """Take what the assistant said apart, in the form that the model's template writes.

        See `tokens.parse.parse_chat_output`; a prompt's own `parse` knows all but the text.
        """
        return parse_chat_output(
            text,
            thinking_open=thinking_open,
            is_partial=is_partial,
            form=self.text.chat_form(template),
            tools=tools or (),
        )

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
    ) -> NDArray[np.float32]:
        """Return a vector for each text: float32 [N, n_embd], from the final hidden states.

        texts: or the token ids of one, as they are.

        pooling: the "mean" over a text's tokens, its first ("cls") or its "last" one; None as the
        model's file says, else the mean. normalize: to length 1. Keeps no KV.
        Raises: Unsupported where the engine gives no hidden states; ConfigError for an empty text;
        StaleHandle once the LM is closed.
        Cost: a forward per n_batch tokens, between other work.
        """
        return embed(self, texts, pooling=pooling, normalize=normalize)

    def add_adapter(self, name: str, folder: str | PathLike[str]) -> None:
        """Load a LoRA adapter in PEFT's format under a name; see `Adapters.add`."""
        self.adapters.add(self, name, folder)

    def fingerprint(self, adapter: str | None = None) -> str:
        """Return what files of this model, with this adapter, are marked with: another text once
        the weights have been changed.

        Raises: ConfigError for an unknown adapter.
        """
        mark, own = self.engine.fingerprint(), self.adapters.fingerprint(adapter)
        return mark if adapter is None else f"{mark}+{own}"

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; see `Adapters.remove`."""
        self.adapters.remove(self, name)

    def stats(self) -> Stats:
        """Return what was prefilled, reused and decoded, the KV held, and seconds a phase."""
        self.driver.try_drain()
        return gather_stats(self.scheduler)

    def clear_cache(self) -> None:
        """Forget all KV and logits that no running work needs; tokens and handles stay.

        KV that is pinned by hand goes, too, and its room stays: see `PathKV.pin`.
        Weights changed in place are noticed where PyTorch counts changes (an optimizer's step,
        `add_`, `load_state_dict`); call this after other changes, such as through `.data`.
        """
        if not self.closed:  # then there is none
            self.driver.exclusive(self.scheduler.clear)

    def see_weights(self) -> None:
        """Forget what was computed with weights that somebody has changed since.

        Every call that runs the model does so first; for what is kept beside the tree. Where
        something runs that has begun with the weights of before, this waits for its end.
        """
        if not self.closed and self.scheduler.weights_changed():
            self.driver.exclusive(self.scheduler.check_weights)
            if self.scheduler.weights_changed():
                # What is asked for now begins once they are seen; see `Scheduler._awaits_weights`.
                self.drive(self.submit([Extend(self.place([0]), (), (Logits(1),))]))

    async def asee_weights(self) -> None:
        """As `see_weights`, without blocking the loop."""
        if self.scheduler.weights_changed():
            await asyncio.to_thread(self.see_weights)

    def close(self) -> None:
        """End what runs, free the KV and the model; idempotent. Its handles are stale then."""
        if self._open:
            self._open = False
            if self.driver.closed:  # it gave up on its own; the model is still there
                self.engine.close()
            else:
                self.driver.close(self.engine.close)

    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **options: Any) -> NoReturn:
            raise TypeError('an LM is not called: lm.generate("…") returns a list of nodes')

    def __enter__(self) -> LM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.info.name} on {self.info.device}"
        context = "unknown" if self.n_ctx == UNKNOWN_CONTEXT_LENGTH else self.n_ctx
        return f"<LM {self.info.model} ({state}), context {context}, {self.info.dtype}>"


def least_and_most(ids: Sequence[int]) -> tuple[int, int]:
    """Return the least and the largest of some ids. Long lists are looked through in C: a context
    is checked whole each time that it is asked about.
    """
    if type(ids) is list and len(ids) >= 256:
        try:
            packed = np.frombuffer(array("q", ids), np.int64)
        except (TypeError, OverflowError):  # none that are ids: who compares them tells
            return min(ids), max(ids)
        return int(packed.min()), int(packed.max())
    return min(ids), max(ids)


def adopted(model: Any, make: Callable[[], LM]) -> tuple[LM, bool]:
    """Return the LM that stands over a loaded model object, and whether it was made just now.

    The LM keeps the object alive, so its id is its name for as long as the entry is there.
    """
    with _adopting:
        lm = _adopted.get(id(model))
        if lm is not None and not lm.closed:
            return lm, False
        lm = _adopted[id(model)] = make()
        return lm, True


def check_n_ctx(n_ctx: int | None, info: EngineInfo) -> int:
    """Return the context length to use."""
    if n_ctx is None:
        return info.context_length
    n_ctx = check_int("n_ctx", n_ctx, 1)
    if n_ctx > info.context_length:
        raise ConfigError(
            f"n_ctx is {n_ctx}, but {info.model} has {info.context_length} positions;"
            " use at most that"
        )
    return n_ctx


def check_kind(engine: Engine) -> None:
    """Refuse an engine whose fragments are not of the kind that it says."""
    info = engine.info
    if (engine.fragments is None) != (info.kv == "hidden"):
        has = "none" if engine.fragments is None else "some"
        raise ConfigError(
            f'the {info.name} engine says kv="{info.kv}", but of fragments it has {has};'
            " engines without them, and only those, are hidden"
        )
    if info.kv != "hidden" and info.kv_bytes_per_token < 1:
        raise ConfigError(
            f"the {info.name} engine says kv_bytes_per_token={info.kv_bytes_per_token}; budgets and"
            " files need the bytes of a slot, at least 1"
        )


def capacity_of(kv_bytes: int | None, info: EngineInfo) -> int | None:
    """Return how many slots a byte budget has, of those there are; None for no limit."""
    if kv_bytes is None:
        return info.kv_slots
    if info.kv == "hidden":
        raise Unsupported(
            f"the {info.name} engine keeps its KV to itself, so kv_budget has no effect;"
            " leave it out"
        )
    capacity: int = kv_bytes // info.kv_bytes_per_token
    if capacity < 1:
        raise ConfigError(
            f"kv_budget of {kv_bytes} bytes holds not one token of {info.kv_bytes_per_token} bytes",
            hint='give more, or "auto"',
        )
    return capacity if info.kv_slots is None else min(capacity, info.kv_slots)


def refuse_offload(engine: str) -> NoReturn:
    """Raise Unsupported: there is no KV that could be brought to the host."""
    raise Unsupported(
        f"the {engine} engine keeps its KV to itself, so offload has no effect; leave it out"
    )


def host_capacity_of(offload_bytes: int | None, info: EngineInfo) -> int:
    """Return how many slots the host may keep for the engine."""
    if offload_bytes is None:
        return 0
    if info.kv == "hidden":
        refuse_offload(info.name)
    capacity = offload_bytes // info.kv_bytes_per_token
    if capacity < 1:
        raise ConfigError(
            f"offload of {offload_bytes} bytes holds not one token of {info.kv_bytes_per_token}"
            " bytes; give more, or leave it out"
        )
    return capacity


def least(n_seq_max: int | None, info: EngineInfo) -> int | None:
    """Return the smaller limit of resident paths; None for none."""
    if n_seq_max is not None:
        n_seq_max = check_int("n_seq_max", n_seq_max, 1)
        if info.kv == "hidden":
            raise Unsupported(
                f"the {info.name} engine keeps its KV to itself, so n_seq_max has no effect;"
                " leave it out"
            )
    given = [limit for limit in (n_seq_max, info.max_paths) if limit is not None]
    return min(given) if given else None
