"""Growth of lines under `smc(prefix_check=…)`: functions of the caller's check every prefix.

Use a check where the condition is too slow for, or cannot be written as, a mask of all tokens.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._core.kv.place import Place
from .._core.sampling.metrics import log_softmax
from .._core.sampling.params import SamplingParams, is_neutral
from .._core.sampling.sampler import probabilities
from .._core.sched.work import Extend, FinishReason, Logits
from ..constraints import Matcher, as_constraint
from ..constraints.base import n_words
from ..errors import ConfigError, Unsupported
from ..loom import Heddle
from ..loom.constrained_text import allow_moved_spaces, constrained_tokens
from ..loom.node import add_tokens
from ..loom.stop_strings import StopStrings
from .core import Read, Steps
from .driver import FORBIDDEN, Search
from .rejection import AllowedDraw, draw_allowed, likeliest_allowed

# (text after the prompt, True if the text ends there) → True if the text is allowed so far
Check = Callable[[str, bool], Any]
_PENALTIES = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "dry_multiplier",
)


def validate_checks(given: Check | Sequence[Check]) -> list[Check]:
    """Validate the option `prefix_check` of `smc`; return its functions as a list.

    given: a function of (text, ended), or a list of such functions.

    Raises: ConfigError if it is no function and no list of them, or takes other arguments.
    """
    checks: list[Any] = list(given) if isinstance(given, Sequence) and given else [given]
    for check in checks:
        try:
            signature(check).bind("", False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"prefix_check is {check!r:.80}; allowed is a function of (text, ended), or several"
            ) from error
    return checks


@dataclass(slots=True, eq=False)
class CheckedLine:
    """State of one line while `CheckedGrowth` generates it token by token.

    `_attach` makes the finished line a child of `node`.

    Attributes:
        node: the node that the line continues.
        place: place in the token tree after the last token.
        matcher: state of the constraint after the last token; None without a constraint.
        stops: detects the stop strings.
        text_bytes: UTF-8 bytes of all tokens after the prompt, the node's included.
        tokens: ids of the line's tokens.
        logprobs: log-probability of each token under the model, before temperature and filters.
        log_masses: per draw, log of the estimated probability of all allowed tokens. The draw of
            an end token is one of them.
        finish_reason: as of a node; None while the line grows.
        is_forbidden: True if no next token was allowed.
        terminal: True after an end token of the model.
    """

    node: Heddle
    place: Place
    matcher: Matcher | None
    stops: StopStrings
    text_bytes: bytes
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    log_masses: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    is_forbidden: bool = False
    terminal: bool = False


class CheckedGrowth:
    """Generates lines whose every prefix passes the caller's checks and the constraint, if any.

    `grow` replaces `Meter.grow` in a search with `prefix_check`. Tokens are drawn by `draw_allowed`
    among those that the constraint's mask leaves. At temperature 0 the likeliest allowed token is
    taken.

    Each new node's `legal_logmass` has one number per draw, for the weights of `smc`: the log of
    the estimated probability of all allowed tokens. At temperature 0 it is that of the tokens in
    the mask, because checks are not estimated there. If no token is allowed, the line ends, and
    the node's `meta["closed"]` is `FORBIDDEN`.
    """

    def __init__(self, search: Search, checks: Sequence[Check]) -> None:
        """Create the growth of a search.

        Args:
            search: the search, with its sampling parameters and budget.
            checks: the result of `validate_checks`; a text must pass all of them.

        Raises:
            Unsupported: the engine gives no next-token distributions.
            ConfigError: a penalty is set; those depend on texts that the checks reject.
        """
        if search.lm is None or not search.lm.info.capabilities.steps:
            raise Unsupported("prefix_check= needs a model that gives next-token distributions")
        given = SamplingParams.resolve(search.settings.sampling)
        for name in _PENALTIES:
            if not is_neutral(given, name):
                raise ConfigError(f"{name} has no meaning with prefix_check=; leave it out")
        self.search = search
        self.lm = search.lm
        self.checks = checks
        constraint = search.settings.sampling.get("constraint")
        own = frozenset[int]() if constraint is None else as_constraint(constraint).stop_ids
        self.ends = self.lm.text.stop_ids | own

    def grow(
        self, at: Sequence[Heddle], *, max_tokens: int, reserve: int = 0, **sampling: Any
    ) -> Steps[list[Heddle]]:
        """Generate one continuation of each listed node; return the new nodes.

        Arguments and budgets are those of `Meter.grow`. Nodes whose time ran out are left out.
        """
        meter, nodes, waiting = self.search.meter, list[Heddle](), list(at)
        while waiting and not meter.out_of_time():
            n_rows = meter.max_rows(len(waiting), max_tokens, reserve)
            if not n_rows:
                break
            rows, waiting = waiting[:n_rows], waiting[n_rows:]
            seed = meter.next_seed()
            options = {"max_tokens": max_tokens, "seed": seed, **sampling}
            params = SamplingParams.resolve(options, self.lm.defaults)
            lines = [self._line(node, params) for node in rows]
            yield from self._run(lines, params, np.random.default_rng(seed))
            new = [_attach(line, params) for line in lines if line.finish_reason is not None]
            meter.tokens += sum(len(node.tokens) + node.terminal for node in new)
            nodes += new
        return nodes

    def _line(self, node: Heddle, params: SamplingParams) -> CheckedLine:
        """Return an empty line below a node, with the state of its constraint."""
        constraint, matcher = params.constraint, None
        if constraint is not None:
            matcher = self.lm.constraints.matcher(allow_moved_spaces(node, constraint))
            for token in constrained_tokens(node, constraint):
                matcher.accept(token)
        text_bytes = b"".join(map(self.lm.text.token_bytes, node.get_prefix_tokens(1)))
        stops = StopStrings(params.stop, constraint)
        return CheckedLine(node, node.place, matcher, stops, text_bytes)

    def _run(
        self, lines: Sequence[CheckedLine], params: SamplingParams, rng: np.random.Generator
    ) -> Steps[None]:
        """Draw tokens of all lines, one per step, until each has ended or the time is over.

        Lines with equal tokens share one row of the model.
        """
        while not self.search.meter.out_of_time():
            by_context: dict[tuple[Heddle, tuple[int, ...]], list[CheckedLine]] = {}
            for line in lines:
                if line.finish_reason is None:
                    by_context.setdefault((line.node, tuple(line.tokens)), []).append(line)
            if not by_context:
                break
            places = [equal_lines[0].place for equal_lines in by_context.values()]
            reads = [Extend(place, (), (Logits(place.depth),)) for place in places]
            rows = yield Read(self.lm, reads)
            for equal_lines, logits in zip(by_context.values(), rows, strict=True):
                self._draw(equal_lines, logits, params, rng)

    def _draw(
        self,
        lines: Sequence[CheckedLine],
        logits: NDArray[np.float32],
        params: SamplingParams,
        rng: np.random.Generator,
    ) -> None:
        """Draw the next token of each of these lines.

        lines: lines with equal tokens, which share the results of the checks.
        logits: the model's output after these tokens, [V].
        """
        first, raw = lines[0], log_softmax(logits)
        verdicts: dict[int, bool] = {}

        def is_allowed(token: int) -> bool:
            if token not in verdicts:
                verdicts[token] = self._passes(first, token)
            return verdicts[token]

        masked, log_mask = _masked(logits, raw, first.matcher)
        if log_mask == -math.inf:
            draws = [AllowedDraw(None, -math.inf)] * len(lines)
        elif params.temperature:
            probs = probabilities(masked, params)
            draws = [draw_allowed(probs, is_allowed, rng) for _ in lines]
        else:
            # Greedy probabilities have only one token, which the check may reject.
            probs = probabilities(masked, SamplingParams(logit_bias=params.logit_bias))
            draws = [likeliest_allowed(probs, is_allowed)] * len(lines)
        for line, draw in zip(lines, draws, strict=True):
            self._accept(line, draw.token, raw, log_mask + draw.log_mass, params)

    def _accept(
        self,
        line: CheckedLine,
        token: int | None,
        raw: NDArray[np.float32],
        log_mass: float,
        params: SamplingParams,
    ) -> None:
        """Append a drawn token to a line, and end the line if it was the last one.

        Args:
            line: the line.
            token: id of the token; None if no token was allowed.
            raw: log-probability of each token, [V].
            log_mass: log of the estimated probability of all allowed tokens.
            params: sampling parameters of the line.
        """
        if token is None:
            line.finish_reason, line.is_forbidden = "stop", True
            return
        line.log_masses.append(log_mass)
        if token in self.ends:
            line.finish_reason = "stop"
            line.terminal = token in self.lm.text.stop_ids
            return
        token_bytes = self.lm.text.token_bytes(token)
        line.tokens.append(token)
        line.logprobs.append(float(raw[token]))
        line.text_bytes += token_bytes
        line.place = self.lm.place([token], after=line.place)
        if line.matcher is not None:
            line.matcher.accept(token)
        if line.stops.push(token_bytes) is not None:
            line.finish_reason = "stop"
        elif len(line.tokens) >= params.max_tokens:
            line.finish_reason = "length"
        elif line.place.depth >= self.lm.n_ctx:
            line.finish_reason = "context"

    def _passes(self, line: CheckedLine, token: int) -> bool:
        """Return True if the line with one more token passes all checks."""
        ended = token in self.ends
        new_bytes = b"" if ended else self.lm.text.token_bytes(token)
        # An incomplete character at the end is left out until it is complete.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(line.text_bytes + new_bytes, ended)
        return all(check(text, ended) for check in self.checks)


def _masked(
    logits: NDArray[np.float32], raw: NDArray[np.float32], matcher: Matcher | None
) -> tuple[NDArray[np.float32], float]:
    """Apply a constraint's mask: return the logits, -inf where forbidden, and a log-probability.

    The log-probability is that of all tokens that the mask allows together, 0 without a mask.

    raw: log-probability of each token, [V].
    """
    if matcher is None:
        return logits, 0.0
    bits = np.empty(n_words(len(logits)), dtype=np.int32)
    matcher.fill(bits)
    allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
    total = float(np.exp(raw[allowed].astype(np.float64)).sum())
    masked = np.where(allowed, logits, np.float32(-np.inf))
    return masked, math.log(total) if total > 0 else -math.inf


def _attach(line: CheckedLine, params: SamplingParams) -> Heddle:
    """Add a finished line as a child of its node; return the new node."""
    node = add_tokens(line.node, line.tokens)
    node.params, node.logprobs, node.legal_logmass = params, line.logprobs, line.log_masses
    node.finish_reason, node.terminal = line.finish_reason, line.terminal
    if line.is_forbidden:
        node.meta["closed"] = FORBIDDEN
    return node
