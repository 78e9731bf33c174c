"""Starts jobs that grow nodes of a loom or search below them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ..._core.atomic_files import json_number
from ..._core.sampling.params import SamplingParams
from ...constraints import from_dict
from ...errors import ConfigError, Conflict, ContextOverflow, Terminal
from ...lm.lm import LM
from ...loom import Heddle, Loom
from ...loom.grow import OtherModel, check_not_terminal, is_quick, plan
from ...search.core import Cost, Grow, Level, SearchResult
from ...search.strategies import STRATEGIES
from ..api.jobs import StartRun, TokenUsage
from ..api.nodes import GrowFields
from ..api.sampling import SamplingFields
from ..store.json_output import search_object
from .config import ServerLimits
from .growth import Attribution, GrowthTask
from .jobs import ServerJob
from .limits import check_limit
from .open_loom import OpenLoom
from .other_model import context_for
from .service import Service, exit_callback

Pick = Callable[[OpenLoom], Sequence[Heddle]]


def resolve_params(
    fields: SamplingFields, n: int, defaults: SamplingParams, limits: ServerLimits
) -> SamplingParams:
    """Return a request's sampling parameters, after checking the server's limits.

    n: number of branches per node. defaults: values of fields that the request leaves out.
    Raises: RequestError, ConfigError, GrammarError.
    """
    given = fields.sampling()
    check_limit("max_tokens", given.get("max_tokens", 1), limits.tokens, "max_tokens_too_large")
    check_limit("n", n, limits.n, "n_too_large")
    if (constraint := fields.constraint()) is not None:
        given["constraint"] = from_dict(constraint)
    if "max_tokens" not in given:
        given["max_tokens"] = min(defaults.max_tokens, limits.tokens)
    return SamplingParams.resolve({**given, "n": n}, defaults)


async def start_growth(
    service: Service, loom: str, request: GrowFields, pick: Pick, actor: str
) -> tuple[ServerJob, list[int]]:
    """Start to generate branches of nodes of a loom, as a job.

    Args:
        loom: its name or id.
        pick: called with the open loom; returns the nodes.
        actor: who started the job, for the loom's log.

    Returns: the job, and the numbers of nodes that were skipped because they have ended.
    Raises: the errors of `Heddle.grow`; nothing has started then.
    """
    service.check_accepting()
    with ExitStack() as stack:
        opened_with, others = await _models_of(service, loom, request)
        async with service.looms.open_locked(loom, model=opened_with, grows=True) as live:
            assert live.lm is not None
            own = service.models.name_of(live.lm)
            names = others or [own]
            job = ServerJob(
                "grow", live.stored.id, names[0] if len(names) == 1 else None, notify=live.notify
            )
            for name in names:
                stack.enter_context(service.work("grow", name, lambda: interrupt(job)))
            nodes = list(pick(live))
            for node in nodes:
                live.check_not_growing(node)
            if not all(map(live.stored.has, nodes)):  # an ended node of a job that is still running
                await live.commit_finished()
            if len(nodes) == 1 and not request.force:
                check_not_terminal(nodes[0], '"force": true')
            tasks: list[GrowthTask] = []
            for name in names:
                task = await _plan_for_model(service, live, job, request, nodes, name, actor, tasks)
                stack.callback(live.unregister_growth, task)
                tasks.append(task)
        try:
            await asyncio.gather(*map(live.number_new, tasks))
        except BaseException:
            for task in tasks:
                task.growth.abandon("cancelled")
            raise
        stack.callback(live.jobs.remove, job)
        live.jobs.append(job)
        for task in tasks:
            job.add_growth(task)
        skipped = [live.number(node) for node in tasks[0].growth.skipped]
        job.seed = tasks[0].growth.branches[0].child.params.seed  # type: ignore[union-attr]
        service.jobs.add(job)
        job.start(_grow_to_end(service, live, job, tasks), exit_callback(stack.pop_all()))
    return job, skipped


async def _models_of(
    service: Service, loom: str, request: GrowFields
) -> tuple[str | None, list[str]]:
    """Return the model to open a loom with, and the models that grow it.

    The first is None for the loom's own model. The list is empty if the model that opens the loom
    grows it. If the loom's own model is not loaded, a single given model opens the loom.
    """
    names = request.models or ([] if request.model is None else [request.model])
    if not names:
        return None, []
    for name in names:
        (await service.models.available(name)).ready()
    own = service.looms.model_of(await service.looms.row(loom))
    if len(names) == 1 and (own is None or own.name == names[0] or own.state == "failed"):
        return names[0], []
    return None, names


async def _plan_for_model(
    service: Service,
    live: OpenLoom,
    job: ServerJob,
    request: GrowFields,
    nodes: Sequence[Heddle],
    name: str,
    actor: str,
    earlier: Sequence[GrowthTask],
) -> GrowthTask:
    """Plan the branches of one model and register them as growing. The caller holds the lock.

    earlier: the job's growth tasks so far.
    Raises: the errors of `Heddle.grow`; ContextOverflow. `earlier` is abandoned then.
    """
    loom, lm = live.stored.loom, service.models.lm(name)
    is_own = lm is live.lm
    try:
        defaults = lm.chat_defaults if loom.chat_template_used else lm.defaults
        params = resolve_params(request, request.n, defaults, service.config.limits)
        if earlier:  # the same seed for all models
            before = earlier[0].growth.branches[0].child.params
            assert before is not None
            params = replace(params, seed=before.seed)
        n_branches = request.n * len(nodes) * (len(earlier) + 1)
        check_limit("branches", n_branches, service.config.limits.branches)
        other = None
        if is_own:
            check_context_room(lm, nodes)
        else:
            contexts = await live.call(lambda: [context_for(node, lm) for node in nodes])
            other = OtherModel(lm, name, contexts, [task.growth for task in earlier])
            _check_room(lm, [len(ids) for ids in contexts])
        index = sum(len(task.growth.branches) for task in earlier)
        first = request.first_branch + index
        return await plan_growth(
            live, job, nodes, params, actor,
            force=request.force, first=first, other=other, index=index,
        )  # fmt: skip
    except BaseException:
        for task in earlier:
            task.growth.abandon("cancelled")
        raise


def check_context_room(lm: LM, nodes: Sequence[Heddle]) -> None:
    """Raise ContextOverflow if none of the nodes has room in the context for another token."""
    _check_room(lm, [node.place.depth for node in nodes])


def _check_room(lm: LM, depths: Sequence[int]) -> None:
    """Raise ContextOverflow if no path of these lengths has room for another token."""
    if depths and min(depths) >= lm.n_ctx:
        raise ContextOverflow(
            f"the path has {min(depths)} tokens; the model's context is {lm.n_ctx}",
            n_tokens=min(depths),
            n_ctx=lm.n_ctx,
            hint="shorten the prompt, clip the path, or load the model with a larger n_ctx",
        )


def interrupt(job: ServerJob) -> None:
    """Cancel a job when the server stops; its branches get the finish reason "interrupted"."""
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
    other: OtherModel | None = None,
    index: int | None = None,
) -> GrowthTask:
    """Plan branches and register them as growing. The caller holds the lock.

    Args:
        job: the job that the branches belong to; its event log gets their events.
        nodes: the parents of the branches.
        params: sampling parameters; `params.n` branches per node.
        actor: who started the job, for the loom's log.
        force: also grow from nodes that have ended; otherwise these are skipped.
        first: number of the first branch, from which its random numbers are derived.
        other: the model that grows the nodes; None: the loom's own.
        index: the job's index of the first branch; None: after the job's growths so far.

    Raises: Terminal if all nodes have ended.
    """
    nodes = list(nodes)
    if not nodes:  # all leaves were requested, and all have ended
        raise _all_ended_error()
    plan_branches = partial(
        plan, nodes, params, force=force, streamed=True, first=first, other=other
    )
    # A thread competes with the model's; planning a few branches inline is faster.
    growth = plan_branches() if is_quick(nodes, params) else await live.call(plan_branches)
    if not growth.branches:
        raise _all_ended_error()
    model = job.model if other is None else other.name
    author = Attribution(job.kind, actor, job.id, model)
    task = GrowthTask(
        live, growth, job.events, author, job.first_branch if index is None else index
    )
    live.register_growth(task)
    return task


def _all_ended_error() -> Terminal:
    """Return the error for a growth of nodes that have all ended."""
    return Terminal(
        'all of these nodes have ended; grow them anyway with "force": true, or add text to one',
        hint='"force": true',
    )


async def _grow_to_end(
    service: Service, live: OpenLoom, job: ServerJob, tasks: Sequence[GrowthTask]
) -> None:
    """Run the growth tasks of a job at the same time and commit their nodes; the work of a job."""
    runs = [asyncio.create_task(task.run()) for task in tasks]
    try:
        await asyncio.wait(runs)
    finally:
        for run in runs:
            run.cancel()
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
        job.usage = usage_of(job)
        for task in tasks:
            await live.commit_growth(task)
            service.metrics.observe_first(task.author.model, task.first_token_s)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


def usage_of(job: ServerJob) -> TokenUsage:
    """Return a job's token counts, with those of an author's note.

    A prompt that several branches share counts once.
    """
    prompts: dict[tuple[str, str | None], int] = {}
    cached: dict[tuple[str, str | None], int] = {}
    for task in job.growth_tasks:
        for pending in task.growth.branches:
            key = pending.parent.id, task.author.model
            prompts[key] = pending.start.depth
            reused = None if pending.ticket is None else pending.ticket.reused
            if reused is not None:  # only the first branch of a prompt computes it
                cached[key] = min(reused, cached.get(key, reused))
    written = sum(task.n_tokens for task in job.growth_tasks)
    return TokenUsage(
        prompt_tokens=sum(prompts.values()),
        completion_tokens=written,
        cached_tokens=sum(cached.values()) if cached else None,
    )


# Searches -------------------------------------------------------------------------------------


async def start_run(service: Service, loom: str, request: StartRun, actor: str) -> ServerJob:
    """Start a search below a node, as a job, and return the job.

    loom: its name or id. actor: who started the search, for the loom's log.
    Raises: ConfigError for an unknown strategy or an invalid number.
    """
    service.check_accepting()
    if request.strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy is {request.strategy!r:.80}; allowed are {', '.join(STRATEGIES)}"
        )
    with ExitStack() as stack:
        async with service.looms.open_locked(loom, model=request.model, grows=True) as live:
            assert live.lm is not None
            model = service.models.name_of(live.lm)
            job = ServerJob("run", live.stored.id, model, notify=live.notify)
            job.request = request.model_dump(mode="json", exclude_none=True, exclude=_DELIVERY)
            lm = stack.enter_context(service.work("run", job.model, lambda: interrupt(job)))
            limits = service.config.limits
            for name in ("breadth", "n"):
                check_limit(name, getattr(request, name) or 1, limits.n)
            node = live.node(request.node)
            live.check_nothing_grows(node)
            search = SearchTask(service, live, job, request)
            await search.begin(lm, node, actor)
            service.jobs.add(job)
            header = {"job": job.id, "loom": live.stored.id, "model": job.model}
            stack.callback(live.jobs.remove, job)
            live.jobs.append(job)
            job.events.put(
                "job",
                {**header, "strategy": request.strategy, "asked": job.request, "branches": []},
            )
            job.start(search.run(lm, actor), exit_callback(stack.pop_all()))
    return job


_DELIVERY = {"stream", "wait", "on_disconnect"}  # how the result is returned


_SEARCH_OPTIONS = (
    "answer", "judge", "check", "answer_tokens", "budget_tokens", "budget_s", "budget_kv_bytes",
)  # fmt: skip


class SearchTask:
    """A search in an open loom. Its branches and rounds are published as events of its job."""

    def __init__(self, service: Service, live: OpenLoom, job: ServerJob, request: StartRun) -> None:
        self.service = service
        self.live = live
        self.job = job
        self.request = request
        self._steps: Any = None
        self._levels: list[Level] = []  # finished rounds, not published yet
        self._cost: Cost | None = None  # of the rounds so far
        self._has_other_work = False  # model calls other than growing nodes of this loom
        self._grown: list[GrowthTask] = []  # not committed yet

    async def begin(self, lm: LM, node: Heddle, actor: str) -> None:
        """Check the request and take the search's first step. The caller holds the lock.

        node: the node to search below. actor: who started the search, for the loom's log.
        Raises: ConfigError, RequestError.
        """
        request = self.request
        given = request.sampling()
        check_limit("max_tokens", given.get("max_tokens", 1), self.service.config.limits.tokens)
        for name in _SEARCH_OPTIONS:
            if (value := getattr(request, name)) is not None:
                given[name] = value
        if (constraint := request.constraint()) is not None:
            given["constraint"] = from_dict(constraint)
        strategy = STRATEGIES[request.strategy]
        options = strategy.options(request.breadth, request.n, **given)
        # The strategy checks its options in the first step.
        self._steps = strategy.steps(lm, node, progress=self._levels.append, **options)
        self._work = self._step(None)
        await self._commit(actor)

    def _step(self, given: Any) -> Any:
        """Send a result to the search; return its next request, or None at its end."""
        try:
            return self._steps.send(given)
        except StopIteration as end:
            return end.value

    async def run(self, lm: LM, actor: str) -> None:
        """Run the search to its end. Generated nodes are committed even after an error.

        lm: the loom's model. actor: who started the search, for the loom's log.
        """
        work = self._work
        try:
            with closing(self._steps):
                while not isinstance(work, SearchResult):
                    if isinstance(work, Grow):
                        step_result = await self._grow_round(lm, work, actor)
                    else:
                        step_result = await self._run_other(work)
                    async with self.live.lock:
                        if isinstance(work, Grow):
                            self._check_not_removed([*work.rows, *step_result])
                        work = self._step(step_result)
                        # Nodes that the search added itself are committed with this call.
                        await self._commit(actor)
                        self._publish_rounds()
            self._cost = work.cost
            name = self.live.stored.name
            result = search_object(
                self.request.strategy,
                work,
                "" if work.answer is None else str(work.answer),
                name,
                model=self.job.model or "",
                engine=lm.info.name,
                stats=lm.stats(),
            )
            for shown, group in zip(result["answers"], work.answers, strict=True):
                shown["nodes"] = [self.live.number(node) for node in group.nodes]
            self.job.result = {**result, "best": self.live.number(work.best)}
        finally:
            self.job.usage = self._usage()
            async with self.live.lock:
                try:
                    await self._commit(actor)
                finally:
                    self._release_growth()
                if self.job.result is not None:
                    self.job.result["best"] = self.live.number(work.best)

    async def _commit(self, actor: str) -> None:
        """Commit the nodes of the search, and no others. The caller holds the lock."""
        author = Attribution("run", actor, self.job.id, self.job.model)
        await self.live.commit(author, self._grown)
        self._release_growth()

    def _release_growth(self) -> None:
        """Unregister the search's growth tasks."""
        for task in self._grown:
            self.live.unregister_growth(task)
        self._grown = []

    async def _run_other(self, work: Any) -> Any:
        """Run a step of the search that does not grow nodes of this loom, and return its result.

        work: proposals of steps or questions to the model.
        """
        self._has_other_work = True
        return await work.arun()

    async def _grow_round(self, lm: LM, work: Grow, actor: str) -> list[Heddle]:
        """Generate the nodes of one round, publish their tokens, and return the nodes.

        work: the round's parents and sampling parameters.
        """
        live, rows = self.live, list(work.rows)
        self._check_not_removed(rows)
        if any(
            row.path[0] is not live.stored.loom for row in rows
        ):  # questions have looms of their own
            result: list[Heddle] = await self._run_other(work)
            return result
        params = work.params(lm)
        async with live.lock:
            if all(node.terminal for node in rows):
                return []
            task = await plan_growth(live, self.job, rows, params, actor)
            self._grown.append(task)
        await live.number_new(task)
        self.job.add_growth(task)
        await task.run(work.is_over)
        return [pending.child for pending in task.growth.branches if pending.attached]

    def _check_not_removed(self, nodes: Sequence[Heddle]) -> None:
        """Raise Conflict if one of these nodes was removed; its descendants could not be saved."""
        if not all(isinstance(node.path[0], Loom) for node in nodes):
            raise Conflict(
                "a node that the search needs was removed from the loom meanwhile",
                rev=self.live.stored.rev,
                code="node_removed",
                hint="undo restores it; then start the search again",
            )

    def _usage(self) -> TokenUsage:
        """Return the search's token counts, including proposals, questions and their answers."""
        usage = usage_of(self.job)
        if self._cost is not None:
            usage.prompt_tokens += self._cost.prompt_tokens
            usage.completion_tokens = max(usage.completion_tokens, self._cost.tokens)
        if self._has_other_work:  # the cached tokens of that work are unknown
            usage.cached_tokens = None
        return usage

    def _publish_rounds(self) -> None:
        """Publish the finished rounds, whose nodes are committed. The caller holds the lock."""
        levels, self._levels[:] = list(self._levels), []
        number = self.live.number
        for level in levels:
            self._cost = level.cost
            self.job.progress = {"round": level.depth, **asdict(level.cost)}
            round_data = {
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
            self.job.rounds.append(round_data)
            self.job.events.put("score", round_data)
