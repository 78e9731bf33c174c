"""The load check as on a card: the paged memory is tried with its kernels, then the padded one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from transformers import (  # noqa: E402
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3NextConfig,
)

from cases import first_of  # noqa: E402
from families import build, plain_logits  # noqa: E402
from load_checks import SHORT  # noqa: E402
from weft.engines.base import Row  # noqa: E402
from weft.engines.torch import TorchEngine, check, select_backend  # noqa: E402
from weft.engines.torch import engine as torch_engine  # noqa: E402
from weft.engines.torch.output import TorchOutput  # noqa: E402
from weft.engines.torch.paged import cuda_graph, kernel, step  # noqa: E402
from weft.engines.torch.paged.step import PagedBackend  # noqa: E402
from weft.errors import ModelLoadError  # noqa: E402

if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.kernels]
CPU = torch.device("cpu")
DEVICE = CPU if kernel.is_interpreted() else torch.device("cuda")
IDS = [(7 * i + 3) % 60 for i in range(40)]
# The numbers of a check of full length, read before the tests of a run shorten it.
SIZES = {name: getattr(check, name) for name in SHORT}


class Trial:
    """Loads of a model as on a card: both memories are tried, and what is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.patch.setattr(
            torch_engine, "kv_backends", lambda *_: [PagedBackend, select_backend.PaddedBackend]
        )
        self.patch.setattr(torch_engine, "has_kernels", lambda *_: True)
        result = select_backend.step_graphs
        self.patch.setattr(torch_engine, "step_graphs", lambda graphs, *rest: result(True, *rest))

    def load(self, dtype: torch.dtype = torch.float32, far: int = 160) -> TorchEngine:
        """far: tokens of the long path; the interpreter is slow."""
        sizes = ("_FAR", far), ("_LONELY", 3), ("_MANY", 12), ("_PROGRAMS", 0), ("_COMPARED", 5)
        for name, n in sizes:
            self.patch.setattr(check, name, n)
        self.patch.setattr(step, "_SMALL_CHUNK", 4)
        engine = TorchEngine.adopt(build("llama", dtype).to(DEVICE))
        assert isinstance(engine, TorchEngine)
        self.patch.undo()
        got = engine.forward([Row((), IDS, 0, None, (39,))]).logits(0)
        np.testing.assert_allclose(got, plain_logits(build("llama"), IDS)[-1], atol=2e-2)
        return engine


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Trial:
    return Trial(monkeypatch)


def test_card_has_paged_kv_where_the_model_passes(
    trial: Trial, caplog: pytest.LogCaptureFixture
) -> None:
    engine = trial.load()
    assert isinstance(engine.fragments, PagedBackend)
    assert engine.stats()["captured"] == engine.stats()["replayed"] == 0  # its check is not counted
    assert engine.fragments.usage() == (0, 0)
    assert "padded" not in caplog.text


@pytest.mark.parametrize(
    "broken",
    first_of(["kernel", "frame", "narrow", "wide", "broad", "merge", "launch", "late"], n=2),
)
def test_card_whose_kernels_fail_has_padded_kv(
    trial: Trial, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    """Wrong everywhere, in tiles of one class over full blocks of keys, in merges of many parts,
    in a replayed graph; or they raise, then or later."""
    attend, fill, logits = step.tree_attention, cuda_graph.GraphBuffers.fill, TorchOutput.logits
    n_calls = 0

    def attend_wrongly(query: Any, keys: Any, values: Any, work: Any, *rest: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if broken == "launch":
            raise RuntimeError("CUDA error: no kernel image is available")
        items = getattr(work, broken, None)
        is_wrong = broken == "kernel" or (
            broken == "merge" and work.n_parts > kernel._MANY_PARTS * query.shape[1]
        )
        is_wrong |= items is not None and bool((items[:, 1] >= 64).any())
        return attend(query, keys, values, work, *rest) * (0.5 if is_wrong else 1)

    def fill_wrongly(self: Any, ids: Any, attended: Any) -> None:
        fill(self, 0 * ids, attended)

    def logits_late(self: Any, number: int) -> Any:
        nonlocal n_calls
        was, n_calls = n_calls, 0
        if was:  # a kernel of ours has run since
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return logits(self, number)

    trial.patch.setattr(step, "tree_attention", attend_wrongly)
    if broken == "frame":
        trial.patch.setattr(cuda_graph.GraphBuffers, "fill", fill_wrongly)
    if broken == "late":
        trial.patch.setattr(TorchOutput, "logits", logits_late)
    # Tiles of 128 rows are for half precision alone, where a prompt then has no smaller ones.
    is_tile = broken in ("narrow", "wide", "broad")
    dtype = torch.float16 if is_tile else torch.float32
    engine = trial.load(dtype, far=256 if broken == "broad" else 160)
    assert isinstance(engine.fragments, select_backend.PaddedBackend)
    assert engine.stats() == {}
    assert "KV of LlamaForCausalLM is stored in padded rows: " in caplog.text


@pytest.mark.parametrize(
    ("config", "n"),
    [
        (LlamaConfig(), 640),
        (MixtralConfig(), 640),  # 8 experts, 2 of them a token's
        (GptOssConfig(num_local_experts=128, num_experts_per_tok=4), 1024),
        (DeepseekV3Config(n_routed_experts=256, num_experts_per_tok=8), 1024),
        (Qwen3NextConfig(num_experts=512, num_experts_per_tok=10), 1639),
        (Qwen3NextConfig(num_experts=512, num_experts_per_tok=1), 2048),
    ],
)
def test_long_path_fills_large_tiles_of_experts(
    config: Any, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_FAR", SIZES["_FAR"])
    assert check.long_path_length(config) == n


class OutOfResources(Exception):
    """Stands for Triton's, which no interpreter raises."""


@pytest.mark.parametrize(
    ("too_large", "there"),
    [(["broad"], ["wide", "narrow"]), (["broad", "wide"], ["narrow"])]
    + [(["broad", "wide", "narrow"], [])],
)
@pytest.mark.slow
def test_card_whose_processors_have_less_room_has_smaller_tiles(
    trial: Trial, caplog: pytest.LogCaptureFixture, too_large: list[str], there: list[str]
) -> None:
    attend = step.tree_attention
    attended: set[str] = set()

    def attend_if_there_is_room(query: Any, keys: Any, values: Any, work: Any, *rest: Any) -> Any:
        used = {each for each in ("broad", "wide", "narrow") if len(getattr(work, each))}
        if used & set(too_large):
            raise OutOfResources("out of resource: shared memory, Required: 139264, limit: 101376")
        attended.update(used)
        return attend(query, keys, values, work, *rest)

    trial.patch.setattr(step, "tree_attention", attend_if_there_is_room)
    with caplog.at_level("INFO", "weft"):
        engine = trial.load(torch.float16, far=256)
    assert isinstance(engine.fragments, PagedBackend) == bool(there)
    assert attended >= set(there)
    assert "this GPU needs smaller tiles: out of resource" in caplog.text
    assert ("is stored in padded rows" in caplog.text) == (not there)


def test_broken_cuda_raises_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    select_backend.check_kernels(CPU, "it failed")
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(ModelLoadError, match="it failed.*'kv': 'padded'"):
        select_backend.check_kernels(torch.device("cuda"), "it failed")


def test_check_has_as_many_programs_as_another_variant_of_tiles_is_for() -> None:
    assert SIZES["_PROGRAMS"] == kernel._MANY_PROGRAMS


@pytest.mark.slow
def test_check_of_full_length_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, n in SIZES.items():
        monkeypatch.setattr(check, name, n)
    engine = TorchEngine.adopt(build("llama").to(DEVICE), kv="paged")
    assert isinstance(engine.fragments, PagedBackend)
