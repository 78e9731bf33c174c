"""Heddle: a node of a reasoning tree that grows, answers questions and shows itself."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Unpack

from ..errors import ConfigError
from ..results import Delta, Distribution, TextScore
from ..sampling.params import BranchOptions, SamplingParams
from . import ask, known, walk
from .batch import at_each
from .branches import Branches
from .grow import Growth, adeltas, deltas, plan, refuse_terminal, seeded
from .kvfrag import KVFrag, fragments
from .shown import Shown


class Heddle(Shown):
    """A node: some tokens that continue its parent's. Equal siblings are two nodes over one KV.

    May be subclassed: children are of their parent's class, made by its constructor.
    """

    # Growing

    def grow(
        self,
        n: int = 1,
        *,
        at: Iterable[Heddle] | Heddle | None = None,
        force: bool = False,
        show: bool = True,
        **sampling: Unpack[BranchOptions],
    ) -> Branches:
        """Generate `n` continuations and return them, attached as children.

        Args:
            at: grow these nodes instead of this one, all in one batch; n each, in their order.
                Terminal ones are left alone and listed in `skipped` of the result.
            force: grow terminal nodes too.
            show: in a notebook, show the branches while they grow; elsewhere nothing is shown.
            sampling: SamplingParams; the model's defaults hold for what is not given.

        Raises:
            Terminal: this one node ended with an end token.

        On an error no child is there; only what a constraint leaves no token is left out alone, and
        told by `failed` of the result. Ctrl-C keeps what was made as finish_reason "interrupted".
        """
        # Looked up, not imported: where IPython does not run there is nobody to show it to.
        ipython = sys.modules.get("IPython")
        is_shown = show and ipython is not None and ipython.get_ipython() is not None
        growth = self._plan(n, at, force, sampling, streamed=is_shown)
        if growth is None:
            return Branches()
        if not is_shown:
            return growth.run()
        from ..viz.lanes import watch

        return growth.run(watch(len(growth.shoots)))

    async def agrow(
        self,
        n: int = 1,
        *,
        at: Iterable[Heddle] | Heddle | None = None,
        force: bool = False,
        **sampling: Unpack[BranchOptions],
    ) -> Branches:
        """As `grow`, beside a running loop. A cancelled task keeps what was made."""
        growth = self._plan(n, at, force, sampling)
        return await growth.arun() if growth is not None else Branches()

    def stream(
        self,
        n: int = 1,
        *,
        at: Iterable[Heddle] | Heddle | None = None,
        force: bool = False,
        **sampling: Unpack[BranchOptions],
    ) -> Generator[Delta, None, Branches]:
        """As `grow`, token by token: yield what is new, attach each child as it ends.

        Mistakes raise at the call; the model runs from the first `next`. Leaving the loop early
        keeps what was delivered as nodes with finish_reason "cancelled". An error of one branch is
        raised at the end.
        """
        return deltas(self._plan(n, at, force, sampling, streamed=True))

    def astream(
        self,
        n: int = 1,
        *,
        at: Iterable[Heddle] | Heddle | None = None,
        force: bool = False,
        **sampling: Unpack[BranchOptions],
    ) -> AsyncGenerator[Delta, None]:
        """As `stream`, beside a running loop."""
        return adeltas(self._plan(n, at, force, sampling, streamed=True))

    def _plan(
        self,
        n: int,
        at: Iterable[Heddle] | Heddle | None,
        force: bool,
        sampling: Mapping[str, Any],
        *,
        streamed: bool = False,
    ) -> Growth | None:
        lm = self._home.live_lm()
        params = SamplingParams.resolve({**sampling, "n": n}, lm.defaults)
        first = 0
        if at is None or isinstance(at, Heddle):
            nodes = [self if at is None else at]
            first = nodes[0]._first_number(params)
            if not force:
                refuse_terminal(nodes[0])
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
        """Add a child with this text (or these token ids) and return it. Runs no model.

        The text is tokenised as a continuation: no BOS and no space creep in. Empty text makes an
        empty node. Raises ContextOverflow when the path gets longer than the context.

        special: True reads special tokens that stand in the text as such, False as plain text; None
        as the class does (`reads_special`, False here). Never True for what others have typed.
        """
        if self._home.is_text and isinstance(text, str):
            child = self._child([])
            child._text = text
            self.children.append(child)
            return child
        child = self._child(ask.ids_of(self, text, special))
        child._place = self._home.live_lm().place(child._tokens, after=self._where())
        self.children.append(child)
        return child

    # Asking

    def next(self, top: int = 10) -> Distribution:
        """Return the `top` likeliest next tokens; raw probabilities, no filter."""
        lm, item = self._home.live_lm(), ask.next_item(self, top)
        tickets = lm.submit([item])
        lm.drive(tickets)
        return ask.distribution(lm, tickets[0].result()[0], top)

    async def anext(self, top: int = 10) -> Distribution:
        """As `next`, beside a running loop."""
        lm, item = self._home.live_lm(), ask.next_item(self, top)
        tickets = await lm.asubmit([item])
        await lm.adrive(tickets)
        return ask.distribution(lm, tickets[0].result()[0], top)

    def measure(self, text: str | Sequence[int], *, special: bool | None = None) -> TextScore:
        """Return how likely this text (or these token ids) is after the node. Adds nothing.

        special: as for `add`.
        """
        lm, item = self._home.live_lm(), ask.measure_item(self, text, special)
        tickets = lm.submit([item])
        lm.drive(tickets)
        return ask.text_score(lm, item, tickets[0].result()[0])

    async def ameasure(
        self, text: str | Sequence[int], *, special: bool | None = None
    ) -> TextScore:
        """As `measure`, beside a running loop."""
        lm, item = self._home.live_lm(), ask.measure_item(self, text, special)
        tickets = await lm.asubmit([item])
        await lm.adrive(tickets)
        return ask.text_score(lm, item, tickets[0].result()[0])

    @property
    def frag(self) -> list[KVFrag]:
        """The KV of the node's own tokens, one fragment a layer. Cost: exports the path."""
        return fragments(self)

    def get_prefix_cache(self) -> Any:
        """Return the path's KV as the engine library's own cache, which its model accepts.

        Raises Unsupported on engines whose library has none.
        """
        return self._home.live_lm().kv.engine_cache(ask.at_end(self))

    # The known names

    def add_text_child(self, text: str | Sequence[int], *, special: bool | None = None) -> Heddle:
        """Return `add(text, special=special)`."""
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
        """As `grow`, with the known defaults; [] on a terminal node.

        Inside `apply_at_leaves` the list is filled when it is looked at, for all leaves in one
        batch.
        """
        params = known.params(n, temp, max_tokens, min_p, stop_strings, kwargs)
        if self.terminal:
            return Branches()
        if self._batch is not None:
            self._where()
            # A UserList: it reads and behaves like the list it becomes.
            return self._batch.put_off(self, seeded(params))  # type: ignore[return-value]
        return plan([self], params, force=False, streamed=False).run()

    def make_child_stream(
        self,
        n: int = 4,
        temp: float = 0.8,
        max_tokens: int = 8,
        min_p: float = 0.05,
        stop_strings: str | Sequence[str] = (),
        **kwargs: Any,
    ) -> Generator[known.StreamItem, None, Branches]:
        """As `make_children`, yielding the known items; `deltas` in each holds what is new."""
        params = known.params(n, temp, max_tokens, min_p, stop_strings, kwargs)
        first = self._first_number(params)
        return known.items(plan([self], params, force=False, streamed=True, first=first))

    def ramify(self, arg: str | list[str] | None = None, **kwargs: Any) -> Any:
        """Add a text child (a text), text children (a list of texts), or generate (nothing).

        Generating takes the keywords of `make_children`; `stream=True` returns
        `make_child_stream`. With text they are checked and have no effect; `special` is as for
        `add`.
        """
        streamed = kwargs.pop("stream", False)
        if isinstance(arg, str) or known.ramify_texts(arg) is not None:
            special = kwargs.pop("special", None)
            known.check(kwargs)
            made = [
                self.add(text, special=special)
                for text in ([arg] if isinstance(arg, str) else arg or ())
            ]
            return made[0] if isinstance(arg, str) else made
        return self.make_child_stream(**kwargs) if streamed else self.make_children(**kwargs)

    def at_all_leaves(self, func: Callable[[Heddle], Any]) -> list[Any]:
        """Call `func` on every leaf and return the results, as `apply_at_leaves` does."""
        return at_each(walk.leaves(self), func)

    def apply_at_leaves(self, *funcs: Callable[[Heddle], Any]) -> list[Any]:
        """Call each function on every leaf that there is then; return the results of the last one.

        `ramify` and `make_children` that a function calls on its own leaf run as one batch for all
        leaves.
        """
        results: list[Any] = []
        for func in funcs:
            results = at_each(walk.leaves(self), func)
        return results

    # Making

    def _first_number(self, params: SamplingParams) -> int:
        """Return the number of a call's first branch: more than 0 for equal leaves in a batch."""
        return 0 if self._batch is None else self._batch.number(self, params)

    def _child(self, token_ids: Sequence[int]) -> Heddle:
        """Make a child that is in no list yet."""
        return self._child_class(self._home, None, list(token_ids), None, None, self)

    @property
    def _child_class(self) -> type[Heddle]:
        return type(self)
