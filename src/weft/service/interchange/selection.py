"""A copy of a path, a subtree or the full tree, as a loom of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import ConfigError
from ...loom import Heddle, Loom
from ...loom.loom import Prompt
from ...loom.node import child_list, new_child, preorder_by_call, rebind, set_text
from .scope import Scope


@dataclass(frozen=True, slots=True)
class Selection:
    """A copy of the part of a loom to export; the original may grow meanwhile.

    loom: the root of the copy.
    node: the end of the path, or the top of the subtree, in the copy; the root for a tree.
    scope: the part that was copied.
    numbers: node numbers by id.
    """

    loom: Loom
    node: Heddle
    scope: Scope
    numbers: Mapping[str, int]

    @property
    def top(self) -> Heddle:
        """The node to draw from: the top of a subtree, else the root."""
        return self.node if self.scope is Scope.SUBTREE else self.loom


def select(node: Heddle, scope: Scope, numbers: Mapping[str, int] | None = None) -> Selection:
    """Copy a part of a node's loom. The copied nodes keep their ids.

    Args:
        node: the end of the path, or the top of the subtree; any node for a tree.
        scope: the part.
        numbers: node numbers by id, which give the order of children. None: the nodes are numbered
            in the order in which they were generated.

    Raises: ConfigError for a node that is in no loom.

    Cost: O(nodes in the loom).
    """
    path = node.path
    loom = path[0]
    if not isinstance(loom, Loom):
        raise ConfigError("this node was taken out of its loom; export what is in one")
    if numbers is None:
        numbers = {each.id: at for at, each in enumerate(preorder_by_call(loom))}
    node = loom if scope is Scope.TREE else node
    kept = {above.id: below for above, below in zip(path, path[1:], strict=False)}
    copied = _root(loom)
    stack: list[tuple[Heddle, Heddle]] = [(loom, copied)]
    selected: Heddle = copied
    while stack:
        source, target = stack.pop()
        selected = target if source is node else selected
        if scope is not Scope.TREE and source.id in kept and source is not node:
            below = [kept[source.id]]
        else:
            below = [] if scope is Scope.PATH else _in_order(source, numbers)
        for child in below:
            new = new_child(target, child.tokens)
            _fill(new, child)
            child_list(target).append(new)
            stack.append((child, new))
    return Selection(copied, selected, scope, numbers)


def _in_order(node: Heddle, numbers: Mapping[str, int]) -> list[Heddle]:
    return sorted(node.children, key=lambda child: numbers.get(child.id, len(numbers)))


def _root(loom: Loom) -> Loom:
    prompt = Prompt(loom.tokens, loom.user_prompt, loom.chat_template_used)
    copied = type(loom).restored(rebind(loom), prompt, loom.heddle_class)
    copied.created = loom.created
    if loom.lm is None:
        copied.saved_by = loom.saved_by
    _fill(copied, loom)
    return copied


def _fill(new: Heddle, old: Heddle) -> None:
    new.id, new.meta = old.id, dict(old.meta)
    new.logprobs, new.entropies = list(old.logprobs), list(old.entropies)
    new.legal_logmass = list(old.legal_logmass)
    new.params, new.lineage = old.params, old.lineage
    new.finish_reason, new.stop_string = old.finish_reason, old.stop_string
    new.terminal, new.score = old.terminal, old.score
    set_text(new, old.text)
