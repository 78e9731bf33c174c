"""Cutoffs of filters computed by Triton, compared with a sort of each row in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from weft.engines.torch.paged import kernel  # noqa: E402
from weft.engines.torch.sampling import topk_topp_kernel  # noqa: E402

# The interpreter, or a card where there is one and TRITON_INTERPRET is not set.
if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.kernels]
DEVICE = torch.device("cpu") if kernel.is_interpreted() else torch.device("cuda")
# So near to top-p's share rounding may decide: weights are float32, a 2**40th at threshold.
NEAR = 1e-5
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
TYPES = {"top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64}
EXTREME = 1 - 1e-12


class Row(NamedTuple):
    """The filters of a row of a batch."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    early: float = 1.0


def cutoffs_of(
    logits: Any, requested: list[Row], rows: Any = None, allowed: Any = None
) -> topk_topp_kernel.Cutoffs:
    """Edges on the device, of all filters that any row asks for."""
    rows = np.arange(len(requested)) if rows is None else rows
    given = {
        name: torch.tensor(
            [getattr(row, name) for row in requested], dtype=TYPES[name], device=DEVICE
        )
        for name, off in OFF.items()
        if any(getattr(row, name) != off for row in requested)
    }
    early = torch.tensor([row.early for row in requested], dtype=torch.float64, device=DEVICE)
    bits = None if allowed is None else torch.from_numpy(allowed).to(DEVICE)
    at = torch.from_numpy(np.asarray(rows, dtype=np.int64)).to(DEVICE)
    out = topk_topp_kernel.find_cutoffs(logits.to(DEVICE), at, early, allowed=bits, **given)
    assert (out.threshold.dtype, out.last.dtype) == (torch.float32, torch.int64)
    return topk_topp_kernel.Cutoffs(out.threshold.cpu(), out.last.cpu())


def kept(y: np.ndarray, edge: topk_topp_kernel.Cutoffs, b: int) -> np.ndarray:
    """The ids that an edge keeps, of those that can be drawn."""
    threshold, last = edge.threshold[b].item(), edge.last[b].item()
    level = (y == threshold) & (np.arange(len(y)) <= last)
    return np.flatnonzero(((y > threshold) | level) & (y > -np.inf))


class Naive(NamedTuple):
    """A row in order, by float64: ids that top-k left, their mass, and how many then are kept."""

    order: np.ndarray
    mass: np.ndarray
    n_by_mass: int
    n_by_floor: int

    @classmethod
    def from_row(cls, y: np.ndarray, requested: Row) -> Naive:
        y = y.astype(np.float64)
        ids = np.flatnonzero(y > -np.inf)
        order = ids[np.lexsort((ids, -y[ids]))][: requested.top_k or None]
        below = (y[order] - y[order[0]]) / requested.early
        mass = np.cumsum(np.exp(below))
        n = len(order)
        if requested.top_p != 1:
            n = 1 + int((mass[:-1] < requested.top_p * mass[-1]).sum())
        with np.errstate(divide="ignore"):
            return cls(order, mass, n, int((below >= np.log(requested.min_p)).sum()))

    def check(self, ids: np.ndarray, requested: Row) -> bool:
        """Return True if these are the ids; for others, prove that top-p was near."""
        n = len(ids)
        assert np.array_equal(ids, np.sort(self.order[:n])), "likelier first, equals by id"
        if n == min(self.n_by_mass, self.n_by_floor):
            return True
        assert requested.top_p != 1, (n, self.n_by_mass, self.n_by_floor, requested)
        assert 0 < n <= self.n_by_floor
        wanted = requested.top_p * self.mass[-1]
        assert n == 1 or self.mass[n - 2] < wanted * (1 + NEAR), requested
        assert n == self.n_by_floor or self.mass[n - 1] >= wanted * (1 - NEAR), requested
        return False


def random_row(random: np.random.Generator, n_vocab: int) -> Row:
    """Any combination: each filter is left alone as often as not."""

    def maybe(options: list[Any], neutral: Any) -> Any:
        return options[random.integers(len(options))] if random.random() < 0.5 else neutral

    return Row(
        top_k=maybe([1, 2, 7, 40, 100, n_vocab // 2, n_vocab, 10 * n_vocab], 0),
        top_p=maybe([1e-9, 0.1, 0.5, 0.9, 0.99, EXTREME], 1.0),
        min_p=maybe([1e-9, 0.01, 0.2, 1.0], 0.0),
        early=maybe([0.3, 0.8, 1.7, 1e-30, 1e30], 1.0),
    )


def random_logits(random: np.random.Generator, n: int, n_vocab: int, dtype: Any) -> Any:
    """Peaked, flat, level but for the last bits, rounded so that many are equal, and with holes."""
    scale = random.choice([1e-6, 0.1, 1, 3, 8], (n, 1))
    logits = random.standard_normal((n, n_vocab)) * scale + random.choice([-15, 0, 5], (n, 1))
    rounded = random.random((n, 1)) < 0.4
    logits = np.where(rounded, np.round(logits * 2) / 2, logits)
    signs = np.where(random.random((n, n_vocab)) < 0.5, -0.0, 0.0)
    logits = np.where(logits == 0, signs, logits)
    holes = random.random((n, 1)) < 0.2
    logits = np.where(holes & (random.random((n, n_vocab)) < 0.3), -np.inf, logits)
    return torch.from_numpy(logits.astype(np.float32)).to(dtype)


def random_masks(random: np.random.Generator, n: int, n_vocab: int) -> tuple[Any, np.ndarray]:
    """Return allowed tokens per row, bool [n, V], and as bits: few, half, nearly all or all."""
    share = random.choice([0.02, 0.5, 0.99, 1], (n, 1))
    allowed = random.random((n, n_vocab)) < share
    allowed[:, random.integers(n_vocab)] = True
    padded = np.zeros((n, -(-n_vocab // 32) * 32 + 32), dtype=np.uint8)
    padded[:, :n_vocab] = allowed
    return allowed, np.packbits(padded, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("n_vocab", "tile", "rounds", "n"),
    [(150, 64, 2, 8), (700, 256, 2, 8), (4500, 4096, 2, 7), (9000, 4096, 2, 6)],
)
def test_edges_are_those_of_a_sorted_row(
    n_vocab: int, tile: int, rounds: int, n: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any filters and logits, mixed in one batch, several on a row; near shares are rare."""
    monkeypatch.setattr(topk_topp_kernel, "TILE", tile)
    n_near = 0
    for seed in range(rounds):
        random = np.random.default_rng((n_vocab, len(dtype), seed))
        logits = random_logits(random, n, n_vocab, getattr(torch, dtype))
        rows = random.integers(n, size=n) if seed % 2 else random.permutation(n)
        requested = [random_row(random, n_vocab) for _ in range(n)]
        allowed, bits = random_masks(random, n, n_vocab) if seed % 2 else (None, None)
        n_near += n_not_the_same(logits, requested, rows, allowed, bits)
    assert n_near <= 1


@pytest.mark.slow
def test_edges_are_those_of_a_sorted_row_of_many() -> None:
    n_near = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        n_vocab = int(random.choice([3, 64, 150, 700, 4096, 4500, 9000, 33000]))
        dtype = [torch.float32, torch.bfloat16, torch.float16][seed % 3]
        logits = random_logits(random, 12, n_vocab, dtype)
        rows = random.integers(12, size=24)
        requested = [random_row(random, n_vocab) for _ in rows]
        allowed, bits = random_masks(random, 24, n_vocab) if seed % 2 else (None, None)
        n_near += n_not_the_same(logits, requested, rows, allowed, bits)
    assert n_near <= 40 * 24 / 100


def n_not_the_same(
    logits: Any, requested: list[Row], rows: np.ndarray, allowed: Any, bits: Any
) -> int:
    """Check every row; return how many near shares there were, but for one beyond all rounding."""
    out, n = cutoffs_of(logits, requested, rows, bits), 0
    for b, row in enumerate(requested):
        y = logits[int(rows[b])].float().numpy()
        y = y if allowed is None else np.where(allowed[b], y, -np.inf)
        if (y > -np.inf).any():
            n += not Naive.from_row(y, row).check(kept(y, out, b), row) and row.top_p != EXTREME
    return n


def test_first_ids_of_equals_on_a_cutoff_are_kept() -> None:
    """A row of few values: edges lie in the middle of equals, in any tile."""
    logits = np.repeat(np.array([[2.0, 1.0, -0.0]], dtype=np.float32), 3000, axis=1)
    logits = np.random.default_rng(0).permuted(logits, axis=1)
    requested = [Row(top_k=k) for k in (1, 2900, 3000, 4700, 8999)]
    requested += [Row(top_p=p) for p in (1e-9, 0.3, 0.77, 0.999)]
    requested += [Row(top_k=4000, top_p=p) for p in (0.5, 0.9, EXTREME)]
    requested += [Row(top_k=4000, min_p=0.5), Row(top_k=4000, min_p=0.1), Row(min_p=1.0)]
    out = cutoffs_of(torch.from_numpy(logits), requested, np.zeros(len(requested), dtype=np.int64))
    for b, row in enumerate(requested):
        assert Naive.from_row(logits[0], row).check(kept(logits[0], out, b), row), row
    assert out.last[2] == 9000, "all equals are kept, so the last one is not searched"
    assert len(set(out.last[[1, 3, 6]].tolist())) == 3


def test_row_without_filters_keeps_all_tokens() -> None:
    logits = torch.randn((2, 100), generator=torch.Generator().manual_seed(0))
    for requested in (
        [Row(), Row()],
        [Row(), Row(top_k=3, top_p=0.5, min_p=0.9)],
        [Row(), Row(100)],
    ):
        out = cutoffs_of(logits, requested)
        assert (out.threshold[0], out.last[0]) == (-np.inf, 100)


def test_cutoffs_of_no_rows_are_empty() -> None:
    assert len(cutoffs_of(torch.zeros((1, 50)), []).threshold) == 0


def test_row_has_the_same_edge_alone_as_in_company() -> None:
    random = np.random.default_rng(1)
    logits = random_logits(random, 6, 700, torch.float32)
    requested = [
        Row(40, 0.9),
        Row(0, 0.99),
        Row(min_p=0.1),
        Row(),
        Row(3),
        Row(300, 0.5, 0.01, 0.3),
    ]
    complete = cutoffs_of(logits, requested)
    for b, row in enumerate(requested):
        alone = cutoffs_of(logits, [row], [b])
        assert (alone.threshold[0], alone.last[0]) == (complete.threshold[b], complete.last[b])


def test_broken_and_empty_rows_do_not_affect_other_rows() -> None:
    logits = torch.randn((7, 300), generator=torch.Generator().manual_seed(1))
    clean = logits.clone()
    logits[1], logits[2, 7], logits[3, 8], logits[4, 9] = (
        -torch.inf,
        torch.nan,
        torch.inf,
        -torch.nan,
    )
    logits[5] = torch.nan
    bits = np.full((7, 10), -1, dtype=np.int32)
    bits[6] = 0
    for row in (Row(5, 0.9, 0.1), Row(5), Row(top_p=0.9), Row(min_p=0.1)):
        out, want = cutoffs_of(logits, [row] * 7, allowed=bits), cutoffs_of(clean, [row] * 7)
        assert (out.threshold[0], out.last[0]) == (want.threshold[0], want.last[0])
        assert not out.threshold.isnan().any()
        assert ((out.last >= 0) & (out.last <= 300)).all()


def test_cutoff_of_min_p_is_the_smallest_float32_that_passes() -> None:
    random = np.random.default_rng(2)
    top = (random.standard_normal(60) * 10).astype(np.float32)
    min_p = random.choice([0.01, 0.2, 0.5, 1.0, 1e-9], 60)
    early = random.choice([0.3, 1.0, 2.0], 60)
    requested = [Row(min_p=p, early=heat) for p, heat in zip(min_p, early, strict=True)]
    out = cutoffs_of(torch.from_numpy(np.repeat(top[:, None], 3, axis=1)), requested)
    threshold = out.threshold.cpu().numpy()
    for value, kept in ((threshold, True), (np.nextafter(threshold, np.float32(-np.inf)), False)):
        assert (((value.astype(np.float64) - top) / early >= np.log(min_p)) == kept).all()


# Launches of each call, with the one that clears the sums.
LAUNCHES = [
    (Row(min_p=0.1), "float32", 2),
    (Row(top_k=40), "float32", 7),
    (Row(top_k=40), "bfloat16", 6),
    (Row(top_p=0.9, min_p=0.1), "float32", 7),
    (Row(top_p=0.9), "bfloat16", 6),
    (Row(40, 0.9, 0.1), "float32", 10),
    (Row(40, 0.9, 0.1), "bfloat16", 8),
]


@pytest.mark.parametrize(("requested", "dtype", "n"), LAUNCHES)
def test_edge_takes_few_launches(
    requested: Row, dtype: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing in between: no tensor of the row's size, no copy, no question to the device."""
    launched: list[str] = []
    monkeypatch.setattr(
        topk_topp_kernel._Search,
        "_launch",
        lambda self, kernel, **_: launched.append(kernel.__name__),
    )
    meta = torch.device("meta")
    given = {
        name: torch.zeros(4, dtype=TYPES[name], device=meta)
        for name, off in OFF.items()
        if getattr(requested, name) != off
    }
    logits = torch.empty((4, 9000), dtype=getattr(torch, dtype), device=meta)
    rows, early = (torch.zeros(4, dtype=kind, device=meta) for kind in (torch.int64, torch.float64))
    with Watching() as watching:
        topk_topp_kernel.find_cutoffs(logits, rows, early, **given)
    result = [name for name in watching.ran if name != "empty"]
    assert result == (["zeros"] if len(launched) > 2 else [])
    assert len(launched) + len(result) == n


class Watching(TorchDispatchMode):
    """Notes PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


_COMPILE = """
import re, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weft.engines.torch.sampling import edges

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
POINTERS |= {torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32"}


class Compiling(edges._Search):
    def _launch(self, kernel, **more):
        values, names = self._values | more, kernel.arg_names
        fixed = {name for name in names if name.isupper()}
        aligned = [i for i, name in enumerate(names) if name.endswith("_ptr") or name == "stride"]
        kinds = {
            name: POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            for name, value in values.items()
        }
        source = ASTSource(
            kernel,
            {name: "constexpr" if name in fixed else kinds[name] for name in names},
            {(names.index(name),): values[name] for name in fixed},
            {(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        target = GPUTarget("cuda", 90, 32)
        binary = triton.compile(source, target=target, options={"num_warps": 8})
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            usage = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
        stack, registers = (re.search(of + ":([0-9]+)", usage)[1] for of in ("STACK", "REG"))
        print(kernel.__name__, binary.metadata.shared, stack, registers)


logits = torch.empty((4, 128256), dtype=getattr(torch, sys.argv[1]))
rows, early = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.float64)
bits = torch.zeros((4, 4008), dtype=torch.int32) if sys.argv[2] == "masked" else None
for k, p in ((rows, early), (rows, None), (None, early), (None, None)):
    Compiling(logits, rows, early, k, p, early, bits).run(torch.empty(4), rows)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("masked", ["masked", "free"])
def test_passes_compile_for_sm_90(dtype: str, masked: str) -> None:
    """Without a card: nothing spills, and two programs share a processor."""
    command = [sys.executable, "-W", "ignore", "-c", _COMPILE, dtype, masked]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == (9 + 6 + 6 + 2 if dtype == "float32" else 7 + 5 + 5 + 2)
    for name, shared, stack, registers in lines:
        assert int(shared) <= 64 * 1024, name
        assert int(stack) == 0, name
        assert int(registers) <= 128, name
