"""Captured steps: what is played over a frame is what the step gives that is run as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

import weft  # noqa: E402
from cases import first_of  # noqa: E402
from families import build, plain_logits  # noqa: E402
from shallow import shallow  # noqa: E402
from weft.engines.base import Row, Span  # noqa: E402
from weft.engines.torch import TorchEngine, weight_layout  # noqa: E402
from weft.engines.torch.engine import open_model  # noqa: E402
from weft.engines.torch.fused.decoder import FusedDecoder  # noqa: E402
from weft.engines.torch.paged import capture, cuda_graph, kernel, pool  # noqa: E402
from weft.engines.torch.paged.capture import replay_without_graph  # noqa: E402
from weft.engines.torch.paged.cuda_graph import bucket_of  # noqa: E402
from weft.errors import ConfigError  # noqa: E402

if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.kernels,
    pytest.mark.usefixtures("one_load_check"),
]
DEVICE = torch.device("cpu" if kernel.is_interpreted() else "cuda")


@pytest.fixture(autouse=True)
def _as_the_engine_does() -> Iterator[None]:
    with torch.inference_mode():
        yield


def engine_of(name: str = "llama", **options: Any) -> TorchEngine:
    result = TorchEngine.adopt(build(name).to(DEVICE), **{"kv": "paged", "graphs": True, **options})
    assert isinstance(result, TorchEngine)
    return result


class Leaves:
    """Rows of one token below a trunk of an engine, that grow."""

    def __init__(self, engine: TorchEngine, n: int, trunk: int = 9) -> None:
        self.engine = engine
        store = engine.fragments
        self.trunk = store.new(None)
        engine.forward([Row((), list(range(3, 3 + trunk)), 0, self.trunk)])
        path = (Span(self.trunk, trunk),)
        self.rows = [Row(path, [5 + i], trunk, store.new(None), (0,)) for i in range(n)]

    def step(self, n: int | None = None) -> Any:
        """Grow the first n leaves by a token; return their logits."""
        rows = self.rows[:n]
        output = self.engine.forward(rows)
        for row in rows:
            row.position += 1
            row.tokens = [(row.tokens[0] * 7 + row.position) % 120]
        return torch.stack([torch.from_numpy(output.logits(i)) for i in range(len(rows))])


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "gpt_oss"))]
)
def test_replayed_step_equals_a_plain_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves reserve more slots, end one by one, and continue."""
    monkeypatch.setattr(pool, "GROW_BY", 4)
    played, plain = engine_of(name), engine_of(name, graphs=False)
    ours, theirs = Leaves(played, 5), Leaves(plain, 5)
    for n in [5] * 4 + [4, 3, 3, 2] + [5] * 6:
        torch.testing.assert_close(ours.step(n), theirs.step(n), rtol=1e-4, atol=1e-4)
    message = played.stats()
    assert message["not_captured_because"] == ""
    assert message["replayed"] >= 10
    assert message["captured"] <= 3
    assert plain.stats() == {}


@pytest.mark.slow
def test_frame_serves_smaller_steps_and_forgets_them() -> None:
    """The padding of a graph attends to nothing, and writes into no slot of a row."""
    played, plain = engine_of(), engine_of(graphs=False)
    ours, theirs = Leaves(played, 8), Leaves(plain, 8)
    for n in [8] * 4 + [5, 8, 4, 7, 8]:
        torch.testing.assert_close(ours.step(n), theirs.step(n), rtol=1e-4, atol=1e-4)
    assert played.stats()["captured"] == 1
    assert played.stats()["replayed"] == 7  # all but two
    ours.step(5), theirs.step(5)
    ((frame, _),) = played._graphs._graphs.values()
    work = frame.work(2)
    n_rows = [int((items[:, 4] > 0).sum()) for items in work.by_tile]
    now = played.fragments._plan.work(2)
    assert n_rows == [len(items) for items in now.by_tile]
    assert frame.slots[5:].tolist() == [played.fragments.dummy_slot] * 3
    for mine, other in zip(ours.rows, theirs.rows, strict=True):
        one, two = (e.fragments.export(r.kv_out) for e, r in ((played, mine), (plain, other)))
        for name in one:
            if name != "dtype":
                torch.testing.assert_close(*(torch.from_numpy(k[name]) for k in (one, two)))


@pytest.mark.slow
def test_frames_of_single_parts_and_of_merged_ones_do_not_serve_each_other() -> None:
    """Rows alone below a trunk of their own have one part each, which is their output."""
    played, plain = engine_of(), engine_of(graphs=False)
    pairs = []
    for engine in (played, plain):
        alone, other = Leaves(engine, 1), Leaves(engine, 1, trunk=12)
        alone.rows += other.rows
        pairs.append((alone, Leaves(engine, 2)))
    ours, theirs = pairs
    for number in [0] * 4 + [1] * 4 + [0, 1, 0]:
        mine, other = ours[number].step(), theirs[number].step()
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
        assert played.fragments._plan.work(2).is_single == (number == 0)
    assert played.stats()["replayed"] >= 5


def test_frame_serves_as_leaves_end_and_others_join() -> None:
    """The plan changes beneath what was captured: its inputs are refilled."""
    played, plain = engine_of(), engine_of(graphs=False)
    ours, theirs = Leaves(played, 5), Leaves(plain, 5)
    for number in range(8):
        for leaves in (ours, theirs) if number > 3 else ():
            gone = leaves.rows.pop(number % 5)
            leaves.engine.fragments.free(gone.kv_out)
            fresh = leaves.engine.fragments.new(None)
            leaves.rows.insert(number % 3, Row(gone.prefix, [number], 9, fresh, (0,)))
        torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-4)
    assert played.stats()["captured"] == 1
    assert played.stats()["replayed"] == 6


def test_prompts_are_played_too() -> None:
    played, plain = engine_of(), engine_of(graphs=False)
    stored = Leaves(played, 1)  # a pool that has nothing in it may go
    for number in range(5):
        tokens = [(number * 13 + i * 5) % 120 for i in range(30)]
        rows = [[Row((), tokens, 0, None, (3, 29))] for _ in range(2)]
        one, two = (e.forward(r) for e, r in zip((played, plain), rows, strict=True))
        for at in (0, 1):
            got, want = (torch.from_numpy(o.logits(at)) for o in (one, two))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert played.stats()["replayed"] >= 3
    assert stored.trunk.length == 9


def test_pool_that_moves_takes_what_was_captured_with_it() -> None:
    played, plain = engine_of(), engine_of(graphs=False)
    ours, theirs = Leaves(played, 4), Leaves(plain, 4)
    for _ in range(5):
        ours.step(), theirs.step()
    captured = played.stats()["captured"]
    more = [e.fragments.new(None) for e in (played, plain)]
    for engine, fragment in zip((played, plain), more, strict=True):
        moves = engine.fragments.n_moves
        engine.fragments.reserve(fragment, 4000)
        assert engine.fragments.n_moves > moves
    for _ in range(4):
        torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-4)
    assert played.stats()["captured"] == captured + 1


def test_graphs_are_released_before_the_pool_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory may be what the pool needs."""
    engine = engine_of()
    leaves = Leaves(engine, 4)
    for _ in range(4):
        leaves.step()
    frames, pool, recorded = engine._graphs._graphs, engine.fragments, []
    resize = type(pool)._resize

    def noted(self: Any, n: int) -> None:
        recorded.append(len(frames))
        resize(self, n)

    monkeypatch.setattr(type(pool), "_resize", noted)
    assert frames
    pool.reserve(pool.new(None), 4000)
    assert recorded == [0]
    engine._graphs = None
    pool.reserve(pool.new(None), 8000)  # no graphs are left to release


def test_clear_caches_releases_the_graphs() -> None:
    engine = engine_of()
    leaves = Leaves(engine, 3)
    for _ in range(4):
        leaves.step()
    captured = engine.stats()["captured"]
    engine.clear_caches()
    for _ in range(3):
        leaves.step()
    assert engine.stats()["captured"] == captured + 1


def test_weights_that_are_written_in_place_leave_what_was_captured() -> None:
    """Between two steps of an optimizer nothing is captured again, and the new ones are read."""
    played, plain = engine_of(), engine_of(graphs=False)
    ours, theirs = Leaves(played, 3), Leaves(plain, 3)
    for _ in range(5):
        ours.step(), theirs.step()
    captured, moves = played.stats()["captured"], played.fragments.n_moves
    for engine in (played, plain):
        engine.model.get_parameter("model.layers.1.mlp.down_proj.weight").data.mul_(1.5)
        engine.refresh_weights()
    for _ in range(4):
        torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-4)
    assert (played.stats()["captured"], played.fragments.n_moves) == (captured, moves)


@pytest.mark.parametrize("name", first_of(["llama", "gemma3_text"]))
def test_hook_of_a_module_is_called_at_every_step(name: str) -> None:
    """A graph plays what the card did, and no Python."""
    engine = engine_of(name)
    leaves = Leaves(engine, 3)
    for _ in range(4):
        leaves.step()
    played, heard = engine.stats()["replayed"], []
    layer = engine.model.get_submodule("model.layers.1.mlp")
    hook = layer.register_forward_hook(lambda *_: heard.append(1))
    for _ in range(3):
        leaves.step()
    assert (len(heard), engine.stats()["replayed"]) == (3, played)
    hook.remove()
    leaves.step()
    assert (len(heard), engine.stats()["replayed"]) == (3, played + 1)


def test_weights_that_are_put_elsewhere_are_read_there() -> None:
    """As an owner does who sets `.data`: a graph would read where they were."""
    played, plain = engine_of(), engine_of(graphs=False)
    ours, theirs = Leaves(played, 3), Leaves(plain, 3)
    for _ in range(5):
        ours.step(), theirs.step()
    captured = played.stats()["captured"]
    for engine in (played, plain):
        weight = engine.model.get_parameter("model.layers.1.mlp.down_proj.weight")
        weight.data = weight.data * 1.5
    for _ in range(4):
        torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-4)
    assert played.stats()["captured"] == captured + 1


def test_buffers_that_are_put_elsewhere_are_noticed() -> None:
    model = build("llama")
    model.model.layers[0].register_buffer("scores", torch.zeros(3))
    model.model.layers[0].register_buffer("table", torch.zeros(3), persistent=False)
    engine = TorchEngine.adopt(model, kv="paged", graphs=True)
    before = engine._guard.addresses()
    stored = dict(engine.model.named_buffers())
    stored["model.layers.0.scores"].data = torch.ones(3)
    assert engine._guard.addresses() != before


@pytest.mark.parametrize(("n_short", "failure"), [(1, torch.OutOfMemoryError), (3, RuntimeError)])
@pytest.mark.slow
def test_failed_captures_are_retried_a_few_times(
    n_short: int,
    failure: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = []

    def is_short(run: Any) -> Any:
        tries.append(run)
        if len(tries) <= n_short:
            raise failure("CUDA was busy")
        return replay_without_graph(run)

    engine, plain = engine_of(), engine_of(graphs=False)
    monkeypatch.setattr(engine._graphs, "_record", is_short)
    ours, theirs = Leaves(engine, 3), Leaves(plain, 3)
    for _ in range(14):
        torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-4)
    message = engine.stats()
    if n_short == 1:
        assert (len(tries), message["not_captured_because"]) == (2, "")
        assert int(str(message["replayed"])) > 4
        assert not caplog.records
        assert engine._graphs._n_failed == 0  # of captures that fail in turn
    else:
        assert (len(tries), message["replayed"]) == (3, 0)
        assert "CUDA was busy" in str(message["not_captured_because"])


def test_step_that_cannot_be_captured_runs_eagerly_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_capture(run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    engine, plain = engine_of(), engine_of(graphs=False)
    monkeypatch.setattr(engine._graphs, "_record", fail_capture)
    ours, theirs = Leaves(engine, 3), Leaves(plain, 3)
    with caplog.at_level(logging.WARNING, logger="weft.engines.torch"):
        for _ in range(12):
            torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-4)
    assert len(caplog.records) == 1
    assert "not permitted when stream is capturing" in caplog.text
    assert "not permitted" in str(engine.stats()["not_captured_because"])
    assert engine.stats()["replayed"] == 0


def test_step_that_fails_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plain = engine_of(), engine_of(graphs=False)
    ours, theirs = Leaves(engine, 3), Leaves(plain, 3)
    for _ in range(4):
        ours.step(), theirs.step()

    def breaks(self: Any) -> None:
        raise RuntimeError("the card fell off")

    with monkeypatch.context() as patch:
        patch.setattr(capture._EagerStep, "replay", breaks)
        patch.setattr(FusedDecoder, "hidden", lambda *_: breaks(None))
        with pytest.raises(weft.errors.ForwardError, match="fell off"):
            engine.forward(ours.rows)
    assert [row.kv_out.length for row in ours.rows] == [4] * 3
    torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_step_that_cannot_be_played_is_run_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch 2.11 plays no graph while another thread captures one; then it does again."""
    engine, plain = engine_of(), engine_of(graphs=False)
    ours, theirs = Leaves(engine, 3), Leaves(plain, 3)
    replay, n_replays = capture._EagerStep.replay, 0

    def plays_at_times(self: Any) -> None:
        nonlocal n_replays
        n_replays += 1
        if n_replays % 3 == 1 or n_replays > 9:
            raise RuntimeError("Offset increment outside graph capture")
        replay(self)

    monkeypatch.setattr(capture._EagerStep, "replay", plays_at_times)
    for _ in range(16):
        torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-4)
    message = engine.stats()
    assert message["replayed"] == 5
    assert not caplog.records
    for _ in range(12):  # for good, now: it is not tried for ever
        torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-4)
    assert "Offset increment" in str(engine.stats()["not_captured_because"])
    assert n_replays == 12
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_many_frames_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "_MAX_GRAPHS", 1)
    engine = engine_of()
    for n in (1, 4, 12):
        leaves = Leaves(engine, n)
        for _ in range(4):
            leaves.step()
    assert engine.stats()["captured"] >= 2
    assert len(engine._graphs._graphs) == 1


def test_loom_grows_the_same_from_frames() -> None:
    texts = {}
    for graphs in (False, True):
        options = {"kv": "paged", "graphs": graphs}
        with weft.load(shallow(), dtype="float32", engine_options=options) as lm:
            loom = weft.Loom(lm, "Use 4 9 10 13 to make 24.")
            grown = loom.grow(n=3, max_tokens=8, seed=4)
            texts[graphs] = [node.text for node in grown]
            assert bool(lm.engine.stats()) == graphs
    assert texts[True] == texts[False]


def test_buckets_contain_their_steps_with_limited_padding() -> None:
    for n in range(1, 1025):
        assert n <= bucket_of(n) <= max(8, 1.5 * n + 1)
        assert n <= 128 or bucket_of(n) < n + 64
    assert bucket_of(512) == 512
    assert bucket_of(1024) == 1024


@pytest.mark.slow
def test_step_of_many_tokens_gets_a_frame_of_its_own_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products take as long as a graph has tokens, independent of the step that captured it."""
    monkeypatch.setattr(cuda_graph, "_MANY_TOKENS", 8)
    monkeypatch.setattr(cuda_graph, "_FINE", 8)
    engine = engine_of()
    leaves = Leaves(engine, 24)
    for n in [24] * 4 + [13] * 4:
        leaves.step(n)
    assert {key.n_tokens for key in engine._graphs._graphs} == {24, 16}
    played = engine.stats()["replayed"]
    leaves.step(14)
    assert engine.stats()["replayed"] == played + 1


def test_graphs_are_chosen_by_name() -> None:
    with pytest.raises(ConfigError, match="graphs has no effect"):
        TorchEngine.adopt(build("llama"), graphs=True)
    with pytest.raises(ConfigError, match="graphs"):
        TorchEngine.adopt(build("llama"), kv="paged", graphs="yes")


def test_replay_runs_over_what_its_tensors_hold() -> None:
    given = torch.ones(2)
    captured = replay_without_graph(lambda: given * 2)
    given.fill_(3)
    captured.replay()
    assert captured.hidden.tolist() == [6, 6]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2", "mistral"])
def test_heads_turned_in_one_kernel_give_the_models_own_logits(name: str) -> None:
    """The fused decoder over paged KV, weights side by side, equals Transformers' code."""
    with torch.inference_mode(False):
        model = build(name).to(DEVICE)
    want = [plain_logits(model, ids) for ids in ([5, 7, 11, 2], [5, 7, 9])]
    weight_layout.merge_sibling_weights(model)
    with torch.inference_mode(False):
        engine = open_model(model, n_ctx=None, fingerprint="x", state_bytes=None, kv="paged")
    assert engine._fused is not None
    trunk = engine.fragments.new(None)
    engine.forward([Row((), [5, 7], 0, trunk)])
    path = (Span(trunk, 2),)
    output = engine.forward([Row(path, [11, 2], 2, None, (0, 1)), Row(path, [9], 2, None, (0,))])
    got = torch.stack([torch.from_numpy(output.logits(i)) for i in range(3)])
    wanted = torch.stack([want[0][2], want[0][3], want[1][2]])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert isinstance(engine._current, FusedDecoder)


def test_weights_side_by_side_are_saved_alone(tmp_path: Path) -> None:
    with torch.inference_mode(False):
        model, plain = build("qwen2"), build("qwen2")
    weight_layout.merge_sibling_weights(model)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.data_ptr() > attention.q_proj.weight.data_ptr()
    places = {
        getattr(attention, n).weight.untyped_storage().data_ptr() for n in weight_layout.SIBLINGS[0]
    }
    assert len(places) == 1
    model.save_pretrained(tmp_path)
    repeated = type(model).from_pretrained(tmp_path)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(repeated.state_dict()[name], weight)
        torch.testing.assert_close(model.state_dict()[name], weight)
