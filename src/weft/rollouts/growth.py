"""`grow`: sample trees of rollouts, all prompts in one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import nlargest
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .._core.sampling.params import PARAMETERS, SamplingParams
from .._core.sampling.rng import fresh_seed, stream_of
from .._core.sched.work import FinishReason, Run, RunResult, RunState
from .._core.validation import check_int
from ..errors import ConfigError, Unsupported
from ..loom.loom import read_prompt
from .tree import Segment, Tree

if TYPE_CHECKING:
    from ..lm.lm import LM

BranchAt = Literal["entropy", "steps"] | Sequence[int]
Prompt = str | Sequence[dict[str, Any]] | Sequence[int]

# With others a token's probability depends on more than its path, or paths end early.
_ALLOWED = {"temperature", "temperature_first", "logit_bias", "seed"}
_ALLOWED |= {name for name, parameter in PARAMETERS.items() if parameter.is_filter}
_ALLOWED -= {"xtc_probability"}


def grow(
    lm: LM,
    prompts: Sequence[Prompt],
    n: int = 8,
    *,
    branch_at: BranchAt = "entropy",
    width: int | None = None,
    max_tokens: int = 256,
    template: bool = True,
    **sampling: Any,
) -> list[Tree]:
    """Sample `n` rollouts of each prompt as a tree with shared prefixes; return the trees.

    All prompts run in one batch, and a shared prefix is generated once. A path that ends before a
    branch point leaves its other rollouts to new paths from the prompt. So each tree has `n`.

    Args:
        lm: the policy.
        prompts: texts (rendered by the chat template if the model has one), chat messages, or token
            ids.
        n: rollouts of each prompt.
        branch_at: where paths branch. "entropy": complete paths are grown first, and branched
            before their tokens of highest entropy, in rounds. "steps": at each line end. A list:
            after these numbers of completion tokens; 0 is the prompt, [0] shares no token.
        width: paths after each branch point, also after the prompt. None: 2; with a list, equal
            widths that lead to `n`. At the last depth of a list, paths take all that is left of n.
        max_tokens: maximum completion tokens, with the end token.
        template: False takes texts without the chat template.
        sampling: temperature, filters (`top_p`, `top_k` and others), `logit_bias` and `seed`, as in
            SamplingParams. The model's defaults do not apply: the policy is the plain model.

    Raises:
        ConfigError: an argument is outside what is allowed.
        ContextOverflow: a prompt is longer than the context.
        Unsupported: the engine does not report the log-probabilities or entropies.

    With a list of depths each rollout is a plain sample of the policy, unless paths end before the
    last depth. Branching by entropy prefers uncertain prefixes.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts is {prompts!r:.60}; allowed is a list of prompts")
    check_int("n", n, 1)
    rows = [
        read_prompt(lm.text, prompt, template=template, check=lm.check_length).ids
        for prompt in prompts
    ]
    return grow_from_ids(
        lm, rows, [n] * len(rows), branch_at, width=width, max_tokens=max_tokens, **sampling
    )


def grow_from_ids(
    lm: LM,
    prompts: Sequence[list[int]],
    counts: Sequence[int],
    branch_at: BranchAt = "entropy",
    *,
    width: int | None = None,
    max_tokens: int = 256,
    **sampling: Any,
) -> list[Tree]:
    """Sample trees after token ids; arguments as for `grow`.

    counts: the number of rollouts of each prompt.
    """
    params = _check_sampling(sampling)
    check_int("max_tokens", max_tokens, 1)
    depths = _check_depths(branch_at, max_tokens)
    if width is not None:
        check_int("width", width, 2)
    sampler = PathSampler(lm, params, max_tokens)
    for ids in prompts:
        lm.check_path([0], len(ids))  # room for a token
    trees = [Tree(lm, list(ids)) for ids in prompts]
    if branch_at == "entropy":
        _grow_by_entropy(sampler, trees, counts, width or 2)
    else:
        _grow_by_levels(sampler, trees, counts, width, depths)
    return trees


def _check_sampling(sampling: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters with a seed. Raises: ConfigError."""
    params = SamplingParams.resolve({"seed": fresh_seed(), **sampling})
    for name in sampling.keys() - _ALLOWED:
        raise ConfigError(
            f"{name} has no effect on rollouts; allowed are {', '.join(sorted(_ALLOWED))}"
        )
    if params.temperature == 0:
        raise ConfigError("temperature is 0; rollouts are random, so it must be above 0")
    return params


def _check_depths(branch_at: BranchAt, max_tokens: int) -> list[int] | None:
    """Return the depths of branch points, from 0 on; None if they are not given as a list."""
    if branch_at in ("entropy", "steps"):
        return None
    if isinstance(branch_at, str) or not isinstance(branch_at, Sequence) or not branch_at:
        raise ConfigError(
            f'branch_at is {branch_at!r:.80}; allowed are "entropy", "steps" or a list of depths'
        )
    return sorted({check_int("a depth in branch_at", one, 0, max_tokens - 1) for one in branch_at})


# Paths ----------------------------------------------------------------------------------------


class PathEnd:
    """Callback after each token of a path: ends it ("stop") after an end token.

    at_lines: also end it ("length") after a line with text.
    """

    def __init__(self, lm: LM, *, at_lines: bool) -> None:
        self._text, self._at_lines, self._has_text = lm.text, at_lines, False

    def __call__(self, state: RunState) -> FinishReason | None:
        token = state.tokens[-1]
        if token in self._text.stop_ids:
            return "stop"
        if not self._at_lines:
            return None
        piece = self._text.token_bytes(token)
        self._has_text = self._has_text or bool(piece.strip())
        return "length" if self._has_text and b"\n" in piece else None


class Path(NamedTuple):
    """A path to sample after a segment.

    limit: maximum completion tokens up to its end, those before `parent`'s end included.
    n_rollouts: the number of rollouts that will share it.
    """

    tree: Tree
    parent: Segment
    limit: int
    n_rollouts: int = 1


class PathSampler:
    """Samples batches of segments. Each segment has its own random stream.

    max_tokens: maximum completion tokens of a rollout; its last segment then ends with "length".
    """

    def __init__(self, lm: LM, params: SamplingParams, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._lm, self._params, self._numbers = lm, params, count()
        neutral = SamplingParams(temperature_first=params.temperature_first, seed=params.seed)
        self._is_neutral = params == neutral

    def extend(self, paths: Sequence[Path], *, at_lines: bool = False) -> list[Segment]:
        """Sample a segment for each path in one batch, and attach them.

        at_lines: end segments that several rollouts share after a line.
        """
        runs = [self._run(path, at_lines=at_lines and path.n_rollouts > 1) for path in paths]
        tickets = self._lm.submit(runs)
        try:
            self._lm.drive(tickets)
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        results = [ticket.result() for ticket in tickets]
        pairs = zip(paths, results, strict=True)
        return [self._attach(path.parent, result) for path, result in pairs]

    def _run(self, path: Path, *, at_lines: bool) -> Run:
        assert self._params.seed is not None
        stream = stream_of(self._params.seed, (next(self._numbers),))
        sampler = self._lm.sampler(self._params, stream)
        sampler.reports_kept = True
        # Without stop ids the end token is a token of the path, with its log-probability.
        return Run(
            path.parent.place,
            sampler,
            max_tokens=path.limit - path.parent.end,
            sink=PathEnd(self._lm, at_lines=at_lines),
        )

    def _attach(self, parent: Segment, result: RunResult) -> Segment:
        """Return a run's result as a new child of a segment."""
        segment = Segment(parent, result.end)
        segment.tokens, segment.logprobs = result.tokens, result.logprobs
        segment.policy_logprobs, segment.entropies = result.kept, result.entropies
        if self._is_neutral and not result.kept:
            segment.policy_logprobs = list(result.logprobs)
        if len(segment.policy_logprobs) < len(result.tokens):
            raise Unsupported(
                f"the {self._lm.info.name} engine does not report the log-probabilities of tokens"
                " under temperature and filters, which rollouts need"
            )
        if result.finish_reason == "context" or segment.end >= self.max_tokens:
            segment.finish_reason = "length"
        if result.tokens and result.tokens[-1] in self._lm.text.stop_ids:
            segment.finish_reason = "stop"
        parent.children.append(segment)
        return segment


# Shapes of trees ------------------------------------------------------------------------------


def _grow_by_levels(
    sampler: PathSampler,
    trees: Sequence[Tree],
    counts: Sequence[int],
    width: int | None,
    depths: list[int] | None,
) -> None:
    """Grow all paths from branch point to branch point; each has a share of its tree's rollouts.

    depths: the branch points; None: line ends.
    """
    is_start_shared = depths is not None and depths[0] > 0
    points = [0, *depths] if depths and is_start_shared else depths
    live = [(tree, tree.root, n) for tree, n in zip(trees, counts, strict=True)]
    missing: list[Path] = []
    for level in count():
        n_left = None if points is None else len(points) - level
        limit = points[level + 1] if points and n_left != 1 else sampler.max_tokens
        paths = []
        for tree, segment, n in live:
            n_children = 1 if is_start_shared and not level else _n_children(n, width, n_left)
            for share in _shares(n, n_children):
                end = limit if share > 1 else sampler.max_tokens
                paths.append(Path(tree, segment, end, share))
        live = []
        segments = sampler.extend(paths, at_lines=points is None)
        for path, segment in zip(paths, segments, strict=True):
            if segment.finish_reason is None:
                live.append((path.tree, segment, path.n_rollouts))
            else:
                plain = Path(path.tree, path.tree.root, sampler.max_tokens)
                missing += [plain] * (path.n_rollouts - 1)
        if not live:
            break
    if missing:
        sampler.extend(missing)


def _n_children(n: int, width: int | None, n_left: int | None) -> int:
    """Return the number of paths at a branch point that `n` rollouts share.

    The last branch point gets a path per rollout. Others get `width` paths, at most `n`.

    width: None: 2, or with `n_left` the same number at all points left, rounded up.
    n_left: branch points from this one to the last; None: any number.
    """
    if n_left == 1:
        return n
    if width is None and n_left is not None:
        # Subtract the rounding error of exact roots.
        return math.ceil(math.pow(n, 1 / n_left) - 1e-9)
    return min(width or 2, n)


def _shares(n: int, n_children: int) -> list[int]:
    """Return `n` rollouts as shares that differ by at most 1."""
    base, extra = divmod(n, n_children)
    return [base + (i < extra) for i in range(n_children)]


def _grow_by_entropy(
    sampler: PathSampler, trees: Sequence[Tree], counts: Sequence[int], width: int
) -> None:
    """Grow `width` complete paths, then branch at the highest entropies until trees are full.

    A round adds at most as many branch points as the tree has leaves. Several of them may be on one
    path; see `_branch_points`.
    """
    limit = sampler.max_tokens
    paths = [
        Path(tree, tree.root, limit)
        for tree, n in zip(trees, counts, strict=True)
        for _ in range(min(width, n))
    ]
    while paths:
        for segment in sampler.extend(paths):
            if not segment.entropies:
                raise Unsupported(
                    'the engine reports no entropies; branch at "steps" or at a list of depths'
                )
        paths = []
        for tree, n in zip(trees, counts, strict=True):
            if n_missing := n - len(tree.leaves):
                parents = _branch_points(tree, math.ceil(n_missing / (width - 1)))
                places = [parent for parent in parents for _ in range(width - 1)]
                paths += [Path(tree, parent, limit) for parent in places[:n_missing]]


def _branch_points(tree: Tree, n: int) -> list[Segment]:
    """Split a tree before its tokens of highest entropy, and return the segments above them.

    n: number of points to return. There are fewer if the tree has fewer leaves or tokens. Without
        any token to branch at, the result is the root, n times.
    """
    candidates = [
        (entropy, segment.start + at, segment)
        for segment in tree.segments()
        for at, entropy in enumerate(segment.entropies)
        if at  # a segment begins at a branch point
    ]
    best = nlargest(min(n, len(tree.leaves)), candidates, key=itemgetter(0))
    # `split` keeps the lower part, so points of one segment are split from the top down.
    points = [tree.split(segment, depth) for _, depth, segment in sorted(best, key=itemgetter(1))]
    return points or [tree.root] * n
