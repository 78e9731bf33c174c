"""`LM`: one model with its tokenizer, token tree, scheduler and adapters."""

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
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack
from weakref import WeakValueDictionary

import numpy as np

from .._core.kv.place import Place
from .._core.kv.tree import TokenTree
from .._core.nopickle import NotPicklable
from .._core.remedies import OF_LM, HidesRemedies, remedied
from .._core.sampling.dry import NO_BREAKERS, SequenceBreakers
from .._core.sampling.params import (
    BranchOptions,
    ModelDefaults,
    SamplingParams,
    accepts_params_first,
)
from .._core.sampling.sampler import Sampler
from .._core.sched.draft_model import DraftModel
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
from . import scoring
from .adapters import Adapters as Adapters
from .chat import ChatPrompt
from .embedding import embed
from .path_kv import PathKV
from .stats import Stats, gather_stats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..loom import Branches
    from .results import Normalize, Selection, TextScore
    from .scoring import Method, Prompt

Draft = Literal["lookup"]  # or an LM, see `LM.draft`
ROW_CACHE_BYTES = 64 << 20
N_BATCH = 512
N_SEQ_MAX = 65_536  # live branches that `BranchStore.available` counts down from

# The LM of each model object that a caller passed already loaded, by the object's id.
_lms_by_model: WeakValueDictionary[int, LM] = WeakValueDictionary()
_lms_lock = threading.Lock()


@remedied(OF_LM, camel_case=True)
class LM(
    NotPicklable,
    HidesRemedies,
    instead="load the model there from what it was loaded from (weft.load), or ask weft serve",
):
    """A loaded model: engine, tokenizer, token tree and scheduler. Create it with `weft.load`.

    Looms, branches and AsyncLM all run the model through `submit` and `drive`. Equal prefixes are
    therefore computed once, and all live branches share each step. An LM can be used from any
    thread and as a context manager.

    Attributes:
        engine, info: the engine that runs the model, and its description.
        text: Weft's own view of the tokenizer.
        tokenizer, model: the objects that the caller passed, else `text` and `engine`.
        n_ctx: maximum number of tokens of a path.
        n_seq_max: number of branches that `BranchStore.available` counts down from.
        defaults: sampling parameters of raw prompts.
        chat_defaults: sampling parameters of chat answers and branches; equal to `defaults` if the
            model has no chat template.

    The defaults come from the model's files, if these contain sampling parameters.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any = None,
        *,
        model: Any = None,
        n_ctx: int | None = None,
        n_batch: int | None = None,
        n_seq_max: int | None = None,
        kv_bytes: int | None = None,
        offload_bytes: int | None = None,
        row_bytes: int | None = None,
        defaults: SamplingParams | ModelDefaults | None = None,
        draft: Draft | LM | None = None,
    ) -> None:
        """Assemble an LM from its parts; see `weft.load`.

        Args:
            engine: the engine that runs the model.
            tokenizer: Weft's own `Tokenizer`, or an object that `weft.load` accepts.
            model: the object for the attribute `model`; None: the engine.
            n_ctx: maximum number of tokens of a path; None: the model's own.
            n_batch: maximum number of tokens of a step; None: 512.
            n_seq_max: maximum number of paths with resident KV; None: the engine's limit.
            kv_bytes: KV budget; None: no limit.
            offload_bytes: host memory for KV beyond the budget; None: none.
            row_bytes: budget of cached logits rows; None: 64 MiB.
            defaults: sampling parameters that a call does not set. None: temperature 1 without
                filters; `weft.load` passes those of the model's files.
            draft: the attribute `draft`.
        """
        if not isinstance(engine, Engine):
            raise ConfigError(
                f"an LM is assembled from an engine, not from {engine!r:.80}; to load a model, call"
                " weft.load(model)",
                hint="call weft.load(model)",
            )
        check_kv_kind(engine)
        self.engine = engine
        self.text = text = Tokenizer.wrap(tokenizer)
        self.model = engine if model is None else model
        self.tokenizer = text.object
        self.n_ctx = check_n_ctx(n_ctx, engine.info)
        self.n_seq_max = N_SEQ_MAX if n_seq_max is None else n_seq_max
        own = ModelDefaults.from_sampling(defaults or SamplingParams())
        self.defaults = own.raw
        self.chat_defaults = own.chat if text.chat_template else own.raw
        self.tree = TokenTree(
            engine.fragments,
            capacity=capacity_of(kv_bytes, engine.info),
            max_paths=max_paths_of(n_seq_max, engine.info),
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
        self._breakers: dict[tuple[str, ...], SequenceBreakers] = {}
        self.face_state: dict[type[Any], Any] = {}  # per-LM state of branches and others, by class
        self._draft: Draft | LM | None = None
        self.draft = draft
        self.load_arguments: dict[str, Any] = {}  # arguments of `load` for an already loaded model

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any = None) -> LM:
        """Return the LM of a loaded model object, which is created at the first call.

        Later calls with the same object return the same LM. An LM is returned unchanged.

        tokenizer: the tokenizer of a model object; None for an LM.
        """
        from ..loading import load

        return model if isinstance(model, LM) else load(model, tokenizer)

    @cached_property
    def constraints(self) -> Compiler:
        """The compiler of constraints for this vocabulary, with a cache of compiled ones."""
        return Compiler(self.text, self.info.n_vocab)

    @property
    def info(self) -> EngineInfo:
        """The engine's description: model, device, dtype, capabilities."""
        return self.engine.info

    @property
    def draft(self) -> Draft | LM | None:
        """Source of draft tokens for generated text (speculative decoding).

        "lookup": text in the token tree that follows the last tokens of a branch there: in its own
        path, in siblings, in other looms. An LM: a smaller model with the same tokenizer, which
        the caller closes. None: no drafts. May be assigned between calls.

        A step verifies several draft tokens of a branch at the cost of little more than one. The
        text is the same, as a token is drawn from the same logits by the same random number. Drafts
        are only verified while they save time, by their acceptance and the time of steps so far.
        Commits of branches take drafts of "lookup" only. AsyncLM takes none.

        Raises:
            ConfigError: another value is assigned, or an LM with other tokens.
            Unsupported: the engine has no KV that Weft manages (`info.kv` is "hidden"), or it
                overlaps steps and an LM is assigned.
        """
        return self._draft

    @draft.setter
    def draft(self, draft: Draft | LM | None) -> None:
        if not isinstance(draft, LM):
            draft = check_draft(draft)
        if draft is not None and self.engine.fragments is None:
            raise Unsupported(
                f"{self.info.model} on the {self.info.name} engine verifies no drafts, because"
                " Weft does not manage its KV; leave draft out"
            )
        if isinstance(draft, LM):
            self._check_draft_model(draft)
        if draft == self._draft:
            return
        model = DraftModel(draft.driver) if isinstance(draft, LM) else None
        with self.scheduler.lock:
            self.scheduler.speculate(lookup=draft == "lookup", model=model)
            self._draft = draft

    def _check_draft_model(self, draft: LM) -> None:
        """Raise an error unless an LM can draft tokens for this one."""
        if draft is self or draft.closed:
            raise ConfigError("draft is this LM itself, or closed; give another, smaller LM")
        if not draft.engine.info.capabilities.steps or self.info.async_scheduling:
            raise Unsupported(
                "a draft model needs an engine with steps, and a large model whose engine does not"
                ' overlap steps; use draft="lookup"'
            )
        own, other = self.text.vocab_bytes, draft.text.vocab_bytes
        n = min(len(own), len(other))
        if own[:n] != other[:n] or draft.info.n_vocab < len(own):
            raise ConfigError(
                f"draft is {draft.info.model}, whose tokens are not those of {self.info.model};"
                " give a model with the same tokenizer"
            )

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self.driver.closed

    def place(
        self, ids: Sequence[int], after: Place | None = None, *, namespace: str | None = None
    ) -> Place:
        """Return the place in the token tree after a sequence of tokens. Runs nothing.

        Args:
            ids: token ids of the model's vocabulary.
            after: the place that the ids follow; None: the root of a tree.
            namespace: the name of the LoRA adapter whose tree to use; None: the base model's tree.
                Ignored with `after`, which belongs to a tree already.

        Raises: ConfigError for ids outside the vocabulary or an unknown adapter; ContextOverflow
        beyond `n_ctx`.
        """
        self.check_path(ids, 0 if after is None else after.depth)
        name = None if after is None else after.namespace
        if namespace is not None and after is None:
            name = self.adapters.namespace(namespace)
        return Place(self.tree.holds, name, after, list(ids))

    def root(self, namespace: str | None = None) -> Place:
        """Return the root of a token tree.

        namespace: the name of the LoRA adapter whose tree to use; None: the base model's tree.
        """
        return Place(self.tree.holds, self.adapters.namespace(namespace))

    def check_path(self, ids: Sequence[int], n_before: int = 0) -> None:
        """Check token ids that follow `n_before` other tokens, without creating a place.

        Raises: what `place` raises for such ids.
        """
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
        """Raise ContextOverflow for a text that cannot fit, by its length, before tokenizing it.

        Tokenizing takes much longer than this check. A text that may fit always passes.
        """
        # Short texts are tokenized quickly.
        fewest = self.text.min_token_count(text) if len(text) > self.n_ctx else 0
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
        low, high = min_and_max(ids)
        if self.info.n_vocab == 0:
            self.text.check_ids(ids)
        elif low < 0 or high >= self.info.n_vocab:
            wrong = low if low < 0 else high
            raise ConfigError(
                f"token id {wrong} is outside the vocabulary;"
                f" allowed are 0 to {self.info.n_vocab - 1}"
            )

    def sampler(self, params: SamplingParams, stream: int, *, in_steps: bool = False) -> Sampler:
        """Return a new sampler, which draws tokens from logits.

        Args:
            params: the sampling parameters.
            stream: the random stream, see `stream_of`.
            in_steps: True for a caller that draws token by token from rows of logits, as a
                `Branch` does. Parameters that the engine supports only in full runs then raise.

        Raises: ConfigError for biases of unknown tokens; GrammarError for an invalid constraint;
        Unsupported for parameters that the engine's steps or rows cannot apply.
        """
        if in_steps:
            check_steps(params, self.engine)
        if self.info.n_vocab:  # engines without a vocabulary reject biases themselves
            self._check_ids([token for token, _ in params.logit_bias])
        constraint = params.constraint
        matcher = None if constraint is None else self.constraints.matcher(constraint)
        return Sampler(params, stream, matcher, self._sequence_breakers(params))

    def _sequence_breakers(self, params: SamplingParams) -> SequenceBreakers:
        """Return the tokens of DRY's sequence breakers, created once for equal texts.

        An engine without a vocabulary gets none: it applies DRY by itself, or rejects it.
        """
        texts = params.dry_sequence_breakers
        if not (params.dry_multiplier and texts and self.info.n_vocab):
            return NO_BREAKERS
        if texts not in self._breakers:
            text = self.text
            self._breakers[texts] = SequenceBreakers.from_texts(
                texts, text.vocab_bytes, text.continuation
            )
        return self._breakers[texts]

    def _check_items(self, items: Sequence[Item]) -> None:
        if self.info.n_labels and any(not _reads_rows(item) for item in items):
            raise Unsupported(
                f"{self.info.model} is a reward model: it scores text and generates none; give it"
                " to weft.search.RewardModel.load"
            )
        for item in items if self.info.n_vocab else ():
            if isinstance(item, Run) and item.sampler.params.logit_bias:
                self._check_ids([token for token, _ in item.sampler.params.logit_bias])

    def submit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """Queue work items, and return a ticket for each. They run when a caller drives them.

        atomic: as for `Scheduler.submit`.
        """
        self._check_items(items)
        return self.driver.submit(items, atomic=atomic)

    def drive(self, tickets: Sequence[Ticket]) -> None:
        """Run steps until all tickets are done; see `Driver.drive` for Ctrl-C."""
        self.driver.drive(tickets)

    def pump(self, channel: Channel, tickets: Sequence[Ticket]) -> Iterator[list[Any]]:
        """Run steps until all tickets are done, and yield what arrives in a channel.

        Each list has the items that arrived in one step.
        """
        return self.driver.pump(channel, tickets)

    def turn_of_loop(self) -> Awaitable[None] | None:
        """Return an awaitable that a call from an event loop must await first, or None.

        It is not None if very many calls start in one pass of the loop; awaiting it lets other
        tasks run.
        """
        return self.driver.start_call()

    async def asubmit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """The async form of `submit`. Work from one pass of the event loop shares a step."""
        self._check_items(items)
        return await self.driver.asubmit(items, atomic=atomic)

    def adrive(self, tickets: Sequence[Ticket]) -> Awaitable[None]:
        """Return an awaitable that runs until all tickets are done, without blocking the loop."""
        return self.driver.adrive(tickets)

    def when_done(self, tickets: Sequence[Ticket]) -> asyncio.Future[None]:
        """Return a future of the running loop that is set when all tickets are done."""
        return self.driver.when_done(tickets)

    def apump(self, channel: Channel, tickets: Sequence[Ticket]) -> AsyncIterator[list[Any]]:
        """The async form of `pump`, for a running event loop."""
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
        """Return `n` answers to a prompt: nodes with `text`, `logprob` and `finish_reason`.

        `str(answers[0])` is the first answer's text. The nodes are children of a new loom,
        `answers[0].parent`, and can be grown, measured and searched below.

        Args:
            prompt: a text (rendered by the chat template if the model has one), chat messages, or
                token ids.
            n, params, sampling: as for `Heddle.grow`; `n` is 1 and `max_tokens` 256 by default.
            system: a system message before the prompt.
            template: False continues a text without the chat template.

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
        """The async form of `generate`, with the same arguments, for a running event loop.

        Concurrent calls share each step of the model.
        """
        from ..loom.generate import agenerate

        return await agenerate(
            self, prompt, n, params, system=system, template=template, **sampling
        )

    def score(
        self,
        prompt: Prompt,
        candidates: Sequence[str | Sequence[int]],
        *,
        normalize: Normalize = "none",
        end: bool = False,
        system: str | None = None,
        template: bool = False,
    ) -> list[TextScore]:
        """Return the log-probability of each candidate after a prompt, in their order.

        All candidates run in one batch, and the prompt is computed once. A text is continued as it
        is: spaces at its end belong to the candidates, as in lm-evaluation-harness. After chat
        messages a candidate is the assistant's answer.

        Args:
            prompt: a text, chat messages, or token ids.
            system: a system message before the messages.
            template: True renders a text as a user's message.
            candidates: texts or token ids, at least one.
            normalize: what `score` of a result divides the log-probability by: "none", "tokens" or
                "bytes" (the UTF-8 length of the candidate).
            end: include the token that ends the text, or the assistant's turn.

        Raises: ConfigError for an empty candidate or an argument outside what is allowed;
        ContextOverflow.
        """
        request = scoring.read_request(
            self, prompt, candidates, end=end, system=system, template=template
        )
        return scoring.score(self, request, normalize)

    async def ascore(
        self,
        prompt: Prompt,
        candidates: Sequence[str | Sequence[int]],
        *,
        normalize: Normalize = "none",
        end: bool = False,
        system: str | None = None,
        template: bool = False,
    ) -> list[TextScore]:
        """The async form of `score`, with the same arguments, for a running event loop."""
        request = scoring.read_request(
            self, prompt, candidates, end=end, system=system, template=template
        )
        return await scoring.ascore(self, request, normalize)

    def score_many(
        self,
        prompts: Iterable[tuple[Prompt, Sequence[str | Sequence[int]]]],
        *,
        normalize: Normalize = "none",
        end: bool = False,
        system: str | None = None,
        template: bool = False,
    ) -> Iterator[tuple[int, list[TextScore]]]:
        """Yield (index of the prompt, scores of its candidates) as results are ready.

        Prompts run in the order of their prefixes, which is not the order of `prompts`. A prefix
        that several prompts share is computed once, even if the KV budget fits few prompts. Wrong
        arguments raise at the call. Closing the generator cancels the rest.

        Args:
            prompts: pairs of a prompt and its candidates.
            normalize, end, system, template: as for `score`.
        """
        options = {"end": end, "system": system, "template": template}
        requests = scoring.read_requests(self, prompts, **options)
        return scoring.score_many(self, scoring.ManyScores(self, requests, normalize))

    def ascore_many(
        self,
        prompts: Iterable[tuple[Prompt, Sequence[str | Sequence[int]]]],
        *,
        normalize: Normalize = "none",
        end: bool = False,
        system: str | None = None,
        template: bool = False,
    ) -> AsyncIterator[tuple[int, list[TextScore]]]:
        """The async form of `score_many`, with the same arguments, for a running event loop."""
        options = {"end": end, "system": system, "template": template}
        requests = scoring.read_requests(self, prompts, **options)
        return scoring.ascore_many(self, scoring.ManyScores(self, requests, normalize))

    def choose(
        self,
        prompt: Prompt,
        candidates: Sequence[str | Sequence[int]],
        *,
        method: Method = "token_length_normalized",
        system: str | None = None,
        template: bool = False,
    ) -> Selection:
        """Return the candidate that a prompt makes likeliest, with the scores of all.

        Args:
            prompt, candidates, system, template: as for `score`.
            method: "token_length_normalized" compares mean log-probabilities.
                "greedy_token_selection" compares token by token and extends shorter candidates by
                their mean. "unconditional_likelihood_normalized" subtracts the log-probability
                without the prompt before it takes the mean. "likelihood" compares
                log-probabilities. The first three are `choices_method` of SGLang. Among equal
                candidates the first one is selected.

        Raises: as `score`.
        """
        request = scoring.read_request(self, prompt, candidates, system=system, template=template)
        return scoring.choose(self, scoring.Choosing(self, request, candidates, method))

    async def achoose(
        self,
        prompt: Prompt,
        candidates: Sequence[str | Sequence[int]],
        *,
        method: Method = "token_length_normalized",
        system: str | None = None,
        template: bool = False,
    ) -> Selection:
        """The async form of `choose`, with the same arguments, for a running event loop."""
        request = scoring.read_request(self, prompt, candidates, system=system, template=template)
        return await scoring.achoose(self, scoring.Choosing(self, request, candidates, method))

    @property
    def kv(self) -> PathKV:
        """The KV of paths: size, pin, offload, copy, trim, export, save and load."""
        return PathKV(self)

    def tokenize(
        self, text: str, *, special: bool = False, add_bos: bool | None = None
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            special: True parses special tokens in the text. In a prompt of `format_chat`, text that
                users typed stays plain in any case.
            add_bos: add the BOS token; None: as the tokenizer does.

        Raises: ConfigError for anything but a str.
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
        """Return the text of token ids, including special tokens."""
        if not isinstance(ids, Iterable):
            raise ConfigError(
                f"ids are {ids!r:.80}; allowed is a sequence of token ids. Of one token the text is"
                " lm.token_to_text(id)"
            )
        self._check_ids(ids)
        return self.text.decode(ids)

    def token_to_text(self, token_id: int) -> str:
        """Return one token's text; U+FFFD if the token is only a part of a character."""
        self._check_ids([token_id])
        return self.text.token_text(token_id)

    def is_stop_token(self, token_id: int) -> bool:
        """Return True if this token ends a text, such as an end-of-sequence token."""
        return token_id in self.text.stop_ids

    @property
    def eog_token(self) -> int:
        """The token that ends a generation. Raises: ConfigError if the model's files name none."""
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
        """Return the prompt of chat messages, rendered by the model's template or by `template`.

        The prompt is a str. Its `ids` are its tokens, in which special tokens that users typed are
        plain text. Its `constraint` makes tool calls valid, and its `parse` splits an answer.

        Args:
            messages: dicts with "role" and "content".
            add_generation_prompt: end with the template's opening of an assistant's turn.
            tools: function descriptions as JSON schema. A template without tools gets them in a
                message.
            tool_choice: "auto" (the default), "required", "none", or a function's name.
            template: a Jinja template instead of the model's.
            template_kwargs: further variables of the template, such as enable_thinking.
            fits: raise for a prompt that cannot fit in the context, before tokenizing it.

        Raises:
            ConfigError: the template rejects or omits a message, or does not use a variable.
            ContextOverflow: with `fits` only.
        """
        options = self._chat_options(tools, template, template_kwargs)
        pieces = self.text.render_pieces(
            messages, add_generation_prompt=add_generation_prompt, **options
        )
        if fits:
            self.check_length("".join(piece for piece, _ in pieces))
        contents = [each.get("content") for each in messages if each.get("role") == "user"]
        last = contents[-1] if contents else None
        return ChatPrompt.from_pieces(
            self.text,
            pieces,
            user_prompt=last if isinstance(last, str) else "",
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

        Args:
            messages: the new messages, after an assistant's answer.
            history: the messages before them, for templates that read more than the last turn.
                None: none.
            add_generation_prompt, tools, template, template_kwargs: as for `format_chat`.
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
        """The tokens that close an assistant's turn: its end token and the text after it."""
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
        """Return a GBNF grammar of the texts that a JSON schema allows.

        See `constraints.json_schema_to_grammar` for the arguments.
        """
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
        """Split an assistant's answer into text, reasoning and calls, by the model's template.

        `ChatPrompt.parse` does the same with the prompt's own settings.

        Args:
            text: the answer.
            thinking_open: the prompt ended inside the reasoning; see `ChatPrompt.thinking_open`.
            is_partial: the answer is still growing.
            tools, template: as passed to `format_chat`.
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

        Args:
            texts: texts, or token ids of texts.
            pooling: "mean" over a text's tokens, "cls" (the first) or "last". None: as the model's
                file says, else "mean".
            normalize: scale each vector to length 1.

        Raises:
            Unsupported: the engine returns no hidden states.
            ConfigError: a text is empty.
            ContextOverflow: a text is longer than the context.
            StaleHandle: the LM is closed.

        Cost: a forward per `n_batch` tokens, between other work. Caches no KV.
        """
        return embed(self, texts, pooling=pooling, normalize=normalize)

    def add_adapter(self, name: str, folder: str | PathLike[str]) -> None:
        """Load a LoRA adapter in PEFT's format under a name; see `Adapters.add`."""
        self.adapters.add(self, name, folder)

    def fingerprint(self, adapter: str | None = None) -> str:
        """Return a fingerprint of the model's weights, which files with KV contain.

        adapter: include the weights of this LoRA adapter; None: only the base model's.

        It changes when the weights change. Raises: ConfigError for an unknown adapter.
        """
        mark, own = self.engine.fingerprint(), self.adapters.fingerprint(adapter)
        return mark if adapter is None else f"{mark}+{own}"

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter; see `Adapters.remove`."""
        self.adapters.remove(self, name)

    def stats(self) -> Stats:
        """Return statistics since the model was loaded: tokens, KV sizes, seconds per phase."""
        self.driver.try_drain()
        return gather_stats(self.scheduler)

    def clear_cache(self) -> None:
        """Clear all KV and logits that no running work needs; tokens and handles stay valid.

        Pinned KV is cleared too, but its room stays reserved: see `PathKV.pin`. Changes of weights
        in place are detected if PyTorch counts them (optimizer steps, `add_`, `load_state_dict`).
        Call this method after other changes, such as through `.data`.
        """
        if not self.closed:
            self.driver.exclusive(self.scheduler.clear)

    def see_weights(self) -> None:
        """Check if the weights were changed in place; if so, clear KV and logits of the old ones.

        Every call that runs the model does this first. Callers with caches of their own call it
        too. It waits for running work that started with the old weights.
        """
        if not self.closed and self.scheduler.weights_changed():
            self.driver.exclusive(self.scheduler.check_weights)
            if self.scheduler.weights_changed():
                # Work submitted now starts with the new weights; see `Scheduler._awaits_weights`.
                self.drive(self.submit([Extend(self.place([0]), (), (Logits(1),))]))

    async def asee_weights(self) -> None:
        """The async form of `see_weights`."""
        if self.scheduler.weights_changed():
            await asyncio.to_thread(self.see_weights)

    def close(self) -> None:
        """Cancel running work, and free the KV and the model. Further calls do nothing.

        Looms, branches and pins of this LM raise StaleHandle from then on.
        """
        if self._open:
            self._open = False
            if self.driver.closed:  # it closed itself after an error; the engine is still open
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


def min_and_max(ids: Sequence[int]) -> tuple[int, int]:
    """Return the smallest and the largest id. Scans long lists with NumPy."""
    if type(ids) is list and len(ids) >= 256:
        try:
            packed = np.frombuffer(array("q", ids), np.int64)
        except (TypeError, OverflowError):  # not ids: the caller's comparison raises
            return min(ids), max(ids)
        return int(packed.min()), int(packed.max())
    return min(ids), max(ids)


def lm_of_model(model: Any, make: Callable[[], LM]) -> tuple[LM, bool]:
    """Return the LM of a loaded model object, and True if this call created it.

    The LM keeps the object alive, so the object's id is a valid key while the entry exists.

    make: creates the LM if the object has none, or a closed one.
    """
    with _lms_lock:
        lm = _lms_by_model.get(id(model))
        if lm is not None and not lm.closed:
            return lm, False
        lm = _lms_by_model[id(model)] = make()
        return lm, True


def check_draft(draft: str | None) -> Draft | None:
    """Return the value of `LM.draft`. Raises: ConfigError if it is not allowed."""
    if draft is None:
        return None
    if draft == "lookup":
        return "lookup"
    raise ConfigError(f'draft is {draft!r}; allowed are "lookup", an LM, and None')


def check_n_ctx(n_ctx: int | None, info: EngineInfo) -> int:
    """Return the context length to use: `n_ctx`, or the model's own if it is None.

    Raises: ConfigError if `n_ctx` is above the model's own.
    """
    if n_ctx is None:
        return info.context_length
    n_ctx = check_int("n_ctx", n_ctx, 1)
    if n_ctx > info.context_length:
        raise ConfigError(
            f"n_ctx is {n_ctx}, but {info.model} has {info.context_length} positions;"
            " use at most that"
        )
    return n_ctx


def check_kv_kind(engine: Engine) -> None:
    """Check that an engine implements the kind of KV that its description states.

    Raises: ConfigError if it does not.
    """
    info = engine.info
    if (engine.fragments is None) != (info.kv == "hidden"):
        state = "None" if engine.fragments is None else "set"
        raise ConfigError(
            f'the {info.name} engine has kv="{info.kv}", but its fragments are {state};'
            ' kv="hidden" means that an engine has no fragments'
        )
    if info.kv != "hidden" and info.kv_bytes_per_token < 1:
        raise ConfigError(
            f"the {info.name} engine has kv_bytes_per_token={info.kv_bytes_per_token}; budgets and"
            " files need the bytes of a slot, at least 1"
        )


def capacity_of(kv_bytes: int | None, info: EngineInfo) -> int | None:
    """Return the number of tokens whose KV fits in a budget on the device; None: no limit.

    kv_bytes: the budget; None: only the engine's own limit.
    """
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
            f"kv_budget is {kv_bytes} bytes, but one token takes {info.kv_bytes_per_token} bytes",
            hint='give more, or "auto"',
        )
    return capacity if info.kv_slots is None else min(capacity, info.kv_slots)


def raise_offload_unsupported(engine: str) -> NoReturn:
    """Raise Unsupported: the engine has no KV that could be offloaded."""
    raise Unsupported(
        f"the {engine} engine keeps its KV to itself, so offload has no effect; leave it out"
    )


def host_capacity_of(offload_bytes: int | None, info: EngineInfo) -> int:
    """Return the number of tokens whose KV fits in host memory.

    offload_bytes: the budget; None means 0 tokens.
    """
    if offload_bytes is None:
        return 0
    if info.kv == "hidden":
        raise_offload_unsupported(info.name)
    capacity = offload_bytes // info.kv_bytes_per_token
    if capacity < 1:
        raise ConfigError(
            f"offload is {offload_bytes} bytes, but one token takes {info.kv_bytes_per_token}"
            " bytes; give more, or leave it out"
        )
    return capacity


def max_paths_of(n_seq_max: int | None, info: EngineInfo) -> int | None:
    """Return the maximum number of paths with resident KV: the caller's or the engine's limit.

    Returns None if neither sets one.
    """
    if n_seq_max is not None:
        n_seq_max = check_int("n_seq_max", n_seq_max, 1)
        if info.kv == "hidden":
            raise Unsupported(
                f"the {info.name} engine keeps its KV to itself, so n_seq_max has no effect;"
                " leave it out"
            )
    given = [limit for limit in (n_seq_max, info.max_paths) if limit is not None]
    return min(given) if given else None


def _reads_rows(item: Item) -> bool:
    return isinstance(item, Extend) and all(isinstance(want, Logits) for want in item.wants)
