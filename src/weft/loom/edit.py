"""Edits of a reasoning tree. Whatever changes before a node resets its place, never its tokens.

Ctrl-C waits for the end of an edit: it is done whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, cast

from ..checks import whole_number
from ..errors import ConfigError, TreeError
from ..sched.driver import deferred_interrupt
from . import walk

if TYPE_CHECKING:
    from .heddle import Heddle
    from .node import Node


def token_ids(given: Sequence[int]) -> list[int]:
    """Return the ids as a new list of ints; ConfigError for what is no whole number."""
    try:
        return [index(token) for token in given]
    except TypeError as error:
        raise ConfigError(f"token ids are whole numbers; {error}") from error


def forget_places(top: Node) -> None:
    """Reset the places from here down: the context before them has changed. Cost: O(nodes)."""
    for node in walk.preorder(top):
        node._place = None


def forget_end(node: Node) -> None:
    """The node no longer ends where it ended: what was said of its end goes."""
    node.finish_reason = None
    node.stop_string = None
    node.terminal = False
    node.score = None


@deferred_interrupt()
def replace(node: Node, given: Sequence[int]) -> None:
    """Give the node other tokens. Nothing has changed if they are refused."""
    lm, new = node._home.live_lm(), token_ids(given)
    # Refuses what is no token or does not fit, before anything changes.
    lm.place(new, after=None if node.parent is None else node.parent._where())
    node._tokens = new
    node._text = None
    node.logprobs, node.entropies = [], []
    node.params, node.lineage = None, ()
    forget_end(node)
    forget_places(node)


@deferred_interrupt()
def clip(node: Node, limit: int) -> None:
    """Keep the first `limit` tokens; negative counts from the end and stops at none."""
    limit = whole_number("the token limit", limit)
    length = len(node._tokens)
    keep = max(0, length + limit) if limit < 0 else limit
    if length <= keep:
        return
    node._home.text_lm()
    drop_children(node)
    _cut(node, keep)
    forget_end(node)


def _cut(node: Node, keep: int) -> None:
    if node._place is not None:
        node._place = node._place.at(node._place.depth - len(node._tokens) + keep)
    del node._tokens[keep:], node.logprobs[keep:], node.entropies[keep:]
    node._text = None


@deferred_interrupt()
def drop_children(node: Node) -> None:
    """Detach every child."""
    for child in list(node.children):
        detach(child)


@deferred_interrupt()
def detach(node: Node) -> None:
    """Take a node out of its parent's children; its path is then itself. Cost: O(nodes below)."""
    if node.parent is not None:
        siblings = node.parent.children
        del siblings[next(i for i, each in enumerate(siblings) if each is node)]
    node._parent = None
    forget_places(node)


@deferred_interrupt()
def adopt(parent: Node, child: Heddle) -> None:
    """Make `child` the last child of `parent`, wherever it was before."""
    if walk.is_below(parent, child):
        raise TreeError("a node cannot become a child of itself or of a node below it")
    if child._is_root:
        raise TreeError("a loom is a root and cannot become a child; add its children, or its text")
    if child._home.lm is not parent._home.lm:
        raise TreeError("the node belongs to another model; add its text instead: add(node.text)")
    if child.parent is not None and any(each is child for each in child.parent.children):
        detach(child)
    for node in walk.preorder(child):
        node._home, node._place = parent._home, None
    child._parent = cast("Heddle", parent)
    parent.children.append(child)


@deferred_interrupt()
def split(node: Node, at: int) -> Heddle:
    """Cut before token `at`; see Node.split."""
    length = len(node._tokens)
    cut = at + length if at < 0 else at
    if not 0 < cut < length:
        allowed = f"1 to {length - 1}, or negative from the end" if length > 1 else "no split"
        raise ConfigError(f"cannot split before token {at!r} of {length}; allowed is {allowed}")
    node._home.text_lm()
    lower = cast("Heddle", node)._child(node._tokens[cut:])
    lower.logprobs, lower.entropies = node.logprobs[cut:], node.entropies[cut:]
    lower.params, lower.lineage = node.params, node.lineage
    lower.finish_reason, lower.stop_string = node.finish_reason, node.stop_string
    lower.terminal, lower.score = node.terminal, node.score
    lower._place = node._place
    lower._children, moved = node.children, node.children
    for child in moved:
        child._parent = lower
    node._children = [lower]
    _cut(node, cut)
    forget_end(node)
    return lower
