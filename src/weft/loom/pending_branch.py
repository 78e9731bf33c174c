"""Branches that are being generated, and the order in which they are attached to their parent."""

from __future__ import annotations

import bisect
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .._core.sched.work import FinishReason, Ticket
from .._core.tokens.text import TextStream
from .node import (
    child_list,
    encode_after,
    growing_lists,
    is_place_of,
    lm_of,
    set_place,
    set_run,
    set_tokens,
)
from .stop_strings import Event, StopWatcher

if TYPE_CHECKING:
    from .._core.kv.place import Place
    from .._core.sched.work import RunResult
    from .heddle import Heddle

# Consumes an iterator in one C call, so that KeyboardInterrupt arrives before or after it.
_exhaust = deque[None](maxlen=0).extend
_extend: Callable[[list[Any], Iterable[Any]], None] = list.extend
_LAST_WORD = re.compile(r"\s+\S*\Z")


class SiblingOrder:
    """Attaches the branches of one call to one parent, in order of their numbers.

    Branches may end in any order.
    """

    def __init__(self, parent: Heddle) -> None:
        self._parent = parent
        self._numbers: list[int] = []  # of the attached branches, ascending
        self._attached: list[Heddle] = []
        self._first = 0  # index of the first attached branch among the parent's children

    def insert(self, number: int, child: Heddle) -> None:
        """Attach a branch's child before the call's children with larger numbers.

        Cost: O(1), unless the caller edits the children meanwhile.
        """
        at = bisect.bisect(self._numbers, number)
        children = child_list(self._parent)
        where = self._insertion_index(children, at)
        if not self._attached:
            self._first = where
        children.insert(where, child)
        self._numbers.insert(at, number)
        self._attached.insert(at, child)

    def _insertion_index(self, children: list[Heddle], at: int) -> int:
        """Return the index in `children` at which to insert a child.

        at: the number of attached children of this call that precede it.
        """
        while at < len(self._attached):
            where, child = self._first + at, self._attached[at]
            if where < len(children) and children[where] is child:
                return where
            moved_to = next((i for i, other in enumerate(children) if other is child), None)
            if moved_to is not None:  # the caller edited the children
                self._first = moved_to - at
                return moved_to
            del self._attached[at], self._numbers[at]  # the caller removed the child
        return len(children)


class PendingBranch:
    """A branch that is being generated: its future child node, and the tokens delivered so far.

    Args:
        index: index of the branch in the call.
        child: the node that receives the tokens; it is attached at the end.
        parent: the node that it continues.
        origin: the parent's place in the token tree when the call started.
        start: the place that the run continues; another than `origin` if the loom has a note.
        watch: detects stop strings and sends events; None if the call needs neither.
        siblings: attaches the call's branches of this parent.
    """

    def __init__(
        self,
        index: int,
        child: Heddle,
        parent: Heddle,
        origin: Place,
        start: Place,
        watch: StopWatcher | None,
        siblings: SiblingOrder,
    ) -> None:
        self.index = index
        self.child = child
        self.stop_ids = frozenset[int]()  # end tokens of its constraint
        self.parent = parent
        self.origin = origin
        self.start = start
        self.watch = watch
        self.siblings = siblings  # shared by the call's branches of this parent
        self.ticket: Ticket | None = None
        self.text: TextStream | None = None
        self.stop: str | None = None  # the stop string in the delivered tokens
        self.n_tokens = 0  # delivered tokens
        self.over = False
        self.attached = False

    def finish(self) -> None:
        """Copy the finished run's result into the child, and attach the child to its parent.

        A second call does nothing.
        """
        assert self.ticket is not None
        if self.over:
            return
        result = self.ticket.value
        child = self.child
        child.stop_string = None if self.watch is None else self.watch.stopped
        child.terminal = result.ended_by is not None and result.ended_by not in self.stop_ids
        child.finish_reason = "stop" if child.stop_string is not None else result.finish_reason
        self.set_result(result)
        self._attach(result.end)

    def set_result(self, result: RunResult) -> None:
        """Copy the tokens and statistics of the finished run into the child."""
        set_run(self.child, result)

    def append(
        self,
        tokens: tuple[int, ...],
        statistics: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]],
        text: str,
    ) -> None:
        """Append new tokens of the run to the child. On Ctrl-C all are appended, or none.

        Args:
            tokens: ids of the model that runs.
            statistics: their logprobs, entropies and legal_logmass.
            text: what they add to the text.
        """
        self.n_tokens += len(tokens)
        lists: tuple[list[Any], ...] = growing_lists(self.child)
        _exhaust(map(_extend, lists, (tokens, *statistics)))

    def new_texts(
        self, events: list[Event]
    ) -> tuple[list[tuple[str, float | None]], FinishReason | None]:
        """Convert new events for a display: ([(text, logprob) of each token], finish reason).

        The finish reason is None until the branch has ended.
        """
        assert self.text is not None
        assert self.ticket is not None
        new = [(self.text.push(e.token), e.logprob) for e in events if e.token is not None]
        if all(event.token is not None for event in events):
            return new, None
        if self.ticket.error is not None:
            return new, "error"
        stopped = self.watch is not None and self.watch.stopped is not None
        return new, "stop" if stopped else self.ticket.value.finish_reason

    @property
    def complete_text(self) -> str:
        """The text so far, without an incomplete character at its end."""
        waits = self.text is not None and self.text.has_partial_char
        return self.child.text.removesuffix("\ufffd") if waits else self.child.text

    def keep(self, reason: FinishReason) -> None:
        """End the branch early: attach its child with the tokens delivered so far.

        A branch without tokens is discarded.

        reason: the finish reason. It is replaced by "stop" if the tokens end with a stop string,
            and by "length" if there are `max_tokens` of them.
        """
        child, params = self.child, self.child.params
        assert params is not None
        child.stop_string = self.stop
        if self.stop is not None:
            reason = "stop"
        elif self.n_tokens >= params.max_tokens:
            reason = "length"
        child.finish_reason = reason
        self._attach(None)

    def _attach(self, end: Place | None) -> None:
        """Attach the child to its parent, unless it was cancelled before its first token.

        end: the place in the token tree after the child's tokens; None: compute it when used.
        """
        self.over = True
        child = self.child
        if not child.tokens and child.finish_reason in ("cancelled", "interrupted"):
            return
        # If the parent changed meanwhile, the child computes its place when it is used. The place
        # after a note is not that of the path.
        is_own = self.start is self.origin and is_place_of(self.parent, self.origin)
        set_place(child, end if is_own else None)
        self.siblings.insert(child.lineage[0], child)
        self.attached = True


class RecodedBranch(PendingBranch):
    """A branch of a model whose vocabulary differs from that of the loom's model.

    The child gets the generated text in the tokens of the loom's model, without statistics. During
    the growth the last word waits, because its tokens can still change.
    """

    _written = ""  # delivered text
    _n_encoded = 0  # its characters that are in the child's tokens

    @property
    def complete_text(self) -> str:
        return self._written

    def append(
        self,
        tokens: tuple[int, ...],
        statistics: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]],
        text: str,
    ) -> None:
        self.n_tokens += len(tokens)
        self._written += text
        new = self._written[self._n_encoded :]
        last_word = _LAST_WORD.search(new)
        if last_word is not None and last_word.start():
            self._encode(new[: last_word.start()])

    def _encode(self, text: str) -> None:
        """Append text to the child, in the tokens of the loom's model."""
        growing_lists(self.child)[0].extend(encode_after(self.parent, text, None))
        self._n_encoded += len(text)

    def set_result(self, result: RunResult) -> None:
        assert self.watch is not None
        text = self.watch.decode(result.tokens)
        lm = lm_of(self.child)
        ids, n_free = encode_after(self.parent, text, None), lm.n_ctx - self.origin.depth
        if len(ids) > n_free:
            self.child.finish_reason, self.child.terminal = "context", False
        set_tokens(self.child, ids[:n_free])

    def keep(self, reason: FinishReason) -> None:
        if rest := self._written[self._n_encoded :]:
            self._encode(rest)
        super().keep(reason)
