"""What a launch does for those after it: what it asks for of a weight, and when it waits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from compiled import compiled  # noqa: E402
from weft.engines.torch.paged import kernel, launches  # noqa: E402
from weft.engines.torch.paged.launches import Pieces, Ways, asked, early, pieces_of  # noqa: E402

if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.kernels]
DEVICE = torch.device("cpu" if kernel.is_interpreted() else "cuda")
N = 64  # pieces of a program


@triton.jit
def note_places(out_ptr, n_asked, n_each, row_bytes, N_BYTES: tl.constexpr, N: tl.constexpr):
    number = tl.program_id(0)
    at = launches.asked_at(number, n_asked, n_each, row_bytes, N_BYTES, N)
    tl.store(out_ptr + number * N + tl.arange(0, N), at)


def bytes_of(pieces: Pieces) -> set[int]:
    """Which bytes of a weight the programs ask for, as the kernel has it."""
    n_programs = triton.cdiv(pieces.n, N)
    out = torch.empty(n_programs * N, dtype=torch.int64, device=DEVICE)
    note_places[(n_programs,)](
        out, pieces.n, pieces.n_each, pieces.row_bytes, N_BYTES=pieces.n_bytes, N=N
    )
    return {at + i for at in out.tolist() for i in range(pieces.n_bytes)}


def weight(n_out: int, n_in: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.zeros(n_out, n_in, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "n_bytes", "each"),
    [
        ((100, 4096), 100 * 2048, 2048),
        ((100, 4096), 100 * 4000, 3 * 1024),  # whole pieces
        ((100, 4096), 100 * 700, 512),
        ((300, 4096), 300 * 300, 256),
        ((70, 96), 1 << 20, 128),  # rows are short
    ],
)
def test_the_first_bytes_of_all_rows_are_asked_for(
    shape: tuple[int, int], n_bytes: int, each: int
) -> None:
    pieces = pieces_of(weight(*shape), n_bytes, by_row=True)
    assert pieces is not None
    n_out, n_in = shape
    assert bytes_of(pieces) == {2 * n_in * row + i for row in range(n_out) for i in range(each)}


def test_the_first_rows_are_asked_for() -> None:
    pieces = pieces_of(weight(100, 4096), 70_000, by_row=False)
    assert pieces is not None
    assert bytes_of(pieces) == set(range(68 * 1024))


@pytest.mark.parametrize("by_row", [True, False])
def test_nothing_beyond_a_weight_is_asked_for(*, by_row: bool) -> None:
    pieces = pieces_of(weight(3, 1000), 1 << 30, by_row=by_row)
    assert pieces is not None
    assert max(bytes_of(pieces)) < weight(3, 1000).nbytes


def test_a_weight_that_lies_by_column_is_asked_for_from_its_beginning() -> None:
    pieces = pieces_of(weight(4096, 100).t(), 4096, by_row=True)
    assert pieces == Pieces(4, 1, 1024, 1024)


@pytest.mark.parametrize(
    "made",
    [
        weight(64, 2048)[:, :1024],  # rows with others between
        weight(64, 100),  # rows that do not begin at whole 16 bytes
        weight(1, 4096)[:, 1:],
        torch.zeros(4096),
    ],
    ids=["cut", "narrow", "shifted", "bias"],
)
def test_what_lies_otherwise_is_not_asked_for(made: Any) -> None:
    assert pieces_of(made, 1 << 20, by_row=True) is None


def test_too_little_a_row_is_not_asked_for() -> None:
    assert pieces_of(weight(4096, 4096), 4096 * 100, by_row=True) is None


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Any:
    """All ways on, as on a card that they are for."""
    monkeypatch.setattr(launches, "_is_for", lambda device: True)
    monkeypatch.setattr(
        launches._Chosen, "ways", Ways(True, short=1 << 16, turn=1 << 17, merge=1 << 18)
    )
    return launches._Chosen


def test_off_is_off() -> None:
    x = weight(8, 4096)
    assert launches._Chosen.ways == Ways()
    assert early(x) == {"IS_EARLY": False}
    for beside in ("short", "turn", "merge"):
        assert asked(beside, x, 1, x, 4).n_programs == 0
        assert asked(beside, x, 1, x, 4).named["ASK"] is None


@pytest.mark.usefixtures("ways")
def test_a_kernel_asks_for_what_its_way_says() -> None:
    x = weight(64, 4096)
    for beside, n_bytes in (("short", 1 << 16), ("turn", 1 << 17), ("merge", 1 << 18)):
        found = asked(beside, x, 1, x, 4)
        assert found.named["n_asked"] * found.named["ASK_BYTES"] == n_bytes
        assert found.n_programs == triton.cdiv(found.named["n_asked"], 128)


@pytest.mark.usefixtures("ways")
def test_many_tokens_ask_for_nothing() -> None:
    x = weight(64, 4096)
    assert asked("short", x, 128, x, 4).n_programs > 0
    assert asked("short", x, 129, x, 4).n_programs == 0


@pytest.mark.usefixtures("ways")
def test_who_does_not_say_what_follows_is_launched_as_usual() -> None:
    x = weight(64, 4096)
    assert early(x) == {"IS_EARLY": True, "launch_pdl": True}
    assert early(None) == {"IS_EARLY": False}
    assert asked("short", None, 1, x, 4).n_programs == 0


def test_ways_are_for_cards_from_9_0_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for number, capability in enumerate([(8, 0), (8, 9), (9, 0), (12, 0)]):
        there = torch.device("cuda", 90 + number)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert launches._is_for(there) == (capability >= (9, 0))
    launches._is_for.cache_clear()
    assert not launches._is_for(torch.device("cpu"))


ASKS = {"ASK": launches._ASK.format(n_bytes=1024), "ASK_BYTES": 1024, "ASKS": 128}
TURN = {"N_QUERIES": 32, "N_KV": 8, "DIM": 128, "PAD": 128, "BM": 8, "HAS_NORMS": True}
NORM = {"WIDTH": 4096, "PAD": 4096, "BM": 1, "IS_CENTRED": False, "HAS_WEIGHT": True}
GATE = {"WIDTH": 14336, "BT": 1, "BW": 1024, "ACTIVATION": "silu"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fixed", "n_warps", "n_weights"),
    [("turn_and_store", TURN, 4, 0), ("norm_rows", NORM, 8, 2), ("gate_and_multiply", GATE, 4, 0)],
)
def test_short_kernels_wait_before_they_read(
    name: str, fixed: dict[str, Any], n_warps: int, n_weights: int
) -> None:
    """Without a card. n_weights: loads of what is there for long."""
    asked = {**fixed, **ASKS, "IS_EARLY": True}
    made = compiled("paged.elementwise", name, {**asked, "num_warps": n_warps})
    assert (made.asks, made.loads_before, made.stack) == (1, n_weights, 0)
    plain = compiled("paged.elementwise", name, {**fixed, "num_warps": n_warps})
    assert (plain.asks, plain.loads_before) == (0, -1)
    assert made.registers <= 96


@pytest.mark.slow
@pytest.mark.parametrize("n_rows", kernel.TILES)
def test_tiles_wait_before_they_meet_keys(n_rows: int) -> None:
    fixed = kernel.tile_of(32, 8, 128, 128, n_rows, 2)
    asked = {"HAS_CAP": False, "HAS_WINDOW": False, "IS_WHOLE": False}
    plain = compiled("paged.kernel", "tree_attention_kernel", {**fixed, **asked})
    made = compiled("paged.kernel", "tree_attention_kernel", {**fixed, **asked, "IS_EARLY": True})
    assert (made.loads_before, made.stack, made.is_serial) == (0, 0, False)
    assert made.shared == plain.shared


@pytest.mark.slow
@pytest.mark.parametrize(("n_rows", "n_parts"), [(4, 4), (1, 16)])
def test_the_merge_waits_before_it_reads_parts(n_rows: int, n_parts: int) -> None:
    fixed = {"N_HEADS": 32, "VALUE_DIM": 128, "VALUE_PAD": 128, "BM": n_rows, "BP": n_parts}
    fixed |= {"AXIS": kernel.PARTS_AXIS, "HAS_SINKS": False, "num_warps": 4, "IS_EARLY": True}
    made = compiled("paged.kernel", "merge_attn_states_kernel", {**fixed, **ASKS})
    assert (made.asks, made.loads_before, made.stack) == (1, 0, 0)
