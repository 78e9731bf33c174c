"""All engines and fakes over one small model; the expected values come from one plain forward.

`pytest tests/contract --engine module:Class` runs the tests on another engine, against its own
plain forward. The engine is created by `Class.load(folder)` of a small Llama with the embedded
model's tokenizer, or by `Class()` if it has no `load` of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.helpers import Exactness
from fake_server import ServerProcess
from fakes import HiddenFake, LateFake, OwnLoopFake, SequenceFake
from shallow import SLOT, shallow, shallow_gguf
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.base import Engine, Row
from weft.lm.lm import LM

ADDRESSED = ["numpy", "torch", "mlx", "llamacpp"]
ENGINES = [*ADDRESSED, "vllm"]
OPTIONAL = ["mlx", "llamacpp", "vllm"]  # run by `make test-engines`
KINDS = [*ENGINES, "paged", "whole", "sequence", "hidden", "ownloop", "late"]
WITH_KV = [*ADDRESSED, "paged", "sequence", "late"]

FAKES = {
    "sequence": SequenceFake,
    "hidden": HiddenFake,
    "ownloop": OwnLoopFake,
    "late": LateFake,
}
# MLX takes ten times NumPy's time on a CPU; full paths and an own loop take twice that of "hidden".
# They run these tests by default, the others by `-m slow`.
CORE = ("laws", "protocol", "capabilities", "heddles", "runs", "faults", "three_faces")
IN_CORE = ("mlx", "whole", "ownloop")
# These two fakes run these tests by default, the others by `make test-programs`.
FAKES_IN_LAWS = ("hidden", "late")
LAWS = ("laws", "protocol", "capabilities", "faults")
# Triton's interpreter takes seconds for microseconds of a GPU. Paged KV runs these tests by
# default, the others by `-m slow`.
PAGED_CORE = frozenset(
    {
        "test_2_extending_a_child_changes_no_siblings_logits",
        "test_5_export_free_load_changes_nothing",
        "test_5_offloading_and_bringing_back_changes_nothing",
        "test_6_a_clipped_path_equals_a_fresh_prefix",
        "test_pool_that_cannot_grow_gives_the_same",
        "test_unused_capacity_is_limited_by_growth_and_freed_by_settle",
    }
)
# How the tokens of a node come about is the same on all fakes: one of them runs these tests. The
# laws of their paths are in test_laws.
OF_NODES = frozenset({"test_9_next_token_logits_equal_a_plain_forward"})
# Tests that need no steps: a server only supports native runs.
OF_NATIVE_RUNS = frozenset(
    {
        "test_10_text_is_the_same_alone_and_in_a_batch_on_every_engine",
        "test_10_async_gives_the_same_as_sync",
        "test_10_streamed_tokens_are_the_runs_tokens",
        "test_failing_sink_fails_its_own_run_only",
        "test_run_that_reaches_the_context_limit_ends_there",
        "test_eight_threads_get_the_same_texts_as_alone",
        "test_equal_greedy_runs_are_one_run",
        "test_different_constraints_and_none_share_a_batch",
        "test_more_runs_than_a_step_has_tokens_all_end",
        "test_engine_info_is_consistent",
    }
)
N_SLOTS = 8192  # of engines that allocate their KV at once
GIVEN = "given"  # the engine that --engine names

Make = Callable[..., LM]
NewEngine = Callable[[], Engine]
NewNamed = Callable[[str], Engine]
Oracle = Callable[[Sequence[int]], NDArray[np.float32]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--engine")
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    for name, kinds in (("kind", KINDS), ("kv_kind", WITH_KV), ("new_engine", ENGINES)):
        if name in metafunc.fixturenames and not any(name in names for names in own):
            if name == "kind" and metafunc.function.__name__ in OF_NATIVE_RUNS:
                kinds = [*kinds, pytest.param("remote", marks=pytest.mark.remote)]
            if metafunc.function.__name__ in OF_NODES:
                kinds = [each for each in kinds if each not in ("sequence", "late")]
            is_core = metafunc.module.__name__.endswith(CORE)
            is_laws = metafunc.module.__name__.endswith(LAWS)
            is_paged_core = metafunc.function.__name__ in PAGED_CORE
            cases = [
                pytest.param(each, marks=pytest.mark.slow)
                if (each in IN_CORE and not is_core) or (each == "paged" and not is_paged_core)
                else pytest.param(each, marks=pytest.mark.programs)
                if each in FAKES_IN_LAWS and not is_laws
                else each
                for each in kinds
            ]
            metafunc.parametrize(name, [GIVEN] if given else cases, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "vllm" in _params(item).values():  # it leaves sockets to the collector
            item.add_marker(pytest.mark.filterwarnings("ignore"))
    if config.getoption("--engine"):
        laws = [item for item in items if GIVEN in _params(item).values()]
        config.hook.pytest_deselected(items=[item for item in items if item not in laws])
        items[:] = laws


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def load_engine(name: str, config: pytest.Config) -> Engine:
    """Load a model of its own, by an engine of Weft's or by the given one."""
    if name == GIVEN:
        module, _, attribute = config.getoption("--engine").partition(":")
        chosen = getattr(import_module(module), attribute)
        has_load = getattr(chosen.load, "__func__", None) is not vars(Engine)["load"].__func__
        engine: Engine = chosen.load(shallow()) if has_load else chosen()
        Exactness.dtype = engine.info.dtype
        return engine
    return LOADERS[name]()


def _load_numpy() -> Engine:
    from weft.engines.numpy import NumpyEngine

    return NumpyEngine.load(shallow())


def _load_torch() -> Engine:
    pytest.importorskip("torch", reason="torch is not installed")
    from weft.engines.torch import TorchEngine

    return TorchEngine.load(shallow(), dtype="float32")


def _load_paged() -> Engine:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")
    from weft.engines.torch import TorchEngine

    return TorchEngine.load(shallow(), dtype="float32", kv="paged")


def _load_recompute() -> Engine:
    """The torch engine for models without KV of single tokens, over one that would have it."""
    pytest.importorskip("torch", reason="torch is not installed")
    from transformers import AutoModelForCausalLM

    from weft.engines.torch.recompute.engine import RecomputeEngine

    model = AutoModelForCausalLM.from_pretrained(shallow())
    return RecomputeEngine(
        model.float(), "the test requests it", n_ctx=None, fingerprint="recompute"
    )


def _load_mlx() -> Engine:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from weft.engines.mlx import MlxEngine

    return MlxEngine.load(shallow(), dtype="float32")


def _load_llamacpp() -> Engine:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    file = shallow_gguf()
    from weft.engines.llamacpp import LlamaCppEngine

    return LlamaCppEngine.load(file, dtype="float32", kv_bytes=N_SLOTS * SLOT, n_threads=1)


def _load_remote() -> Engine:
    from weft.engines.remote import RemoteEngine

    server = ServerProcess(shallow())
    engine = RemoteEngine.load(server.base, tokenizer=Tokenizer.from_folder(shallow()))
    weakref.finalize(engine, server.stop)
    return engine


def _load_vllm() -> Engine:
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm_float32 import Float32Vllm

    return Float32Vllm.load(shallow())


LOADERS: dict[str, NewEngine] = {
    "numpy": _load_numpy,
    "torch": _load_torch,
    "paged": _load_paged,
    "whole": _load_recompute,
    "mlx": _load_mlx,
    "llamacpp": _load_llamacpp,
    "remote": _load_remote,
    "vllm": _load_vllm,
}


@pytest.fixture
def new_engine(request: pytest.FixtureRequest) -> Iterator[NewEngine]:
    """Load an engine of the test's own: it may be closed."""
    created: list[Engine] = []

    def load() -> Engine:
        created.append(load_engine(request.param, request.config))
        return created[-1]

    yield load
    for engine in created:
        engine.close()


@pytest.fixture(scope="session")
def text() -> Tokenizer:
    return Tokenizer.from_folder(shallow())


@pytest.fixture(scope="session")
def loaded(request: pytest.FixtureRequest) -> Iterator[NewNamed]:
    """Load an engine that all tests share, once."""
    there: dict[str, Engine] = {}

    def load(name: str) -> Engine:
        if name not in there:
            there[name] = load_engine(name, request.config)
        return there[name]

    yield load
    for engine in there.values():
        engine.close()


@pytest.fixture(scope="session")
def oracle(request: pytest.FixtureRequest, loaded: NewNamed) -> Oracle:
    """Raw logits after every token, by the model's own library: float32 [T, V]."""
    if request.config.getoption("--engine"):
        engine = loaded(GIVEN)

        def plain(ids: Sequence[int]) -> NDArray[np.float32]:
            output = engine.forward([Row((), list(ids), 0, None, tuple(range(len(ids))))])
            return np.stack([output.logits(i) for i in range(len(ids))])

        return plain
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(shallow(), dtype=torch.float32).eval()

    def run(ids: Sequence[int]) -> NDArray[np.float32]:
        with torch.no_grad():
            logits: NDArray[np.float32] = model(torch.tensor([list(ids)])).logits[0].numpy()
        return logits

    return run


@pytest.fixture
def make(loaded: NewNamed, text: Tokenizer) -> Iterator[Make]:
    """Make an LM over a shared engine, one at a time; afterwards nothing of it may be left."""
    created: list[LM] = []

    def finish(lm: LM) -> None:
        lm.tree.check()
        lm.driver.close()
        lm.tree.check()
        assert lm.tree.budget.unevictable == 0
        if lm.tree.fragments is not None:
            assert lm.tree.fragments.usage() == (0, 0)

    def make_lm(
        kind: str,
        wrap: Callable[[Engine], Engine] | None = None,
        *,
        kv_slots: int | None = None,
        offload_slots: int | None = None,
        **options: Any,
    ) -> LM:
        if created:
            finish(created.pop())
        engine = loaded("numpy" if kind in FAKES else kind)
        fake = FAKES.get(kind)
        if fake is not None:
            engine = fake(engine)
        if wrap is not None:
            engine = wrap(engine)
        for name, slots in (("kv_bytes", kv_slots), ("offload_bytes", offload_slots)):
            if slots is not None:
                options[name] = slots * engine.info.kv_bytes_per_token
        lm = LM(engine, text, **options)
        created.append(lm)
        return lm

    yield make_lm
    for lm in created:
        finish(lm)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kv_kind(request: pytest.FixtureRequest, loaded: NewNamed) -> str:
    """Kinds whose fragments are Weft's business: laws 2 and 4 to 7 are about those."""
    kind = str(request.param)
    if kind == GIVEN and loaded(GIVEN).info.kv == "hidden":
        pytest.skip("a hidden engine keeps its KV to itself")
    return kind
