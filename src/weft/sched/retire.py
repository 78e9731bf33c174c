"""Namespaces that are gone: their work fails, other work in the same steps does not notice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import StaleHandle
from .stays import CommitJob, Stay
from .task import ExtendTask, Job, RunTask
from .work import Commit, Item

if TYPE_CHECKING:
    from .scheduler import Scheduler


def retire(scheduler: Scheduler, namespace: str, message: str) -> None:
    """Fail all work in a namespace with StaleHandle, refuse it from now on, and drop its KV.

    Between steps, under the lock: no row of it is ever formed again. Cost: O(open jobs + tree).
    """
    scheduler.take_in()
    scheduler.retired[namespace] = message
    admission, tree = scheduler.admission, scheduler.tree
    for job in [*admission.queue, *admission.admitted]:
        if namespace in namespaces_of(job):
            scheduler._fail(job, StaleHandle(message))
    scheduler.settle()
    tree.clear(namespace=namespace)
    for name in scheduler.retired:
        root = tree.roots.get(name)
        if root is not None and not root.children:  # else places still hold tokens of it
            del tree.roots[name]


def refuse_retired(items: Sequence[Item], retired: Mapping[str, str]) -> None:
    """Raise StaleHandle for work in a namespace that is gone."""
    if retired:
        for item in items:
            for name in namespaces_in(item):
                if name is not None and name in retired:
                    raise StaleHandle(retired[name])


def namespaces_in(item: Item) -> Iterable[str | None]:
    """Return whose trees an item works in."""
    if isinstance(item, Commit):
        return [stay.base.namespace for stay in item.stays]
    return [item.place.namespace]


def namespaces_of(job: Job) -> set[str | None]:
    """Return whose trees a job works in."""
    if isinstance(job, CommitJob):
        return set(namespaces_in(job.item))
    out: set[str | None] = set()
    for task in job.tasks:
        if isinstance(task, RunTask):
            out.add(task.namespace)
        elif isinstance(task, ExtendTask):
            out.add(task.item.place.namespace)
        elif isinstance(task, Stay):
            out.add(task.base.namespace)
    return out
