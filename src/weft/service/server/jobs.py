"""Jobs: background work with an event log that clients can follow."""

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
    """A job in the background: a growth, a search or the load of a model.

    kind: "grow", "run" (a search) or "load".
    loom, model: id and name of what the job uses; None without one.
    events: its event log.
    growth_tasks: its growths so far.
    notify: called with each event and the job's id.
    """

    def __init__(
        self,
        kind: str,
        loom: str | None = None,
        model: str | None = None,
        notify: Callable[[str, Json, str], object] | None = None,
    ) -> None:
        # With replicas, the loom in the id routes requests for the job to the loom's replica.
        prefix = "" if loom is None else f"{loom}_"
        self.id = f"jb_{prefix}{int(time.time() * 1000):011x}{secrets.token_hex(5)}"
        self.kind = kind
        self.loom = loom
        self.model = model
        self.seed: int | None = None
        self.created = time.time()
        self.ended: float | None = None
        self.status: Status = "running"
        self.growth_tasks: list[GrowthTask] = []
        self.progress: Json = {}
        self.usage: TokenUsage | None = None
        self.result: Json | None = None
        self.request: Json | None = None  # of a search
        self.rounds: list[Json] = []
        self.error: BaseException | None = None
        on_event = None if notify is None else lambda name, data: notify(name, data, self.id)
        self.events = EventLog(self.snapshot, on_event=on_event)
        self.done = asyncio.Event()
        self._ended_branches: list[Json] = []  # kept after the loom is closed
        self._task: asyncio.Task[None] | None = None
        self._reason: FinishReason = "cancelled"
        self._is_cancelled = False  # a second cancellation would interrupt the final commit

    @property
    def first_branch(self) -> int:
        """The job's index of the first branch in its next growth task."""
        return sum(len(each.growth.branches) for each in self.growth_tasks)

    def add_growth(self, task: GrowthTask) -> None:
        """Append a growth task to `growth_tasks`, and publish its branches and their nodes."""
        self.growth_tasks.append(task)
        job = {"job": self.id, "loom": self.loom, "model": self.model}
        self.events.put("job", {**job, "branches": task.to_dicts()})

    def start(self, work: Coroutine[Any, Any, None], end: JobEnd) -> None:
        """Start the work as a task of the event loop.

        end: called once when the work is over, with its error; None if it has succeeded.
        """
        self._task = asyncio.create_task(self._run(work, end))

    async def _run(self, work: Coroutine[Any, Any, None], end: JobEnd) -> None:
        """Run the work, set the final status, and publish the end."""
        try:
            await work
            self.status = self._final_status(None)
        except BaseException as error:
            self.status = self._final_status(error)
            if self.status == "failed":
                self.error = error
                if not isinstance(error, WeftError):
                    _log.error("job %s failed", self.id, exc_info=error)
                self.events.put("error", self.error_object() or {})
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self.ended = time.time()
            self._ended_branches = self._branch_dicts()
            done: Json = {"job": self.id, "status": self.status}
            if self.usage is not None:
                done["usage"] = self.usage.model_dump()
            if self.result is not None:
                done["result"] = self.result
            self.events.put("done", done)
            self.events.end()
            self.events.on_event = None  # the job may outlive its open loom
            self.growth_tasks = []
            self.done.set()
            end(self.error if self.status in ("ok", "failed") else Cancelled(self.status))

    def _final_status(self, error: BaseException | None) -> Status:
        """Return the status of a job whose work has ended with this error (None: success)."""
        was_ended = self._task is not None and self._reason != "cancelled"
        if isinstance(error, asyncio.CancelledError | Cancelled):
            return "interrupted" if was_ended else "cancelled"
        if error is not None:
            return "failed"
        reasons = {each["finish_reason"] for each in self._branch_dicts()}
        if reasons and reasons <= {"cancelled", "interrupted"}:
            return "interrupted" if "interrupted" in reasons else "cancelled"
        return "ok"

    def cancel(
        self, branches: Iterable[int] | None = None, reason: FinishReason = "cancelled"
    ) -> None:
        """End the job, or some of its branches; the tokens generated so far stay in the loom.

        branches: indices of the branches; None means the entire job. reason: their finish reason.
        """
        if self._task is None or self._task.done():
            return
        self._reason = reason
        for growth in self.growth_tasks:
            growth.cancel(branches, reason)
        # A growth ends through its branches; the task of a search or a load is cancelled.
        if branches is None and self.kind != "grow" and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    async def wait(self) -> None:
        """Wait until the job has ended. Does not raise its error."""
        await self.done.wait()

    def _branch_dicts(self) -> list[Json]:
        """Return the branches of all growths, as fields of `BranchObject`."""
        return [
            data for growth in self.growth_tasks for data in growth.to_dicts()
        ] or self._ended_branches

    def error_object(self) -> Json | None:
        """Return the job's error as API responses have it; None without one."""
        return None if self.error is None else serialize_error(self.error)[1]

    def snapshot(self) -> Json:
        """Return the job with the full text of its growing branches.

        It replaces events that a reader has missed.
        """
        data = self.to_object(full=True).model_dump(mode="json")
        data["texts"] = [text for growth in self.growth_tasks for text in growth.texts()]
        return data

    def to_object(self, *, full: bool = False) -> JobObject:
        """Return the job as a JobObject. full: include the rounds of a search."""
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
                "branches": [BranchObject(**each) for each in self._branch_dicts()],
                "progress": self.progress,
                "usage": self.usage,
                "result": self.result,
                "asked": self.request,
                "rounds": self.rounds if full and self.kind == "run" else None,
                "error": self.error_object(),
                "last_event": self.events.last,
            }
        )


class JobRegistry:
    """The running jobs of a server, and the last ones that have ended."""

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._jobs: dict[str, ServerJob] = {}

    def __iter__(self) -> Iterator[ServerJob]:
        return iter(list(self._jobs.values()))

    def add(self, job: ServerJob) -> ServerJob:
        """Register a job and return it. The oldest ended jobs above the limit are removed."""
        self._jobs[job.id] = job
        ended = [each for each in self if each.ended is not None]
        for old in ended[: max(len(ended) - self._max_ended, 0)]:
            if not old.events.n_readers:
                del self._jobs[old.id]
        return job

    def get(self, job_id: str) -> ServerJob:
        """Return a job. Raises: NotFound if it does not exist or was removed."""
        job = self._jobs.get(job_id)
        if job is None:
            raise NotFound(
                f"there is no job {job_id!r:.80}: it was removed, or the server has been"
                " restarted; the generated nodes are in its loom",
                what="job",
                hint="after a crash, growing nodes are marked interrupted and keep their text",
            )
        return job

    def forget(self, job_id: str) -> None:
        """Remove an ended job. Raises: NotFound; RequestError while it runs."""
        job = self.get(job_id)
        if job.ended is None:
            raise RequestError(409, "job_running", f"job {job_id} is running; cancel it first")
        del self._jobs[job_id]

    def running(self) -> list[ServerJob]:
        """Return the jobs that have not ended."""
        return [job for job in self if job.ended is None]
