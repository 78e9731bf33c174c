"""Growing as a job: one call over some nodes of a loom, or a search below one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import Any

from ..._core.atomic_files import json_number
from ..._core.sampling.params import SamplingParams
from ...constraints import from_dict
from ...errors import ConfigError, Conflict, ContextOverflow, Terminal
from ...lm.lm import LM
from ...loom import Heddle, Loom
from ...loom.grow import check_not_terminal, is_quick, plan
from ...search.core import Cost, Grow, Level, SearchResult
from ...search.strategies import STRATEGIES
from ..api.jobs import StartRun, TokenUsage
from ..api.nodes import GrowFields
from ..api.sampling import SamplingFields
from ..store.wire import search_object
from .config import ServerLimits
from .growth import Attribution, GrowthTask
from .jobs import ServerJob
from .limits import check_limit
from .open_loom import OpenLoom
from .service import Service, exit_callback

Pick = Callable[[OpenLoom], Sequence[Heddle]]


def resolve_params(
    fields: SamplingFields, n: int, defaults: SamplingParams, limits: ServerLimits
) -> SamplingParams:
    """Return sampling parameters as a request asks for them, within the server's limits.

    Raises: Refused, ConfigError, GrammarError.
    """
    given = fields.sampling()
    check_limit("max_tokens", given.get("max_tokens", 1), limits.tokens, "max_tokens_too_large")
    check_limit("n", n, limits.n, "n_too_large")
    if (asked := fields.constraint()) is not None:
        given["constraint"] = from_dict(asked)
    if "max_tokens" not in given:
        given["max_tokens"] = min(defaults.max_tokens, limits.tokens)
    return SamplingParams.resolve({**given, "n": n}, defaults)


async def start_growth(
    service: Service, loom: str, asked: GrowFields, pick: Pick, actor: str
) -> tuple[ServerJob, list[int]]:
    """Begin to grow nodes of a loom; return the job and the numbers of nodes left alone.

    pick: which nodes. Raises: what the call would, and nothing has begun.
    """
    service.check_accepting()
    with ExitStack() as stack:
        async with service.looms.open_locked(loom, model=asked.model, grows=True) as live:
            assert live.lm is not None
            model = service.models.name_of(live.lm)
            job = ServerJob("grow", live.kept.id, model, notify=live.notify)
            lm = stack.enter_context(service.work("grow", job.model, lambda: interrupt(job)))
            defaults = live.kept.loom.default_sampling
            params = resolve_params(asked, asked.n, defaults, service.config.limits)
            nodes = list(pick(live))
            check_limit("branches", asked.n * len(nodes), service.config.limits.branches)
            for node in nodes:
                live.check_not_growing(node)
            if not all(map(live.kept.has, nodes)):  # it has ended in a job that goes on
                await live.commit_finished()
            if len(nodes) == 1 and not asked.force:
                check_not_terminal(nodes[0], '"force": true')
            check_context_room(lm, nodes)
            branches = await plan_growth(
                live, job, nodes, params, actor, force=asked.force, first=asked.first_branch
            )
        stack.callback(live.end, branches)
        await live.number_new(branches)
        stack.callback(live.jobs.remove, job)
        live.jobs.append(job)
        job.add_growth(branches)
        skipped = [live.number(node) for node in branches.growth.skipped]
        job.seed = branches.growth.branches[0].child.params.seed  # type: ignore[union-attr]
        service.jobs.add(job)
        job.start(_grow_to_end(service, live, job, branches), exit_callback(stack.pop_all()))
    return job, skipped


def check_context_room(lm: LM, nodes: Sequence[Heddle]) -> None:
    """Raise ContextOverflow where no node has room for a token: its branches would be empty."""
    depths = [node.place.depth for node in nodes]
    if depths and min(depths) >= lm.n_ctx:
        raise ContextOverflow(
            f"the path has {min(depths)} tokens, and the model holds {lm.n_ctx}",
            n_tokens=min(depths),
            n_ctx=lm.n_ctx,
            hint="shorten the prompt, clip the path, or load the model with a larger n_ctx",
        )


def interrupt(job: ServerJob) -> None:
    """End a job because the server stops."""
    job.cancel(reason="interrupted")


async def plan_growth(
    live: OpenLoom,
    job: ServerJob,
    nodes: Sequence[Heddle],
    params: SamplingParams,
    actor: str,
    *,
    force: bool = False,
    first: int = 0,
) -> GrowthTask:
    """Plan branches, which are noted as growing from now on. The caller holds the lock.

    first: the number of the first one in the call, which its random numbers depend on.
    Raises: Terminal where there is nothing to grow.
    """
    nodes = list(nodes)
    if not nodes:  # all leaves were asked for, and all have ended
        raise _all_ended()
    begin = partial(plan, nodes, params, force=force, streamed=True, first=first)
    # A thread's turn comes after the model's: where others grow, that takes longer than a few.
    growth = begin() if is_quick(nodes, params) else await live.call(begin)
    if not growth.branches:
        raise _all_ended()
    author = Attribution(job.kind, actor, job.id, job.model)
    branches = GrowthTask(live, growth, job.events, author, job.first_branch)
    live.begin(branches)
    return branches


def _all_ended() -> Terminal:
    return Terminal(
        'all of these nodes have ended. Grow them anyway with "force": true, or add text to one',
        hint='"force": true',
    )


async def _grow_to_end(
    service: Service, live: OpenLoom, job: ServerJob, branches: GrowthTask
) -> None:
    try:
        await branches.run()
    finally:
        job.usage = usage_of(job)
        await live.commit_growth(branches)
        service.metrics.observe_first(job.model, branches.first_token_s)


def usage_of(job: ServerJob) -> TokenUsage:
    """Return what a job has read and written. A prompt that branches share is read once."""
    prompts: dict[str, int] = {}
    cached: dict[str, int] = {}
    for branches in job.branches:
        for pending in branches.growth.branches:
            prompts[pending.parent.id] = pending.origin.depth
            reused = None if pending.ticket is None else pending.ticket.reused
            if reused is not None:  # the first of a prompt's branches computes it for all
                cached[pending.parent.id] = min(reused, cached.get(pending.parent.id, reused))
    written = sum(each.n_tokens for each in job.branches)
    return TokenUsage(
        prompt_tokens=sum(prompts.values()),
        completion_tokens=written,
        cached_tokens=sum(cached.values()) if cached else None,
    )


# Searches -------------------------------------------------------------------------------------


async def start_run(service: Service, loom: str, asked: StartRun, actor: str) -> ServerJob:
    """Begin to search below a node. Raises: ConfigError for a wrong strategy or number."""
    service.check_accepting()
    if asked.strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy is {asked.strategy!r:.80}; allowed are {', '.join(STRATEGIES)}"
        )
    with ExitStack() as stack:
        async with service.looms.open_locked(loom, model=asked.model, grows=True) as live:
            assert live.lm is not None
            model = service.models.name_of(live.lm)
            job = ServerJob("run", live.kept.id, model, notify=live.notify)
            job.request = asked.model_dump(mode="json", exclude_none=True, exclude=_HOW)
            lm = stack.enter_context(service.work("run", job.model, lambda: interrupt(job)))
            limits = service.config.limits
            for name in ("breadth", "n"):
                check_limit(name, getattr(asked, name) or 1, limits.n)
            node = live.node(asked.node)
            live.check_nothing_grows(node)
            run = SearchTask(service, live, job, asked)
            await run.begin(lm, node, actor)
            service.jobs.add(job)
            told = {"job": job.id, "loom": live.kept.id, "model": job.model}
            stack.callback(live.jobs.remove, job)
            live.jobs.append(job)
            job.events.put(
                "job", {**told, "strategy": asked.strategy, "asked": job.request, "branches": []}
            )
            job.start(run.run(lm, actor), exit_callback(stack.pop_all()))
    return job


_HOW = {"stream", "wait", "on_disconnect"}  # it is answered, not searched


class SearchTask:
    """A search in a live loom: its branches are told as those of any growth, its rounds, too."""

    def __init__(self, service: Service, live: OpenLoom, job: ServerJob, asked: StartRun) -> None:
        self.service = service
        self.live = live
        self.job = job
        self.asked = asked
        self._steps: Any = None
        self._levels: list[Level] = []  # yet to be told
        self._cost: Cost | None = None  # told last
        self._has_asked = False  # of the model, beside what is grown here
        self._grown: list[GrowthTask] = []  # yet to be kept

    async def begin(self, lm: LM, node: Heddle, actor: str) -> None:
        """Check what was asked. The caller holds the lock. Raises: ConfigError, Refused."""
        asked = self.asked
        given = asked.sampling()
        check_limit("max_tokens", given.get("max_tokens", 1), self.service.config.limits.tokens)
        for name in ("answer_tokens", "budget_tokens", "budget_s", "budget_kv_bytes"):
            if (value := getattr(asked, name)) is not None:
                given[name] = value
        if (constraint := asked.constraint()) is not None:
            given["constraint"] = from_dict(constraint)
        strategy = STRATEGIES[asked.strategy]
        options = strategy.options(asked.breadth, asked.n, **given)
        # Nothing is checked before the first step, which asks for work or ends.
        self._steps = strategy.steps(lm, node, progress=self._levels.append, **options)
        self._work = self._next(None)
        await self._keep(actor)

    def _next(self, given: Any) -> Any:
        try:
            return self._steps.send(given)
        except StopIteration as end:
            return end.value

    async def run(self, lm: LM, actor: str) -> None:
        """Search; what was made is kept, however it ends."""
        work = self._work
        try:
            with closing(self._steps):
                while not isinstance(work, SearchResult):
                    if isinstance(work, Grow):
                        found = await self._grow(lm, work, actor)
                    else:
                        found = await self._ask(work)
                    async with self.live.lock:
                        if isinstance(work, Grow):
                            self._check_not_removed([*work.rows, *found])
                        work = self._next(found)
                        # What it has added by itself has no number yet, and is nobody else's.
                        await self._keep(actor)
                        self._publish_rounds()
            self._cost = work.cost
            name = self.live.kept.name
            answer = work.text.strip().rpartition("\n")[2]
            told = search_object(
                self.asked.strategy,
                work,
                answer,
                name,
                model=self.job.model or "",
                engine=lm.info.name,
                stats=lm.stats(),
            )
            self.job.result = {**told, "best": self.live.number(work.best)}
        finally:
            self.job.usage = self._usage()
            async with self.live.lock:
                try:
                    await self._keep(actor)
                finally:
                    self._release_growth()
                if self.job.result is not None:
                    self.job.result["best"] = self.live.number(work.best)

    async def _keep(self, actor: str) -> None:
        """Keep what the search has made, and that only. The caller holds the lock."""
        author = Attribution("run", actor, self.job.id, self.job.model)
        await self.live.keep(author, self._grown)
        self._release_growth()

    def _release_growth(self) -> None:
        for branches in self._grown:
            self.live.end(branches)
        self._grown = []

    async def _ask(self, work: Any) -> Any:
        """Let the search do work of its own: proposals, questions."""
        self._has_asked = True
        return await work.arun()

    async def _grow(self, lm: LM, work: Grow, actor: str) -> list[Heddle]:
        """Grow a round's rows, told as they grow; as `Heddle.grow` would."""
        live, rows = self.live, list(work.rows)
        self._check_not_removed(rows)
        if any(row.path[0] is not live.kept.loom for row in rows):  # questions, in their own looms
            result: list[Heddle] = await self._ask(work)
            return result
        params = work.params(lm)
        async with live.lock:
            if all(node.terminal for node in rows):
                return []
            branches = await plan_growth(live, self.job, rows, params, actor)
            self._grown.append(branches)
        await live.number_new(branches)
        self.job.add_growth(branches)
        await branches.run(work.is_over)
        return [pending.child for pending in branches.growth.branches if pending.attached]

    def _check_not_removed(self, nodes: Sequence[Heddle]) -> None:
        """Raise Conflict for nodes that somebody has removed: nothing below them would be kept."""
        if not all(isinstance(node.path[0], Loom) for node in nodes):
            raise Conflict(
                "what the search stood on was removed from the loom meanwhile",
                rev=self.live.kept.rev,
                code="node_removed",
                hint="undo brings it back; search again below it",
            )

    def _usage(self) -> TokenUsage:
        """Return what was read and written: proposals, questions and their answers, too."""
        usage = usage_of(self.job)
        if self._cost is not None:
            usage.prompt_tokens += self._cost.prompt_tokens
            usage.completion_tokens = max(usage.completion_tokens, self._cost.tokens)
        if self._has_asked:  # nobody knows how much of that was there
            usage.cached_tokens = None
        return usage

    def _publish_rounds(self) -> None:
        """Tell of the rounds that are over: their nodes are kept. The caller holds the lock."""
        levels, self._levels[:] = list(self._levels), []
        number = self.live.number
        for level in levels:
            self._cost = level.cost
            self.job.progress = {"round": level.depth, **asdict(level.cost)}
            told = {
                "round": level.depth,
                "candidates": [
                    {
                        "node": number(node),
                        "score": None if node.score is None else json_number(node.score),
                        "by": node.meta.get("by"),
                    }
                    for node in level.candidates
                ],
                "kept": [number(node) for node in level.kept],
                "cost": asdict(level.cost),
            }
            self.job.rounds.append(told)
            self.job.events.put("score", told)
