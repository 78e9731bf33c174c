"""`flatten`: training records of trees with rewards."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal, TypedDict

from .._core.validation import check_choice, check_number
from ..errors import ConfigError
from .tree import Segment, Tree

_EPSILON = 1e-4  # TRL's


class SegmentRecord(TypedDict):
    """A segment of a record's path. Records of one group share it if they have the same `id`.

    `advantage` is the same for both settings of `advantages` in `flatten`.
    """

    id: int  # its number in the tree
    start: int  # index of its first token in the completion
    end: int
    n_leaves: int  # records that share it
    value: float  # mean reward of these records
    advantage: float  # value minus that of the parent segment, divided as group advantages


class Record(TypedDict):
    """One rollout as a plain dict; `flatten` returns one per leaf."""

    group: int  # index of its tree
    prompt_ids: list[int]
    completion_ids: list[int]
    policy_logprobs: list[float]  # one per completion token: after temperature and filters
    logprobs: list[float]  # raw, over the full vocabulary
    reward: float
    advantages: list[float]  # one per completion token
    segments: list[SegmentRecord]


def flatten(
    trees: Sequence[Tree],
    rewards: Sequence[Sequence[float]],
    *,
    advantages: Literal["group", "siblings"] = "group",
) -> list[Record]:
    """Return one record per rollout, tree by tree, in the order of the leaves.

    The records are plain dicts: `datasets.Dataset.from_list(records)` makes a dataset of them.

    Args:
        trees: the trees of `grow`.
        rewards: for each tree one number per leaf.
        advantages: how the advantages of tokens are computed. "group": all tokens of a record have
            (reward - mean) / (standard deviation + 0.0001) in the tree, as in GRPO. "siblings": the
            tokens of a segment have its value minus the value of its parent, with the same divisor.
            A value is the mean reward of the leaves below. A segment without siblings has 0.

    A shared segment is in several records, with equal `id` and with `n_leaves` above 1. Weight its
    tokens by 1 / n_leaves, or train on it in one record only.

    Raises: ConfigError.
    """
    check_choice("advantages", advantages, ("group", "siblings"))
    if len(rewards) != len(trees):
        raise ConfigError(f"rewards has {len(rewards)} lists for {len(trees)} trees; give each one")
    records: list[Record] = []
    for group, (tree, numbers) in enumerate(zip(trees, rewards, strict=True)):
        records += _records_of(group, tree, numbers, by_group=advantages == "group")
    return records


def _records_of(
    group: int, tree: Tree, rewards: Sequence[float], *, by_group: bool
) -> list[Record]:
    """Return the records of one tree; arguments as for `flatten`.

    group: index of the tree. by_group: `advantages` is "group"; False: "siblings".
    """
    leaves = tree.leaves
    if len(rewards) != len(leaves):
        raise ConfigError(
            f"tree {group} has {len(leaves)} rollouts, but {len(rewards)} rewards; give each one"
        )
    numbers = [check_number("a reward", one) for one in rewards]
    scale = (stdev(numbers) if len(numbers) > 1 else 0.0) + _EPSILON
    segments = _segment_records(tree, leaves, numbers, scale)
    mean, records = fmean(numbers), list[Record]()
    for leaf, reward in zip(leaves, numbers, strict=True):
        path = leaf.path
        parts = [segments[part] for part in path]
        own = [(reward - mean) / scale] * leaf.end
        if not by_group:
            own = [one["advantage"] for one in parts for _ in range(one["end"] - one["start"])]
        records.append(
            Record(
                group=group,
                prompt_ids=list(tree.prompt_ids),
                completion_ids=[token for part in path for token in part.tokens],
                policy_logprobs=[one for part in path for one in part.policy_logprobs],
                logprobs=[one for part in path for one in part.logprobs],
                reward=reward,
                advantages=own,
                segments=parts,
            )
        )
    return records


def _segment_records(
    tree: Tree, leaves: Sequence[Segment], rewards: Sequence[float], scale: float
) -> dict[Segment, SegmentRecord]:
    """Return the record of each segment of a tree.

    Args:
        rewards: one per leaf, in the order of `leaves`.
        scale: divisor of an advantage, which is the segment's value minus its parent's.
    """
    below: dict[Segment, list[float]] = {}
    for leaf, reward in zip(leaves, rewards, strict=True):
        for part in (tree.root, *leaf.path):
            below.setdefault(part, []).append(reward)
    value = {segment: fmean(numbers) for segment, numbers in below.items()}
    records = {}
    for number, segment in enumerate(tree.segments()):
        assert segment.parent is not None
        records[segment] = SegmentRecord(
            id=number,
            start=segment.start,
            end=segment.end,
            n_leaves=len(below[segment]),
            value=value[segment],
            advantage=(value[segment] - value[segment.parent]) / scale,
        )
    return records
