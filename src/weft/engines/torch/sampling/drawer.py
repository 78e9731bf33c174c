"""The draw of `sampling.sampler.Chain` on a device: same rule, same ids, nobody waits.

Where there is Triton it is two kernels (`kernel`). The same in operations of PyTorch, below: a
row's figures come from one pass over its raw logits. What it draws from, and by which noise, is
the business of `cuts` and `noise`; here the winner is found. Of all tokens of a row the `_REACH`
with the highest bounds are looked at: a token's bound is its height and the largest noise of its
group. A token outside of them could win only if more than `_REACH` bounds lay above the winner's
score. Bounds are first arrivals at 64 times a token's rate, so that each further one has at most 63
in 64 for coming before the winner, whatever the logits: the odds are 1e-14 a draw.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ...._core.sampling.metrics import MEMBERS, n_groups
from ...._core.sampling.sampler import BROKEN, NOTHING, DrawResult
from ....errors import ForwardError, WeftError, is_out_of_memory
from ...base import HostDraws
from ..cuda import is_for_triton
from ..execution import on_engine_stream
from . import filters
from .cpu_reductions import MANY_LOGITS, TorchPasses
from .filters import put, some
from .noise import NoiseOfGroups, group_noise
from .sampling_tensors import KNOWN_FILTERS, RankGroup, RowIndex, SamplingTensors

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

    from ...._core.sampling.sampler import Chain, DrawBatch
    from ..threads import CpuThreads

_log = logging.getLogger("weft.engines.torch")

_REACH = 2048
_SQUARE = MEMBERS * MEMBERS
# Where launches are dear and waiting is dearer. A host looks at the few tokens that can win, one
# after the other, and is done sooner.
DEVICES = frozenset(("cuda",))
# Rows are drawn for in blocks of this many logits at most: a draw's working memory is some 30 bytes
# a logit, 60 with top-p; by kernels 4, and only where logits are edited.
_BLOCK, _BLOCK_OF_KERNELS = 1 << 25, 1 << 27


class TorchDraws:
    """Tokens drawn on a device, and their figures on the way to the host.

    ids: int64 [B], on the device; NOTHING or BROKEN where there is no token.
    """

    __slots__ = ("_arrived", "_has_kept", "_host", "_result", "ids")

    def __init__(
        self, packed: Tensor, aside: torch.cuda.Stream | None = None, *, kept: bool = False
    ) -> None:
        """Start the copy to the host.

        packed: ids, then the bits of logprobs, entropies, `kept` (if asked) and legal_logmass
        (under constraints); see `pack`. aside: on a card, the stream of the copy.
        """
        self.ids = packed[0]
        self._has_kept = kept
        self._result: DrawResult | None = None
        self._arrived: torch.cuda.Event | None = None
        if aside is not None:
            self._host = torch.empty(packed.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            aside.wait_stream(torch.cuda.current_stream(packed.device))
            with torch.cuda.stream(aside):
                self._host.copy_(packed, non_blocking=True)
            packed.record_stream(aside)  # who made it may let it go before
            self._arrived = aside.record_event()
        else:
            self._host = packed

    def result(self) -> DrawResult:
        """Wait for the copy and return it; any thread may ask, as often as it likes.

        Raises: ForwardError if the device failed.
        """
        if self._result is None:
            if self._arrived is not None:
                try:
                    self._arrived.synchronize()
                except RuntimeError as error:
                    raise ForwardError(f"the device failed in a step: {error}") from error
            host = self._host.numpy()
            floats = host[1:].astype(np.int32).view(np.float32)
            more = list(floats[2:])
            kept = more.pop(0) if self._has_kept else None
            legal = more.pop(0) if more else None
            self._result = DrawResult(host[0].copy(), floats[0], floats[1], kept, legal)
        return self._result


def pack(ids: Tensor, figures: Tensor) -> Tensor:
    """Put ids int64 [B] and figures float32 [n, B] together, so that one copy brings both.

    Returns int64 [1 + n, B]: the figures as their bits.
    """
    return torch.cat((ids[None], figures.view(torch.int32).long()))


class TorchSampler:
    """Draws for chains on one device, and keeps their seats as long as they live.

    Belongs to the thread that steps. A steady step of a chain without penalties and constraints
    copies nothing to the device.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        kernels: bool | None = None,
        threads: CpuThreads | None = None,
    ) -> None:
        """kernels: draw by those of Triton; None: where a card and its Triton have them. threads:
        of a host's passes; None: PyTorch's.
        """
        self.device = device
        self._threads = threads
        self._is_left = False  # nothing here draws as the reference does
        self._aside: torch.cuda.Stream | None = None  # from the first draw on a card
        has_kernels = is_for_triton(device) if kernels is None else kernels
        self._kernels = _kernels() if has_kernels else None
        self._have_run: set[tuple[str, ...]] = set()  # by filters: each brings kernels of its own
        self._passes = TorchPasses()
        self._seated: WeakKeyDictionary[Chain, _Seated] = WeakKeyDictionary()

    @property
    def is_asked(self) -> bool:
        """Whether the device draws: one of DEVICES, while that was not left."""
        return self.device.type in DEVICES and not self._is_left

    @property
    def has_kernels(self) -> bool:
        """Whether it draws by kernels of Triton."""
        return self._kernels is not None

    def can(self, batch: DrawBatch) -> bool:
        """Return whether the device draws for a batch, all of whose filters are known."""
        return self.is_asked and batch.chain.asked_filters <= KNOWN_FILTERS

    def step_down(self, why: str) -> None:
        """Draw by the next slower way: operations of PyTorch for kernels, the host for those."""
        if self._kernels is not None:
            self._kernels = None
            self._seated.clear()  # blocks are smaller then
            way = "by operations of PyTorch, which is slower, as the kernels do not run here"
        else:
            self._is_left = True
            way = "on the host, which is slower, as the device does not draw as it should"
        _log.warning("tokens are drawn %s: %s", way, why)

    def on_host(self, logits: NDArray[np.float32], batch: DrawBatch) -> HostDraws:
        """Draw with the reference sampler, where there is much to read by PyTorch's passes.

        logits: float32 [R, V].
        """
        n_logits = len(batch.rows) * logits.shape[1]
        if n_logits < MANY_LOGITS:
            return HostDraws(batch.on_host(logits))
        with nullcontext() if self._threads is None else self._threads.limited(n_logits, "draw"):
            return HostDraws(batch.on_host(logits, self._passes))

    @torch.inference_mode()
    def draw(self, logits: Tensor, batch: DrawBatch) -> TorchDraws:
        """Draw for a batch; does not wait, and the host's arrays may change on return.

        logits: [R, V], raw, of any float dtype.
        Raises: ConfigError for a biased or counted token outside of the vocabulary.
        """
        packed = self.packed(logits, batch)
        if self._aside is None and packed.is_cuda:
            self._aside = torch.cuda.Stream(packed.device)
        return TorchDraws(packed, self._aside, kept=batch.kept)

    @torch.inference_mode()
    def packed(self, logits: Tensor, batch: DrawBatch) -> Tensor:
        """Draw as `draw` does, and leave what is drawn on the device: see `pack`."""
        with on_engine_stream(self.device):
            seated = self._seat(batch.chain, logits.shape[1])
            seated.update(batch)
            drawn = [
                self._of_block(logits, seats, place, kept=batch.kept)
                for seats, place in zip(seated.blocks, seated.places, strict=True)
            ]
            if len(drawn) > 1:
                return torch.cat(drawn, dim=1)
        if not drawn:
            shape = (4 if batch.kept else 3, 0)
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        return drawn[0]

    def _seat(self, chain: Chain, n_vocab: int) -> _Seated:
        seated = self._seated.get(chain)
        if seated is None:
            # Rows that ask for typical_p are ranked by PyTorch's operations either way.
            by_kernels = self._kernels is not None and "typical_p" not in chain.asked_filters
            most = _BLOCK_OF_KERNELS if by_kernels else _BLOCK
            seated = self._seated[chain] = _Seated(chain, n_vocab, self.device, most)
        return seated

    def _of_block(
        self, logits: Tensor, seats: SamplingTensors, place: RowIndex, *, kept: bool
    ) -> Tensor:
        drawn = self._drawn(logits, seats, place, kept=kept)
        if seats.allowed is None:
            return drawn
        legal = filters.legal_logmass(place.of(logits), seats)
        return torch.cat((drawn, legal.view(torch.int32).long()[None]))

    def _drawn(
        self, logits: Tensor, seats: SamplingTensors, place: RowIndex, *, kept: bool
    ) -> Tensor:
        if self._kernels is not None:
            filters = tuple(seats.cut)
            try:
                chances = self._kernels.SampleArgs.of(logits, place, seats)
                drawn: Tensor = self._kernels.draw_tokens(chances, kept=kept)
            except Exception as error:
                # Triton compiles at the first use, for which a machine may lack what it takes.
                is_other = isinstance(error, WeftError) or is_out_of_memory(error)
                if is_other or filters in self._have_run:
                    raise
                self.step_down(f"{type(error).__name__}: {error}".partition("\n")[0])
            else:
                self._have_run.add(filters)
                return drawn
        seats.make_keys()
        return pack(*draw(place.of(logits).float(), seats, kept=kept))


def _kernels() -> ModuleType | None:
    try:
        from . import kernel
    except ImportError:  # no Triton
        return None
    return kernel


class _Seated:
    """A chain's seats, block by block, and what of the last step's host arrays they still hold."""

    def __init__(self, chain: Chain, n_vocab: int, device: torch.device, most: int) -> None:
        """most: logits of a block."""
        self._device = device
        self._n_vocab = n_vocab
        step = max(1, most // n_vocab)
        # Samplers, not the chain: it must go when nobody else holds it.
        self._members = [
            chain.samplers[first : first + step] for first in range(0, len(chain.samplers), step)
        ]
        self.blocks = [SamplingTensors.of(samplers, n_vocab, device) for samplers in self._members]
        self._rows: NDArray[np.int64] | None = None
        self.places: list[RowIndex] = []

    def update(self, batch: DrawBatch) -> None:
        """Write what is another for this step."""
        bits = batch.chain.allowed(self._n_vocab)
        first = 0
        for seats, samplers in zip(self.blocks, self._members, strict=True):
            last = first + len(samplers)
            seats.place(batch.positions[first:last])
            seats.count(samplers)
            if bits is not None:
                seats.allow(bits[first:last])
            first = last
        if self._rows is None or not np.array_equal(self._rows, batch.rows):
            self._rows = batch.rows.copy()
            ends = np.cumsum([len(samplers) for samplers in self._members])
            self.places = [
                RowIndex.at(rows, self._device) for rows in np.split(self._rows, ends)[:-1]
            ]


def draw(logits: Tensor, seats: SamplingTensors, *, kept: bool = False) -> tuple[Tensor, Tensor]:
    """Draw one token a row: ids int64 [B], and float32 [2, B] logprobs and entropies.

    logits: float32 [B, V], raw; not modified. kept: a third line, `DrawResult.kept`.
    A row that nothing is left to gets NOTHING, one whose logits are no numbers BROKEN.
    """
    peak = logits.amax(1)
    broken = ~peak.isfinite()
    raw = logits.masked_fill(broken[:, None], 0)
    peak = peak.masked_fill(broken, 0)
    log_total, entropies = _moments(raw, peak)
    edited = filters.edited(raw, seats)
    dead = torch.zeros_like(broken)
    if seats.allowed is not None or seats.bias is not None:
        dead = edited.amax(1).isneginf()
        edited = torch.where(dead[:, None], raw, edited)
    ids, left = _chosen(edited, seats, kept=kept)
    logprobs = raw.gather(1, ids[:, None])[:, 0] - peak - log_total
    ids = ids.masked_fill(dead, NOTHING).masked_fill(broken, BROKEN)
    figures = (logprobs, entropies, left) if kept else (logprobs, entropies)
    return ids, torch.stack(figures)


def _moments(raw: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each row's sum of exp(logit - peak), and its entropy."""
    below = raw - peak[:, None]
    weights = below.exp()
    total = weights.sum(1)
    mean = (below.clamp(min=-1e30) * weights).sum(1)  # -inf times 0 is no number
    log_total = total.log()
    return log_total, (log_total - mean / total).clamp(min=0)


def _chosen(edited: Tensor, seats: SamplingTensors, *, kept: bool) -> tuple[Tensor, Tensor]:
    """Return the drawn ids, and what they are among what was left, 0 for greedy rows."""
    ids = seats.streams.new_zeros(len(edited))
    left = edited.new_zeros(len(edited))
    if seats.greedy is not None:
        rows = seats.greedy.rows
        ids = put(ids, rows, some(edited, rows).argmax(1))  # of equals the first
    if seats.wide is None and not seats.ranked:
        return ids, left
    assert seats.keys is not None
    noise = group_noise(seats.keys, n_groups(edited.shape[1]))
    if seats.wide is not None:
        rows = seats.wide.rows
        won, share = _wide(some(edited, rows), seats, _heard(noise, rows), kept=kept)
        ids, left = put(ids, rows, won), put(left, rows, share)
    for rank in seats.ranked:
        won, share = _ranked(some(edited, rank.rows), seats, _heard(noise, rank.rows), rank)
        ids, left = put(ids, rank.rows, won), put(left, rank.rows, share)
    return ids, left


def _wide(
    logits: Tensor, seats: SamplingTensors, noise: NoiseOfGroups, *, kept: bool
) -> tuple[Tensor, Tensor]:
    """Draw for rows that are not ranked. logits: float32 [n, V], edited."""
    assert seats.wide is not None
    rows = seats.wide.rows
    early, late = some(seats.early, rows), some(seats.late, rows)
    top = logits.amax(1)
    logits = filters.left_of_wide(logits, seats)
    heat = (1 / (early * late)).float()
    below = logits - top[:, None]
    n = min(_REACH, logits.shape[1])
    places = _bounds(below, heat, noise).topk(n, dim=1, sorted=False).indices
    heights = (logits.gather(1, places).double() - top.double()[:, None]) / early[:, None]
    heights = heights / late[:, None]
    best = (heights + noise.of(places)).argmax(1, keepdim=True)
    won = places.gather(1, best)[:, 0]
    if not kept:
        return won, top
    log_total = (below * heat[:, None]).exp().sum(1).log()
    return won, heights.gather(1, best)[:, 0].float() - log_total


def _bounds(below: Tensor, heat: Tensor, noise: NoiseOfGroups) -> Tensor:
    """Return every token's height with the largest noise of its group: float32 [n, V]."""
    n_rows, n_vocab = below.shape
    largest = noise.largest.float()
    whole = n_vocab // _SQUARE * _SQUARE
    parts = []
    if whole:
        squares = below[:, :whole].view(n_rows, -1, MEMBERS, MEMBERS)
        columns = largest[:, : whole // MEMBERS].reshape(n_rows, -1, 1, MEMBERS)
        bounds = torch.addcmul(columns, squares, heat[:, None, None, None])
        parts.append(bounds.view(n_rows, whole))
    if whole < n_vocab:
        column = whole // MEMBERS + torch.arange(n_vocab - whole, device=below.device) % MEMBERS
        rest = torch.addcmul(largest.index_select(1, column), below[:, whole:], heat[:, None])
        parts.append(rest)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _ranked(
    logits: Tensor, seats: SamplingTensors, noise: NoiseOfGroups, rank: RankGroup
) -> tuple[Tensor, Tensor]:
    """Draw for rows of which the likeliest are ranked. logits: float32 [n, V], edited."""
    ids, heights, log_total = filters.ranking(logits, seats, rank.rows, rank.depth)
    if rank.depth > _REACH:
        bounds = heights + noise.largest.gather(1, ids >> 12 << 6 | ids & 63)
        places = bounds.topk(_REACH, dim=1, sorted=False).indices
        ids, heights = ids.gather(1, places), heights.gather(1, places)
    best = (heights + noise.of(ids)).argmax(1, keepdim=True)
    share = heights.gather(1, best)[:, 0] - log_total
    return ids.gather(1, best)[:, 0], share.float()


def _heard(noise: NoiseOfGroups, rows: Tensor | None) -> NoiseOfGroups:
    return noise if rows is None else noise.take(rows)
