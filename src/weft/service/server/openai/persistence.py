"""Answers that are kept: the prompt and the choices of a call become nodes of a loom.

A prompt goes on where a kept loom has it already: of a conversation only what is new is added, and
where it takes another turn the loom branches. Clients send an answer back as text. Its tokens are
those that were drawn, also where the tokenizer would cut the text into others.
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
    """Where a call's choices are kept. node: what they go on from."""

    def __init__(self, service: Service, live: OpenLoom, node: Heddle) -> None:
        self.live = live
        self.node = node
        self._service = service
        self._branches: GrowthTask | None = None

    async def begin(self, growth: Growth) -> None:
        """Give the choices their numbers, before they grow. The loom's lock is held."""
        branches = GrowthTask(self.live, growth, EventLog(dict), Attribution("grow", ACTOR))
        self.live.begin(branches)
        self._branches = branches
        try:
            await self.live.call(lambda: self.live.kept.append(branches.nodes))
        except BaseException:
            growth.abandon("cancelled")
            self.live.end(branches)
            raise

    async def end(self) -> None:
        """Keep what has grown, as one operation; also where the caller is cancelled meanwhile."""
        ending = self.release()
        if ending is not None:
            await asyncio.shield(ending)

    def release(self) -> asyncio.Task[None] | None:
        """Begin to keep what has grown; None where that has begun, or there is nothing."""
        branches, self._branches = self._branches, None
        return None if branches is None else self._service.spawn(self._commit(branches))

    async def _commit(self, branches: GrowthTask) -> None:
        live = self.live
        async with live.lock:
            branches.growth.abandon("cancelled")
            try:
                await live.keep(branches.author, [branches])
            finally:
                live.end(branches)

    def told(self, nodes: Sequence[Heddle]) -> Json:
        """Return what is told of it: the loom, and the numbers of the choices' nodes."""
        kept = self.live.kept
        return {
            "loom": kept.id,
            "name": kept.name,
            "parent": self.live.number(self.node),
            "nodes": [self.live.number(node) for node in nodes],
        }


@asynccontextmanager
async def open_target_node(
    service: Service,
    asked: LoomOptions,
    model: str,
    ids: Sequence[int] | None,
    make: Callable[[], Loom],
    said: str = "",
    is_exact: bool = False,
) -> AsyncIterator[SavedCompletion]:
    """Find or make the node that a prompt ends in; its loom's lock is held until the block ends.

    ids: the prompt's; None for the path of the parent, or the loom's root. make: a loom of it.
    said: what of it a person said last. is_exact: it was given as tokens; else others of the same
    text will do.
    Raises: Refused where the prompt does not begin as the loom does; NotFound; ModelMismatch.
    """
    served = await service.models.available(model)
    given = asked.loom
    if given is None:
        if asked.parent is not None:
            raise invalid("loom.parent", "loom.parent: say in which loom, by loom.loom")

        def kept() -> Any:
            loom = make()
            loom.meta["model"] = served.source
            return service.looms.library.create(loom)

        made = await asyncio.to_thread(kept)
        given = service.looms.put(made, served.ready()).kept.id
    async with service.looms.open_locked(given, model=model, grows=True) as live:
        start = _start(live, asked.parent)
        before = start.get_prefix_tokens()
        prompt = _Prompt(before if ids is None else ids, None if is_exact else served.ready().text)
        n = prompt.after(before)
        if n is None:
            which = "loom.loom" if asked.parent is None else "loom.parent"
            raise invalid(
                which,
                f"{which}: the prompt does not begin with the {len(before)} tokens that are there",
            )
        node, n = prompt.deepest(start, n)
        live.check_not_growing(node)
        if rest := prompt.ids[n:]:
            parent = node

            def add() -> None:
                child = parent.add(rest)
                if said:
                    child.meta["said"] = said

            node = (await live.change("add", add, ACTOR)).added[-1]
        if not live.kept.has(node):  # it has ended in a job that goes on
            await live.commit_finished()
        yield SavedCompletion(service, live, node)


def _start(live: OpenLoom, parent: str | None) -> Heddle:
    if parent is None:
        return live.kept.loom
    try:
        return live.node(parent)
    except NotFound as error:
        error.param = "loom.parent"  # type: ignore[attr-defined]
        raise


class _Prompt:
    """A prompt's tokens, and where nodes stand in them.

    text: by which tokens are the same where they write the same bytes; None: they never are.
    A place is how many tokens lie before it, and what they have written beyond a node's own.
    """

    def __init__(self, ids: Sequence[int], text: Tokenizer | None) -> None:
        self.ids = list(ids)
        self._text = text
        self._special = frozenset[int]() if text is None else text.special_ids

    def deepest(self, start: Heddle, n: int) -> tuple[Heddle, int]:
        """Return the node furthest down whose path the prompt begins with, and how far that is.

        n: where the path of `start` ends in the prompt.
        """
        best, most = start, n
        stack = [(start, (n, b""))]
        while stack:
            node, (n, ahead) = stack.pop()
            if n > most and not ahead:
                best, most = node, n
            for child in reversed(node.children):
                place = self._after(child.tokens, n, ahead) if child.tokens else None
                if place is not None:
                    stack.append((child, place))
        return best, most

    def after(self, tokens: list[int]) -> int | None:
        """Return where in the prompt these tokens end; None where it does not begin with them."""
        place = self._after(tokens, 0, b"")
        return None if place is None or place[1] else place[0]

    def _after(self, tokens: list[int], n: int, ahead: bytes) -> tuple[int, bytes] | None:
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


def should_save(asked: LoomOptions | None, n_prompts: int) -> bool:
    """Say whether a call's answers are kept. Raises: Refused for several prompts."""
    if asked is None or not (asked.save or asked.loom is not None or asked.parent is not None):
        return False
    if asked.save is False:
        raise invalid("loom.save", "loom.save is false, and a loom is named to keep it in")
    if n_prompts > 1:
        raise invalid("loom", "loom: one prompt is kept by a call; send the others apart")
    return True
