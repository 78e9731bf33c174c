"""Jobs: work that goes on whether or not somebody waits for it, with its events."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ...errors import Cancelled, NotFound, WeftError
from ..api.jobs import BranchObject, JobObject, Status, TokenUsage
from .errors import RequestError, serialize_error
from .events import EventLog
from .serializers import iso_timestamp

if TYPE_CHECKING:
    from ..._core.sched.work import FinishReason
    from .growth import GrowthTask

_log = logging.getLogger(__name__)
Json = dict[str, Any]
JobEnd = Callable[[BaseException | None], object]


class ServerJob:
    """One job. events: what happens in it, for as many readers as there are.

    branches: those that it has grown so far, call by call. tell: called with
    each event and the job's id, too.
    """

    def __init__(
        self,
        kind: str,
        loom: str | None = None,
        model: str | None = None,
        tell: Callable[[str, Json, str], object] | None = None,
    ) -> None:
        # Where there are replicas, a request for the job goes where those for its loom go.
        of_loom = "" if loom is None else f"{loom}_"
        self.id = f"jb_{of_loom}{int(time.time() * 1000):011x}{secrets.token_hex(5)}"
        self.kind = kind
        self.loom = loom
        self.model = model
        self.seed: int | None = None
        self.created = time.time()
        self.ended: float | None = None
        self.status: Status = "running"
        self.branches: list[GrowthTask] = []
        self.progress: Json = {}
        self.usage: TokenUsage | None = None
        self.result: Json | None = None
        self.asked: Json | None = None  # of a run
        self.rounds: list[Json] = []
        self.error: BaseException | None = None
        also = None if tell is None else lambda name, data: tell(name, data, self.id)
        self.events = EventLog(self.snapshot, also=also)
        self.done = asyncio.Event()
        self._told: list[Json] = []  # of branches that have ended: their trees may go
        self._task: asyncio.Task[None] | None = None
        self._reason: FinishReason = "cancelled"
        self._is_told = False  # to end: told twice, it would not even keep what it has

    @property
    def first_branch(self) -> int:
        """The index of the next call's first branch."""
        return sum(len(each.growth.branches) for each in self.branches)

    def add_growth(self, branches: GrowthTask) -> None:
        """Take branches in, and tell of their nodes."""
        self.branches.append(branches)
        told = {"job": self.id, "loom": self.loom, "model": self.model}
        self.events.put("job", {**told, "branches": branches.told()})

    def start(self, work: Coroutine[Any, Any, None], end: JobEnd) -> None:
        """Begin; `end` is called once the job is over: with why, where it did not end well."""
        self._task = asyncio.create_task(self._run(work, end))

    async def _run(self, work: Coroutine[Any, Any, None], end: JobEnd) -> None:
        try:
            await work
            self.status = self._end_of(None)
        except BaseException as error:
            self.status = self._end_of(error)
            if self.status == "failed":
                self.error = error
                if not isinstance(error, WeftError):
                    _log.error("job %s failed", self.id, exc_info=error)
                self.events.put("error", self.error_object() or {})
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self.ended = time.time()
            self._told = self._branches()
            done: Json = {"job": self.id, "status": self.status}
            if self.usage is not None:
                done["usage"] = self.usage.model_dump()
            if self.result is not None:
                done["result"] = self.result
            self.events.put("done", done)
            self.events.end()
            self.events.also = None  # a job outlives its loom's being open
            self.branches = []
            self.done.set()
            end(self.error if self.status in ("ok", "failed") else Cancelled(self.status))

    def _end_of(self, error: BaseException | None) -> Status:
        was_ended = self._task is not None and self._reason != "cancelled"
        if isinstance(error, asyncio.CancelledError | Cancelled):
            return "interrupted" if was_ended else "cancelled"
        if error is not None:
            return "failed"
        reasons = {each["finish_reason"] for each in self._branches()}
        if reasons and reasons <= {"cancelled", "interrupted"}:
            return "interrupted" if "interrupted" in reasons else "cancelled"
        return "ok"

    def cancel(
        self, branches: Iterable[int] | None = None, reason: FinishReason = "cancelled"
    ) -> None:
        """End it, or some of its branches; what was made is kept."""
        if self._task is None or self._task.done():
            return
        self._reason = reason
        for each in self.branches:
            each.cancel(branches, reason)
        # What only grows ends by its branches, in order; a search or a load is told so.
        if branches is None and self.kind != "grow" and not self._is_told:
            self._is_told = True
            self._task.cancel()

    async def wait(self) -> None:
        """Wait until it is over."""
        await self.done.wait()

    def _branches(self) -> list[Json]:
        return [told for each in self.branches for told in each.told()] or self._told

    def error_object(self) -> Json | None:
        """Return what went wrong; None where nothing did."""
        return None if self.error is None else serialize_error(self.error)[1]

    def snapshot(self) -> Json:
        """Return the job with the whole texts of what grows in it."""
        told = self.told(whole=True).model_dump(mode="json")
        told["texts"] = [text for each in self.branches for text in each.texts()]
        return told

    def told(self, *, whole: bool = False) -> JobObject:
        """Return what is told of it. whole: with the rounds of a run."""
        return JobObject.model_validate(
            {
                "id": self.id,
                "kind": self.kind,
                "status": self.status,
                "created": iso_timestamp(self.created),
                "ended": iso_timestamp(self.ended) or None,
                "loom": self.loom,
                "model": self.model,
                "seed": self.seed,
                "branches": [BranchObject(**each) for each in self._branches()],
                "progress": self.progress,
                "usage": self.usage,
                "result": self.result,
                "asked": self.asked,
                "rounds": self.rounds if whole and self.kind == "run" else None,
                "error": self.error_object(),
                "last_event": self.events.last,
            }
        )


class JobRegistry:
    """The jobs of a server: those that run, and the last ones that have ended."""

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._jobs: dict[str, ServerJob] = {}

    def __iter__(self) -> Iterator[ServerJob]:
        return iter(list(self._jobs.values()))

    def add(self, job: ServerJob) -> ServerJob:
        """Note a job that begins; the oldest of those that have ended are forgotten."""
        self._jobs[job.id] = job
        ended = [each for each in self if each.ended is not None]
        for old in ended[: max(len(ended) - self._max_ended, 0)]:
            if not old.events.n_readers:
                del self._jobs[old.id]
        return job

    def get(self, job_id: str) -> ServerJob:
        """Return a job. Raises: NotFound, for one that is forgotten, too."""
        job = self._jobs.get(job_id)
        if job is None:
            raise NotFound(
                f"there is no job {job_id!r:.80}: it was forgotten, or the server has been"
                " restarted since; what it had grown is in its loom",
                what="job",
                hint="after a crash nodes that were growing end as interrupted, with their text",
            )
        return job

    def forget(self, job_id: str) -> None:
        """Forget a job that has ended. Raises: NotFound; Refused while it runs."""
        job = self.get(job_id)
        if job.ended is None:
            raise RequestError(409, "job_running", f"job {job_id} runs; cancel it first")
        del self._jobs[job_id]

    def running(self) -> list[ServerJob]:
        """Return the jobs that have not ended."""
        return [job for job in self if job.ended is None]
