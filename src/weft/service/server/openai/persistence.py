"""Saves calls: the prompt and the choices become nodes of a loom.

A prompt continues at the deepest node that it matches, so a conversation adds only its new turns. A
different turn becomes a branch. Clients send answers back as text. The saved tokens are the
generated ones, even if the tokenizer would split the text differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ....errors import NotFound
from ....loom import Heddle, Loom
from ..events import EventLog
from ..growth import Attribution, GrowthTask
from .field_errors import invalid

if TYPE_CHECKING:
    from ...._core.tokens.tokenizer import Tokenizer
    from ....loom.grow import Growth
    from ..open_loom import OpenLoom
    from ..service import Service
    from .request_fields import LoomOptions

Json = dict[str, Any]
ACTOR = "openai"


class SavedCompletion:
    """Saves the choices of one API call as children of a loom's node.

    `begin` stores an empty node per choice, and `end` commits the generated tokens.

    live: the open loom. node: the end of the prompt, to which the choices are added.
    """

    def __init__(self, service: Service, live: OpenLoom, node: Heddle) -> None:
        self.live = live
        self.node = node
        self._service = service
        self._task: GrowthTask | None = None

    async def begin(self, growth: Growth) -> None:
        """Give the nodes of the choices their numbers, before they grow.

        growth: the choices' branches. The caller holds the loom's lock.
        """
        task = GrowthTask(self.live, growth, EventLog(dict), Attribution("grow", ACTOR))
        self.live.register_growth(task)
        self._task = task
        try:
            await self.live.call(lambda: self.live.stored.append(task.nodes))
        except BaseException:
            growth.abandon("cancelled")
            self.live.unregister_growth(task)
            raise

    async def end(self) -> None:
        """Cancel choices that are still running, and commit the generated nodes as one operation.

        The commit ends even if the caller is cancelled.
        """
        commit = self.release()
        if commit is not None:
            await asyncio.shield(commit)

    def release(self) -> asyncio.Task[None] | None:
        """Cancel choices that are still running, and start to commit the generated nodes.

        Returns: the task of the commit; None if it was started before.
        """
        task, self._task = self._task, None
        return None if task is None else self._service.spawn(self._commit(task))

    async def _commit(self, task: GrowthTask) -> None:
        """Commit the nodes of the choices."""
        live = self.live
        async with live.lock:
            task.growth.abandon("cancelled")
            try:
                await live.commit(task.author, [task])
            finally:
                live.unregister_growth(task)

    def to_dict(self, nodes: Sequence[Heddle]) -> Json:
        """Return the loom, the parent, and the numbers of the choices' nodes."""
        stored = self.live.stored
        return {
            "loom": stored.id,
            "name": stored.name,
            "parent": self.live.number(self.node),
            "nodes": [self.live.number(node) for node in nodes],
        }


@asynccontextmanager
async def open_target_node(
    service: Service,
    options: LoomOptions,
    model: str,
    ids: Sequence[int] | None,
    create_loom: Callable[[], Loom],
    user_text: str = "",
    is_exact: bool = False,
) -> AsyncIterator[SavedCompletion]:
    """Open the loom that a call is saved in, at the node that ends with the prompt.

    A node that does not exist is created. The block runs under the loom's lock.
    Yields the `SavedCompletion` to which the choices are added.

    Args:
        options: the request's options: the loom and the parent, if given.
        model: name of the model.
        ids: the prompt's tokens. None means the path of the parent, or the loom's root.
        create_loom: creates a loom from the prompt.
        user_text: the user's last message in the prompt.
        is_exact: the prompt was given as tokens, which must be equal to those of nodes. Otherwise
            different tokens with the same text match, too.

    Raises: RequestError if the prompt does not begin as the loom does; NotFound; ModelMismatch.
    """
    served = await service.models.available(model)
    loom_name = options.loom
    if loom_name is None:
        if options.parent is not None:
            raise invalid("loom.parent", "loom.parent: also send loom.loom, the loom it is in")

        def create() -> Any:
            loom = create_loom()
            loom.meta["model"] = served.source
            return service.looms.library.create(loom)

        stored_loom = await asyncio.to_thread(create)
        loom_name = service.looms.put(stored_loom, served.ready()).stored.id
    async with service.looms.open_locked(loom_name, model=model, grows=True) as live:
        start = _start_node(live, options.parent)
        path_ids = start.get_prefix_tokens()
        prompt = _Prompt(
            path_ids if ids is None else ids, None if is_exact else served.ready().text
        )
        n = prompt.after(path_ids)
        if n is None:
            param = "loom.loom" if options.parent is None else "loom.parent"
            raise invalid(
                param,
                f"{param}: the prompt does not begin with the loom's {len(path_ids)} tokens",
            )
        node, n = prompt.deepest(start, n)
        live.check_not_growing(node)
        if rest := prompt.ids[n:]:
            parent = node

            def add() -> None:
                child = parent.add(rest)
                if user_text:
                    child.meta["said"] = user_text

            node = (await live.change("add", add, ACTOR)).added[-1]
        if not live.stored.has(node):  # an ended node of a job that is still running
            await live.commit_finished()
        yield SavedCompletion(service, live, node)


def _start_node(live: OpenLoom, parent: int | str | None) -> Heddle:
    """Return the node below which the prompt is looked up: the parent, or the root."""
    if parent is None:
        return live.stored.loom
    try:
        return live.node(parent)
    except NotFound as error:
        error.param = "loom.parent"  # type: ignore[attr-defined]
        raise


class _Prompt:
    """A prompt's tokens, to be matched with the paths of nodes.

    text: tokenizer. Different tokens match if they have the same bytes. None: tokens must be equal.

    A position in the prompt is (number of prompt tokens read, bytes that they have beyond the end
    of the node).
    """

    def __init__(self, ids: Sequence[int], text: Tokenizer | None) -> None:
        self.ids = list(ids)
        self._text = text
        self._special = frozenset[int]() if text is None else text.special_ids

    def deepest(self, start: Heddle, n: int) -> tuple[Heddle, int]:
        """Return the deepest node whose path the prompt begins with.

        start: a node whose path has the first `n` tokens of the prompt.
        Returns: the node, and the number of prompt tokens that its path has.
        """
        deepest, n_matched = start, n
        stack = [(start, (n, b""))]
        while stack:
            node, (n, ahead) = stack.pop()
            if n > n_matched and not ahead:
                deepest, n_matched = node, n
            for child in reversed(node.children):
                position = self._advance(child.tokens, n, ahead) if child.tokens else None
                if position is not None:
                    stack.append((child, position))
        return deepest, n_matched

    def after(self, tokens: list[int]) -> int | None:
        """Return the number of prompt tokens that these tokens match; None if the prompt differs.

        tokens: of a path from the root.
        """
        position = self._advance(tokens, 0, b"")
        return None if position is None or position[1] else position[0]

    def _advance(self, tokens: list[int], n: int, ahead: bytes) -> tuple[int, bytes] | None:
        """Match the tokens of a node; return the new position, or None if the prompt differs.

        n, ahead: the position before the node.
        """
        ids, special, text = self.ids, self._special, self._text
        end = n + len(tokens)
        if not ahead and ids[n:end] == tokens:
            return end, b""
        if text is None:
            return None
        for token in tokens:
            if token in special:
                if ahead or ids[n : n + 1] != [token]:
                    return None
                n += 1
                continue
            wanted = text.token_bytes(token)
            while len(ahead) < len(wanted):
                if not wanted.startswith(ahead) or n == len(ids) or ids[n] in special:
                    return None
                ahead += text.token_bytes(ids[n])
                n += 1
            if not ahead.startswith(wanted):
                return None
            ahead = ahead[len(wanted) :]
        return n, ahead


def should_save(options: LoomOptions | None, n_prompts: int) -> bool:
    """Return True if the request wants the choices saved in a loom.

    Raises: RequestError for several prompts, or for contradicting options.
    """
    if options is None or not (
        options.save or options.loom is not None or options.parent is not None
    ):
        return False
    if options.save is False:
        raise invalid("loom.save", "loom.save is false, but loom.loom or loom.parent is given")
    if n_prompts > 1:
        raise invalid("loom", "loom: a call saves only one prompt; send the others separately")
    return True
