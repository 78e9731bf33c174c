"""`Heddle`: a node of a loom that generates children, scores text and renders its tree."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, Unpack, cast, overload

import numpy as np

from .._core import atomic_files
from .._core.remedies import OF_NODE, HidesRemedies, remedied
from .._core.sampling.metrics import largest, log_softmax
from .._core.sampling.params import BranchOptions, SamplingParams, accepts_params_first
from .._core.sched.work import Extend, Logits, Scores, Ticket
from .._core.validation import check_bool, check_int
from ..errors import ConfigError
from ..lm.results import Delta, Distribution, Normalize, TextScore, TokenProb
from ..lm.scoring import check_normalize, end_token, text_score
from . import n8loom_names
from .deferred_growth import call_on_leaves
from .grow import Branches, Growth, adeltas, check_not_terminal, deltas, plan, with_seed
from .kv_fragments import KVFrag, fragments
from .node import (
    HeddleState,
    add_text,
    add_tokens,
    checked_ids,
    encode_after,
    is_chat,
    leaves_below,
    lm_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._core.kv.place import Place
    from ..lm.lm import LM

if TYPE_CHECKING:
    Label = Callable[["Heddle"], str]
    Texts = list[str] | list[list[int]] | list[str | list[int]] | tuple[str | Sequence[int], ...]


class RenderMixin(HeddleState):
    """The part of `Heddle` that draws a node's tree as text, HTML, Graphviz and Mermaid.

    These methods do not change the tree.
    """

    def show(
        self,
        *,
        node: Label | None = None,
        edge: Label | None = None,
        file: TextIO | None = None,
        limit: int | None = None,
    ) -> None:
        """Write the tree from this node down to the terminal.

        Args:
            node: returns the label of a node; None: its text and statistics.
            edge: returns the label of the line to a node, written before the node; None: no labels.
            file: a text stream; None: standard output.
            limit: maximum number of lines; the rest is counted. None: no limit.
        """
        from ..viz.text import show

        show(self._heddle, node=node, edge=edge, file=file, limit=limit)

    @overload
    def to_html(
        self,
        path: None = None,
        *,
        tint: str = "probability",
        top: int = 0,
        limit: int | None = None,
        node: Label | None = None,
        mark: Heddle | None = None,
    ) -> str: ...

    @overload
    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        tint: str = "probability",
        top: int = 0,
        limit: int | None = None,
        node: Label | None = None,
        mark: Heddle | None = None,
    ) -> None: ...

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tint: str = "probability",
        top: int = 0,
        limit: int | None = None,
        node: Label | None = None,
        mark: Heddle | None = None,
    ) -> str | None:
        """Return the tree from this node down as one HTML page, or write it to a file.

        The page loads nothing, folds, and can be searched. Its tokens are colored, and a token's
        statistics appear under the pointer. Above 60 nodes the page starts with an overview and
        unfolds only the path to `mark`, or to the best leaf.

        Args:
            path: a file to write to; the call then returns None.
            tint: "probability", "entropy" or "none": the token colors when the page opens.
            top: alternatives to show for each sampled token, 0 or more. From 1 on, the model runs
                one forward over each node's tokens.
            limit: maximum number of nodes, nearest to this node first; the rest is counted. None:
                no limit.
            node: returns the label of a node; None: its text.
            mark: the path to this node is highlighted. None: the path to the best leaf if there
                are more than 60 nodes, else no path.

        Returns: the page, or None if `path` is given.

        Raises: ConfigError for `top` without a model; StoreError if the file cannot be written.
        """
        from ..viz.html import to_html

        page = to_html(self._heddle, tint=tint, top=top, limit=limit, node=node, mark=mark)
        if path is None:
            return page
        atomic_files.write(path, page)
        return None

    def to_dot(
        self,
        *,
        node: Label | None = None,
        edge: Label | None = None,
        limit: int | None = None,
    ) -> str:
        """Return the tree from this node down as a Graphviz digraph, colored by mean probability.

        Args:
            node: returns the label of a node's box; None: its text and statistics.
            edge: returns the label of the line to a node; None: no labels.
            limit: maximum number of nodes, nearest to this node first; the rest is counted. None:
                no limit.
        """
        from ..viz.graph import to_dot

        return to_dot(self._heddle, node=node, edge=edge, limit=limit)

    def to_mermaid(
        self,
        *,
        node: Label | None = None,
        edge: Label | None = None,
        limit: int | None = 150,
    ) -> str:
        """Return the tree from this node down as a Mermaid flowchart, for Markdown pages.

        Args:
            node: returns the label of a node's box; None: its text and statistics.
            edge: returns the label of the line to a node; None: no labels.
            limit: maximum number of nodes, nearest to this node first; the rest is counted. None:
                as many as Mermaid accepts.
        """
        from ..viz.graph import to_mermaid

        return to_mermaid(self._heddle, node=node, edge=edge, limit=limit)

    @property
    def _heddle(self) -> Heddle:
        # The only subclass is Heddle.
        return cast("Heddle", self)

    def __str__(self) -> str:
        from ..viz.text import draw

        return "\n".join(draw(self._heddle))

    def _repr_html_(self) -> str:
        from ..viz.notebook import tree

        return tree(self._heddle)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return the drawing as text and as HTML, so that a saved notebook contains both."""
        from ..viz.notebook import plain

        return {"text/plain": plain(self._heddle), "text/html": self._repr_html_()}


@remedied(OF_NODE)
class Heddle(HidesRemedies, RenderMixin):
    """A node of a loom: tokens that continue the tokens of its parent.

    Equal siblings are separate nodes that share their KV. Subclasses are allowed: children have
    their parent's class and are created by its constructor.
    """

    # Growing

    @property
    def default_sampling(self) -> SamplingParams:
        """The sampling parameters that `grow` and `stream` use where the caller sets none."""
        lm = self._binding.live_lm()
        return lm.chat_defaults if self._binding.is_chat else lm.defaults

    @accepts_params_first
    def grow(
        self,
        n: int | SamplingParams | None = None,
        params: SamplingParams | None = None,
        *,
        at: Iterable[Heddle] | Heddle | None = None,
        force: bool = False,
        show: bool = True,
        **sampling: Unpack[BranchOptions],
    ) -> Branches:
        """Generate `n` continuations and return them, attached as children.

        Args:
            n: continuations of each node; None: `n` of `params`, or 1. A SamplingParams object here
                is taken as `params`.
            params: replaces all defaults; keywords then change single values.
            at: grow these nodes instead of this one, all in one batch: n each, in their order.
                Terminal nodes are not grown; the result lists them in `skipped`.
            force: grow terminal nodes too.
            show: in a notebook, draw the branches while they grow. No effect elsewhere.
            sampling: keywords of SamplingParams. Defaults: `lm.chat_defaults` in a loom whose
                prompt used a chat template, `lm.defaults` in others. presence_penalty and
                frequency_penalty count the tokens of this call; repetition_penalty and DRY also
                count the path before it.

        Returns: the new children, in branch order.

        Raises:
            Terminal: an end token or a complete constraint ended this one node.
            ConfigError: an argument is outside what is allowed.
            ConstraintError: the constraint allowed no token in any branch.

        On an error no child is attached. If a constraint allows no token in some branches only,
        these are missing and `failed` of the result has their errors. Ctrl-C keeps the tokens so
        far as nodes with finish_reason "interrupted".
        """
        # Looked up, not imported: branches are drawn only if IPython is already running.
        ipython = sys.modules.get("IPython")
        is_shown = (
            check_bool("show", show) and ipython is not None and ipython.get_ipython() is not None
        )
        growth = self._plan(n, params, at, force, sampling, streamed=is_shown)
        if growth is None:
            return Branches()
        if not is_shown:
            return growth.run()
        from ..viz.live import growth_display

        return growth.run(growth_display(len(growth.branches)))

    @accepts_params_first
    async def agrow(
        self,
        n: int | SamplingParams | None = None,
        params: SamplingParams | None = None,
        *,
        at: Iterable[Heddle] | Heddle | None = None,
        force: bool = False,
        show: bool = True,
        **sampling: Unpack[BranchOptions],
    ) -> Branches:
        """The async form of `grow`, with the same arguments, for a running event loop.

        No display is shown, whatever `show` is. If the task is cancelled, branches keep their
        tokens so far.
        """
        check_bool("show", show)
        growth = self._plan(n, params, at, force, sampling)
        return await growth.arun() if growth is not None else Branches()

    @accepts_params_first
    def stream(
        self,
        n: int | SamplingParams | None = None,
        params: SamplingParams | None = None,
        *,
        at: Iterable[Heddle] | Heddle | None = None,
        force: bool = False,
        show: bool = True,
        **sampling: Unpack[BranchOptions],
    ) -> Generator[Delta, None, Branches]:
        """Generate as `grow` does, yielding new tokens as they are drawn.

        Wrong arguments raise at the call; the model runs from the first `next`. Each child is
        attached when it ends. If the generator is closed early, branches keep the tokens that it
        has yielded, with finish_reason "cancelled". An error of one branch is raised at the end.

        show: accepted as in `grow`, without effect.

        Returns: a generator of `Delta`; its return value is the `Branches`.
        """
        check_bool("show", show)
        return deltas(self._plan(n, params, at, force, sampling, streamed=True))

    @accepts_params_first
    def astream(
        self,
        n: int | SamplingParams | None = None,
        params: SamplingParams | None = None,
        *,
        at: Iterable[Heddle] | Heddle | None = None,
        force: bool = False,
        show: bool = True,
        **sampling: Unpack[BranchOptions],
    ) -> AsyncGenerator[Delta, None]:
        """The async form of `stream`, with the same arguments. It has no return value.

        The children are attached to their nodes, as with `stream`.
        """
        check_bool("show", show)
        return adeltas(self._plan(n, params, at, force, sampling, streamed=True))

    def _plan(
        self,
        n: int | SamplingParams | None,
        params: SamplingParams | None,
        at: Iterable[Heddle] | Heddle | None,
        force: bool,
        sampling: Mapping[str, Any],
        *,
        streamed: bool = False,
    ) -> Growth | None:
        """Validate the arguments of `grow` or `stream`; return the planned branches.

        None if `at` is empty.
        """
        params = resolve_params(n, params, sampling, self.default_sampling)
        check_bool("force", force)
        first = 0
        if at is None or isinstance(at, Heddle):
            nodes = [self if at is None else at]
            first = nodes[0]._first_number(params)
            if not force:
                check_not_terminal(nodes[0])
        elif isinstance(at, Iterable):
            nodes = list(at)
        else:
            nodes = [at]
        if not all(isinstance(node, Heddle) for node in nodes):
            raise ConfigError("at takes heddles; allowed is one, or any iterable of them")
        if not nodes:
            return None
        return plan(nodes, params, force=force, streamed=streamed, first=first)

    def add(self, text: str | Sequence[int], *, special: bool | None = None) -> Heddle:
        """Add a child with this text, or these token ids, and return it. Runs no model.

        The text is tokenized as a continuation, without a BOS token or an extra space. Empty text
        gives an empty node.

        Args:
            text: a text, or token ids of the model's vocabulary.
            special: True parses special tokens in the text; False keeps them as plain text; None:
                as the class does (`reads_special`, False here). Never pass True for text from
                users.

        Raises:
            ContextOverflow: the path would be longer than the context.
            ConfigError: an id outside the vocabulary.
        """
        if isinstance(text, str):
            return add_text(self, text, special)
        return add_tokens(self, encode_continuation(self, text, special))

    # Scoring

    def next(self, top: int = 10) -> Distribution:
        """Return the `top` likeliest next tokens by raw probability, before any filter.

        Args:
            top: how many tokens to return, 1 or more.

        Raises: ConfigError if the path is empty.
        """
        lm, item = self._binding.live_lm(), next_item(self, top)
        tickets = lm.submit([item])
        lm.drive(tickets)
        return distribution(lm, tickets[0].result()[0], top)

    async def anext(self, top: int = 10) -> Distribution:
        """The async form of `next`, for a running event loop."""
        lm, item = self._binding.live_lm(), next_item(self, top)
        tickets = await lm.asubmit([item])
        await lm.adrive(tickets)
        return distribution(lm, tickets[0].result()[0], top)

    @overload
    def measure(
        self,
        text: str | Sequence[int],
        *,
        special: bool | None = None,
        normalize: Normalize = "none",
        end: bool = False,
    ) -> TextScore: ...

    @overload
    def measure(
        self,
        text: Texts,
        *,
        special: bool | None = None,
        normalize: Normalize = "none",
        end: bool = False,
    ) -> list[TextScore]: ...

    def measure(
        self,
        text: str | Sequence[int] | Texts,
        *,
        special: bool | None = None,
        normalize: Normalize = "none",
        end: bool = False,
    ) -> TextScore | list[TextScore]:
        """Return the log-probability of a text after the node. Adds nothing to the tree.

        Args:
            text: a text or its token ids, or a list of these. The texts of a list share model
                calls; an empty list gives an empty list.
            special: as for `add`.
            normalize, end: as for `LM.score`.

        Returns: a TextScore, or a list of them in the order of the texts.

        Raises: ConfigError for a text without tokens; ContextOverflow.

        Cost: a list of 50 short texts takes a third to a sixth of the time of 50 calls.
        """
        lm, kind = self._binding.live_lm(), check_normalize(normalize)
        items = measure_items(self, text, special, end=end)
        tickets = lm.submit(items)
        lm.drive(tickets)
        scores = _text_scores(lm, items, tickets, kind)
        return scores if _is_batch(text) else scores[0]

    @overload
    async def ameasure(
        self,
        text: str | Sequence[int],
        *,
        special: bool | None = None,
        normalize: Normalize = "none",
        end: bool = False,
    ) -> TextScore: ...

    @overload
    async def ameasure(
        self,
        text: Texts,
        *,
        special: bool | None = None,
        normalize: Normalize = "none",
        end: bool = False,
    ) -> list[TextScore]: ...

    async def ameasure(
        self,
        text: str | Sequence[int] | Texts,
        *,
        special: bool | None = None,
        normalize: Normalize = "none",
        end: bool = False,
    ) -> TextScore | list[TextScore]:
        """The async form of `measure`, with the same arguments, for a running event loop."""
        lm, kind = self._binding.live_lm(), check_normalize(normalize)
        items = measure_items(self, text, special, end=end)
        tickets = await lm.asubmit(items)
        await lm.adrive(tickets)
        scores = _text_scores(lm, items, tickets, kind)
        return scores if _is_batch(text) else scores[0]

    @property
    def logprob(self) -> float:
        """The sum of the sampled tokens' logprobs, in nats; -inf if the node has none."""
        return math.fsum(self.logprobs) if self.logprobs else -math.inf

    @property
    def frag(self) -> list[KVFrag]:
        """A copy of the KV of the node's own tokens, one fragment per layer.

        Cost: a copy of the full path's KV.
        """
        return fragments(self)

    def get_prefix_cache(self) -> Any:
        """Return a copy of the path's KV as the cache object that the engine's library uses.

        Pass it to the loaded model itself; for Transformers it is a DynamicCache.

        Raises: Unsupported on engines whose library has no such object; ConfigError for an empty
        path.
        """
        return self._binding.live_lm().kv.engine_cache(at_end(self))

    # N8Loom's names

    def add_text_child(self, text: str | Sequence[int], *, special: bool | None = None) -> Heddle:
        """N8Loom's name for `add`."""
        return self.add(text, special=special)

    def make_children(
        self,
        n: int = 4,
        temp: float = 0.8,
        max_tokens: int = 8,
        min_p: float = 0.05,
        stop_strings: str | Sequence[str] = (),
        **kwargs: Any,
    ) -> list[Heddle]:
        """Generate `n` children as `grow` does, with N8Loom's names and defaults.

        `temp` and `stop_strings` are Weft's `temperature` and `stop`; other keywords are those of
        SamplingParams. Returns [] for a terminal node.

        Inside `apply_at_leaves`, the returned list is filled when it is first read, for all leaves
        in one batch.
        """
        own = {"n": n, "max_tokens": max_tokens, "min_p": min_p, **kwargs}
        params = n8loom_names.params(temp=temp, stop_strings=stop_strings, **own)
        if self.terminal:
            return Branches()
        if self._defers_to is not None:
            _ = self.place  # raises now what growing would raise later
            # A UserList, which behaves like a list.
            return self._defers_to.defer(self, with_seed(params))  # type: ignore[return-value]
        return plan([self], params, force=False, streamed=False).run()

    def make_child_stream(
        self,
        n: int = 4,
        temp: float = 0.8,
        max_tokens: int = 8,
        min_p: float = 0.05,
        stop_strings: str | Sequence[str] = (),
        **kwargs: Any,
    ) -> Generator[n8loom_names.StreamItem, None, Branches]:
        """N8Loom's form of `stream`: yield a dict of all branches' texts after each step.

        The dicts have an additional key "deltas" with the new tokens of each branch. The generator
        returns the children.
        """
        own = {"n": n, "max_tokens": max_tokens, "min_p": min_p, **kwargs}
        params = n8loom_names.params(temp=temp, stop_strings=stop_strings, **own)
        first = self._first_number(params)
        return n8loom_names.stream_items(
            plan([self], params, force=False, streamed=True, first=first)
        )

    def ramify(self, arg: str | list[str] | None = None, **kwargs: Any) -> Any:
        """N8Loom's call that adds text children or generates children.

        A text adds one child and returns it; a list of texts adds children and returns them. None
        generates with the keywords of `make_children`; `stream=True` returns `make_child_stream`.
        With text, these keywords are only checked; `special` is as for `add`.
        """
        streamed = kwargs.pop("stream", False)
        if isinstance(arg, str) or n8loom_names.ramify_texts(arg) is not None:
            special = kwargs.pop("special", None)
            n8loom_names.params(**kwargs)
            # A subclass may define add_text_child(text) without further parameters.
            options = {} if special is None else {"special": special}
            children = [
                self.add_text_child(text, **options)
                for text in ([arg] if isinstance(arg, str) else arg or ())
            ]
            return children[0] if isinstance(arg, str) else children
        return self.make_child_stream(**kwargs) if streamed else self.make_children(**kwargs)

    def at_all_leaves(self, func: Callable[[Heddle], Any]) -> list[Any]:
        """N8Loom's name for `apply_at_leaves` with one function."""
        return call_on_leaves(leaves_below(self), func)

    def apply_at_leaves(self, *funcs: Callable[[Heddle], Any]) -> list[Any]:
        """Call functions one after the other, each on every leaf that exists at that time.

        If a function calls `ramify` or `make_children` on its leaf, the calls of all leaves run as
        one batch.

        Returns: the results of the last function, in the order of the leaves.
        """
        results: list[Any] = []
        for func in funcs:
            results = call_on_leaves(leaves_below(self), func)
        return results

    def _first_number(self, params: SamplingParams) -> int:
        """Return the number of this call's first branch, which selects its random numbers.

        It is above 0 if a leaf with an equal path and seed is in the same batch.
        """
        return 0 if self._defers_to is None else self._defers_to.number(self, params)


def resolve_params(
    n: int | SamplingParams | None,
    params: SamplingParams | None,
    sampling: Mapping[str, Any],
    defaults: SamplingParams,
) -> SamplingParams:
    """Combine the arguments of a `grow` or `stream` call into validated sampling parameters.

    Args:
        n: number of branches, or all parameters; None: that of `params`.
        params: replaces `defaults`; None: `defaults`.
        sampling: keywords that change single values.
        defaults: the parameters that the call does not set.

    Raises: ConfigError for wrong values.
    """
    if isinstance(n, SamplingParams):
        if params is not None:
            raise ConfigError("params is given twice; give grow(params) or grow(4, params)")
        n, params = None, n
    if isinstance(n, Mapping):
        raise ConfigError(
            f"n is {n!r:.80}; allowed is an integer or a SamplingParams object. Give"
            " params=SamplingParams(max_tokens=1), or keywords: grow(max_tokens=1)"
        )
    if params is not None and not isinstance(params, SamplingParams):
        raise ConfigError(
            f"params is {params!r:.80}; allowed is a SamplingParams object. Give single parameters"
            " as keywords: grow(4, temperature=0.7)"
        )
    given = sampling if n is None else {**sampling, "n": n}
    return SamplingParams.resolve(given, defaults if params is None else params)


def at_end(node: HeddleState) -> Place:
    """Return the node's place in the token tree. Raises: ConfigError if the path is empty."""
    place = node.place
    if not place.depth:
        raise ConfigError("the node's path is empty: there is no context to score after. Add text")
    return place


def next_item(node: HeddleState, top: int) -> Extend:
    """Return the scheduler's work item of `Heddle.next`: it reads the raw logits after the node."""
    check_int("top", top, 1)
    place = at_end(node)
    return Extend(place, (), (Logits(place.depth),))


def distribution(lm: LM, logits: NDArray[np.float32], top: int) -> Distribution:
    """Return the `top` likeliest tokens of raw logits [V]; equally likely ones by lower id."""
    logprobs = log_softmax(logits)
    order = largest(logprobs[None], top)[0].tolist()
    values = logprobs[order].astype(np.float64)
    text = lm.text
    return Distribution(
        TokenProb(token, text.token_text(token), text.token_bytes(token), logprob, p, rank)
        for rank, (token, logprob, p) in enumerate(
            zip(order, values.tolist(), np.exp(values).tolist(), strict=True)
        )
    )


def encode_continuation(
    node: HeddleState, text: str | Sequence[int], special: bool | None
) -> Sequence[int]:
    """Return the token ids of a text as a continuation of the node.

    Args:
        node: the node.
        text: a text; token ids are returned unchanged.
        special: as for `Heddle.add`.
    """
    if isinstance(text, str):
        return encode_after(node, text, special)
    if isinstance(text, bytes | bytearray | Mapping) or not isinstance(text, Iterable):
        raise ConfigError(f"the text is {text!r:.80}; allowed is a text, or a list of token ids")
    if special is not None:
        raise ConfigError("special applies to text only; leave it out for token ids")
    return checked_ids(text)


def measure_items(
    node: HeddleState, text: str | Sequence[int] | Texts, special: bool | None, *, end: bool
) -> list[Extend]:
    """Return the work items of `Heddle.measure`, one per text; arguments as there."""
    check_bool("end", end)
    texts = cast("Texts", text if _is_batch(text) else [text])
    return [measure_item(node, each, special, end=end) for each in texts]


def _is_batch(text: str | Sequence[int] | Texts) -> bool:
    return isinstance(text, list | tuple) and (not text or isinstance(text[0], Sequence))


def _text_scores(
    lm: LM, items: Sequence[Extend], tickets: Sequence[Ticket], normalize: Normalize
) -> list[TextScore]:
    return [
        text_score(lm, item.tokens, ticket.result()[0], normalize=normalize)
        for item, ticket in zip(items, tickets, strict=True)
    ]


def measure_item(
    node: HeddleState,
    text: str | Sequence[int],
    special: bool | None = None,
    *,
    end: bool = False,
) -> Extend:
    """Return the work item of `Heddle.measure` for one text, or its token ids.

    special, end: as for `Heddle.measure`.
    Raises: ConfigError if the text has no tokens.
    """
    ids = list(encode_continuation(node, text, special))
    if not ids:
        raise ConfigError("there is nothing to measure: the text has no tokens")
    place, lm = at_end(node), lm_of(node)
    if end:
        ids.append(end_token(lm, is_chat=is_chat(node)))
    lm.place(ids, after=place)
    return Extend(place, ids, (Scores(place.depth, place.depth + len(ids)),))
