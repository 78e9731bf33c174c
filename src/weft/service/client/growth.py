"""Deltas of growing branches, the same whether or not the stream was interrupted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._core.atomic_files import parse_number
from ...errors import NotFound, WeftError
from ..api.jobs import JobReply, TokenUsage


@dataclass(frozen=True, slots=True)
class BranchDelta:
    """The new part of a branch since the previous delta.

    branch: index of the branch in the job. node: the number of its node.
    text: the new text.
    token_ids, logprobs, entropies: of the new tokens; statistics only if the engine has them.
    finish_reason: None while the branch is growing.

    After a long interruption a delta may have text without token ids. `Client.node` reads them.
    """

    branch: int
    node: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    finish_reason: str | None = None


class GrowthReader:
    """Converts the events of a growth job to deltas.

    `status`, `usage` and `result` are those of the job; the last event sets them.
    """

    def __init__(self, job: JobReply) -> None:
        self.job = job
        self.status: str = job.status
        self.usage: TokenUsage | None = None
        self.result: dict[str, Any] | None = None
        self._nodes = {each.branch: each.node for each in job.branches}
        self._n_shown = dict.fromkeys(self._nodes, 0)  # characters per branch
        self._ended: set[int] = set()
        self.is_over = False

    def lost(self, error: NotFound) -> WeftError:
        """Return the error to raise when the server no longer has the job.

        Its message names the loom and the nodes with the generated text.
        error: the server's NotFound. One that is not about a job is returned unchanged.
        """
        if error.what != "job":
            return error
        job, nodes = self.job, ", ".join(map(str, self._nodes.values()))
        where = f", nodes {nodes}" if nodes else ""
        return NotFound(
            f"the server no longer has job {job.job!r}; it may have been restarted. The generated"
            f" text is in loom {job.loom!r}{where}; unfinished nodes are marked interrupted",
            what="job",
            hint=f"client.nodes({job.loom!r}) reads them; grow such a node to go on",
        )

    def take(self, name: str, data: dict[str, Any]) -> list[BranchDelta]:
        """Process an event; return the deltas that it contains, possibly none.

        name, data: the event's name and its parsed JSON.
        """
        if name == "job":
            self._add_branches(data)
        elif name == "tok":
            return self._token_deltas(data["t"])
        elif name == "branch":
            return self._end_deltas(data["branch"], data["finish_reason"])
        elif name == "snapshot":
            return self._caught_up(data)
        elif name == "done":
            self.is_over = True
            self.status = data["status"]
            self.result = data.get("result")
            if data.get("usage") is not None:
                self.usage = TokenUsage.model_validate(data["usage"])
        return []

    def _add_branches(self, data: dict[str, Any]) -> None:
        """Register the branches that an event announces."""
        for branch in data.get("branches", ()):
            self._nodes[branch["branch"]] = branch["node"]
            self._n_shown.setdefault(branch["branch"], 0)

    def _token_deltas(self, entries: list[list[Any]]) -> list[BranchDelta]:
        """Return a delta for each branch with new tokens in an event."""
        by_branch: dict[int, list[list[Any]]] = {}
        for entry in entries:
            by_branch.setdefault(entry[0], []).append(entry)
        return [self._delta(branch, own_entries) for branch, own_entries in by_branch.items()]

    def _delta(self, branch: int, entries: list[list[Any]]) -> BranchDelta:
        """Return the delta of one branch. entries: its new tokens."""
        text = "".join(entry[2] for entry in entries)
        self._n_shown[branch] = self._n_shown.get(branch, 0) + len(text)
        tokens = [entry for entry in entries if entry[1] is not None]
        return BranchDelta(
            branch,
            self._nodes.get(branch, -1),
            text,
            tuple(entry[1] for entry in tokens),
            tuple(parse_number(entry[3], "a logprob") for entry in tokens if entry[3] is not None),
            tuple(parse_number(entry[4], "an entropy") for entry in tokens if entry[4] is not None),
        )

    def _end_deltas(self, branch: int, reason: str | None) -> list[BranchDelta]:
        """Return the last delta of a branch, with its finish reason; [] if it has ended before."""
        if branch in self._ended:
            return []
        self._ended.add(branch)
        return [BranchDelta(branch, self._nodes.get(branch, -1), finish_reason=reason or "error")]

    def _caught_up(self, data: dict[str, Any]) -> list[BranchDelta]:
        """Return deltas for events that the client has missed.

        data: of a "snapshot" event: the full texts of branches, and the branches that have ended.
        """
        self._add_branches(data)
        deltas = []
        for entry in data.get("texts", ()):
            branch, text = entry["branch"], entry["text"]
            if rest := text[self._n_shown.get(branch, 0) :]:
                self._n_shown[branch] = len(text)
                deltas.append(BranchDelta(branch, self._nodes.get(branch, -1), rest))
        for entry in data.get("branches", ()):
            if entry.get("finish_reason") is not None:
                deltas += self._end_deltas(entry["branch"], entry["finish_reason"])
        return deltas
