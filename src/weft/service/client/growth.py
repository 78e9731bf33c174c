"""What grows at a server, as it comes: the same deltas whether the stream held or broke."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._core.atomic_files import parse_number
from ...errors import NotFound, WeftError
from ..api.jobs import JobReply, TokenUsage


@dataclass(frozen=True, slots=True)
class BranchDelta:
    """What is new in one branch. node: its number.

    token_ids, logprobs, entropies: the new tokens only; the figures only where the engine tells
    them. After a stream that was away for long there may be text without tokens: the node has them.
    finish_reason: None while the branch goes on.
    """

    branch: int
    node: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    finish_reason: str | None = None


class GrowthReader:
    """Reads the events of a job that grows. usage, result: there when it is over."""

    def __init__(self, job: JobReply) -> None:
        self.job = job
        self.status: str = job.status
        self.usage: TokenUsage | None = None
        self.result: dict[str, Any] | None = None
        self._nodes = {each.branch: each.node for each in job.branches}
        self._n_shown = dict.fromkeys(self._nodes, 0)  # characters
        self._ended: set[int] = set()
        self.is_over = False

    def lost(self, error: NotFound) -> WeftError:
        """Return the error of a job that its server has no more: where its text is."""
        if error.what != "job":
            return error
        job, nodes = self.job, ", ".join(map(str, self._nodes.values()))
        where = f", nodes {nodes}" if nodes else ""
        return NotFound(
            f"the server has no job {job.job!r} any more; it may have been restarted. What had"
            f" grown is kept in loom {job.loom!r}{where}: those that had not ended are"
            " marked interrupted",
            what="job",
            hint=f"client.nodes({job.loom!r}) reads them; grow such a node to go on",
        )

    def take(self, name: str, told: dict[str, Any]) -> list[BranchDelta]:
        """Return what an event brings."""
        if name == "job":
            self._begin(told)
        elif name == "tok":
            return self._tokens(told["t"])
        elif name == "branch":
            return self._end(told["branch"], told["finish_reason"])
        elif name == "snapshot":
            return self._caught_up(told)
        elif name == "done":
            self.is_over = True
            self.status = told["status"]
            self.result = told.get("result")
            if told.get("usage") is not None:
                self.usage = TokenUsage.model_validate(told["usage"])
        return []

    def _begin(self, told: dict[str, Any]) -> None:
        for each in told.get("branches", ()):
            self._nodes[each["branch"]] = each["node"]
            self._n_shown.setdefault(each["branch"], 0)

    def _tokens(self, entries: list[list[Any]]) -> list[BranchDelta]:
        by_branch: dict[int, list[list[Any]]] = {}
        for entry in entries:
            by_branch.setdefault(entry[0], []).append(entry)
        return [self._delta(branch, of_one) for branch, of_one in by_branch.items()]

    def _delta(self, branch: int, entries: list[list[Any]]) -> BranchDelta:
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

    def _end(self, branch: int, reason: str | None) -> list[BranchDelta]:
        if branch in self._ended:
            return []
        self._ended.add(branch)
        return [BranchDelta(branch, self._nodes.get(branch, -1), finish_reason=reason or "error")]

    def _caught_up(self, told: dict[str, Any]) -> list[BranchDelta]:
        """Bring up to date who has missed events: the rest of each text, then the ends."""
        self._begin(told)
        found = []
        for each in told.get("texts", ()):
            branch, text = each["branch"], each["text"]
            if rest := text[self._n_shown.get(branch, 0) :]:
                self._n_shown[branch] = len(text)
                found.append(BranchDelta(branch, self._nodes.get(branch, -1), rest))
        for each in told.get("branches", ()):
            if each.get("finish_reason") is not None:
                found += self._end(each["branch"], each["finish_reason"])
        return found
