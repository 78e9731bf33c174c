"""A mixture's experts as four kernels: which are fused, and their results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from transformers.integrations.moe import use_experts_implementation  # noqa: E402

from compiled import compiled  # noqa: E402
from families import IDS, build, plain_logits, stepped  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.attention_hook import attach_context  # noqa: E402
from weft.engines.torch.fused.activations import FUNCTIONS, gate_of, gated  # noqa: E402
from weft.engines.torch.fused.experts import fuse_experts  # noqa: E402
from weft.engines.torch.kv_backend import GatedActivation, MoEWeights  # noqa: E402
from weft.engines.torch.paged import experts as kernels  # noqa: E402
from weft.engines.torch.paged import kernel, step  # noqa: E402

if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.kernels,
    pytest.mark.usefixtures("one_load_check"),
]
DEVICE = torch.device("cpu" if kernel.is_interpreted() else "cuda")
MIXTURES = {"mixtral": 3, "qwen2_moe": 3, "afmoe": 2, "deepseek_v3": 2, "gpt_oss": 3}
NEAR = {torch.float32: 1e-6, torch.float16: 1e-3}  # of the spread


def actual(model: Any) -> list[Any]:
    attach_context(model)
    n = fuse_experts(model, next(model.parameters()).dtype)
    forms = [module.__dict__.get("weft_form") for module in model.modules()]
    assert sum(form is not None for form in forms) == n
    return [form for form in forms if form is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [*MIXTURES, "phi3"])
def test_experts_of_a_family_are_patched(name: str, dtype: str) -> None:
    """Also those with the limits of gpt_oss."""
    forms = actual(build(name, getattr(torch, dtype)))
    assert len(forms) == MIXTURES.get(name, 0)
    gate = (
        GatedActivation("silu", 7.0, 1.702, 1.0, are_neighbours=True)
        if name == "gpt_oss"
        else GatedActivation("silu")
    )
    assert [form.gate for form in forms] == [gate] * len(forms)


@use_experts_implementation
class Mixture(torch.nn.Module):
    """One as families write it, but for what a subclass does."""

    def __init__(self, config: Any, act: str = "silu") -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(0)
        self.num_experts = 6
        self.gate_up_proj = torch.nn.Parameter(torch.randn(6, 48, 16, generator=seeded) / 4)
        self.down_proj = torch.nn.Parameter(torch.randn(6, 16, 24, generator=seeded) / 4)
        self.act_fn = {"silu": torch.nn.SiLU(), "relu": torch.nn.ReLU()}[act]

    def forward(self, x: Any, chosen: Any, shares: Any) -> Any:
        out = torch.zeros_like(x)
        for token, (ids, token_shares) in enumerate(zip(chosen, shares, strict=True)):
            for n, share in zip(ids, token_shares, strict=True):
                between = self._apply_gate(
                    torch.nn.functional.linear(x[token], self.gate_up_proj[n])
                )
                out[token] += torch.nn.functional.linear(between, self.down_proj[n]) * share
        return out


class Scaled(Mixture):
    def forward(self, *given: Any) -> Any:
        return super().forward(*given) * 1.25


class SharesFirst(Mixture):
    """Shares of what goes in, not of what comes out."""

    def forward(self, x: Any, chosen: Any, shares: Any) -> Any:
        ones = torch.ones_like(shares)
        return super().forward(x * shares.sum(-1, keepdim=True), chosen, ones)


class CutOff(Mixture):
    def _apply_gate(self, both: Any) -> Any:
        gate, up = both.chunk(2, -1)
        return torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)


class CutOffFarOut(Mixture):
    """A mixture whose limits change large numbers only."""

    def _apply_gate(self, both: Any) -> Any:
        return super()._apply_gate(both).clamp(-100, 100)


def mixture(kind: Any = Mixture, implementation: str = "eager", **changed: Any) -> Any:
    created = kind(SimpleNamespace(_experts_implementation=implementation), **changed)
    assert created.has_gate
    return created


def test_modules_that_compute_something_else_are_not_fused() -> None:
    patched = mixture()
    patched.forward = lambda *given: 0
    spread, mixed_up = mixture(), mixture()
    spread._is_expert_parallel = True
    mixed_up.down_proj = torch.nn.Parameter(torch.zeros(6, 16, 24, dtype=torch.float64))
    normed = mixture()
    normed.has_post_expert_norm = True
    for other in (mixture(Scaled), mixture(SharesFirst), patched, spread, mixed_up, normed):
        assert actual(other) == [], type(other).__name__
    assert actual(mixture(implementation="batched_mm")) == []  # its owner chose


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_with_their_own_gate_code_are_patched(implementation: str) -> None:
    (usual,) = actual(mixture(implementation=implementation))
    assert usual.gate == GatedActivation("silu")
    (cut_off,) = actual(mixture(CutOff, implementation))
    assert cut_off.gate == GatedActivation("silu", 10.0)
    by_instance = mixture(implementation=implementation)
    by_instance._apply_gate = lambda both: both.chunk(2, -1)[1]
    others = [mixture(act="relu"), mixture(CutOffFarOut, implementation), by_instance]
    assert [form.gate for other in others for form in actual(other)] == [None] * 3


class Given:
    """Random tokens, weights and choices of a mixture."""

    def __init__(self, n: int, k: int, n_experts: int, size: int, between: int, dtype: Any) -> None:
        seeded = torch.Generator().manual_seed(n + n_experts)

        def normal(*shape: int) -> Any:
            numbers = torch.randn(*shape, generator=seeded) / shape[-1] ** 0.5
            return numbers.to(DEVICE, dtype)

        self.x = normal(n, size) * size**0.5
        self.up, self.down = normal(n_experts, 2 * between, size), normal(n_experts, size, between)
        self.up_bias, self.down_bias = normal(n_experts, 2 * between), normal(n_experts, size)
        few = [torch.randperm(n_experts, generator=seeded)[:k] for _ in range(n)]
        self.chosen = torch.stack(few).to(DEVICE)
        self.shares = torch.rand(n, k, generator=seeded).to(DEVICE, dtype)

    def want(self, experts: MoEWeights) -> Any:
        """Pair by pair, in float64."""
        out = torch.zeros(self.x.shape, dtype=torch.float64, device=DEVICE)
        weights = [None if w is None else w.double() for w in experts[:4]]
        up, down, up_bias, down_bias = weights
        for (token, j), n in np.ndenumerate(self.chosen.cpu().numpy()):
            if not 0 <= n < len(down):
                continue
            between = up[n] @ self.x[token].double()
            between = between if up_bias is None else between + up_bias[n]
            if experts.gate is None:
                between = experts.between(between)
            else:
                between = gated(experts.gate, between)
            created = down[n] @ between
            created = created if down_bias is None else created + down_bias[n]
            out[token] += created * self.shares[token, j].double()
        return out

    def check(self, experts: MoEWeights) -> None:
        assert kernels.supports_fused_experts(self.x, self.chosen, self.shares, experts)
        created = kernels.fused_experts(self.x, self.chosen, self.shares, experts)
        want = self.want(experts)
        assert created.is_contiguous()
        assert (created.shape, created.dtype) == (self.x.shape, self.x.dtype)
        assert (created - want).abs().max() <= 5 * NEAR[self.x.dtype] * want.std()


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(
    ("n", "k", "n_experts", "size", "between"),
    [(1, 2, 4, 32, 16), (5, 2, 4, 36, 40), (70, 3, 5, 40, 24), (9, 8, 70, 16, 16),
     (20, 8, 70, 16, 16), (3, 1, 2, 300, 270)],
)  # fmt: skip
def test_kernels_give_what_each_pair_does(
    n: int, k: int, n_experts: int, size: int, between: int, dtype: Any
) -> None:
    """Fewer pairs than experts, as many, and many tiles of one; sizes that are no multiples of a
    tile's.
    """
    given = Given(n, k, n_experts, size, between, dtype)
    given.check(MoEWeights(given.up, given.down, gate=GatedActivation("silu")))


GATES = [
    *map(GatedActivation, FUNCTIONS),
    GatedActivation("silu", limit=0.5),
    GatedActivation("silu", limit=0.75, slope=1.702, shift=1.0, are_neighbours=True),
    GatedActivation("gelu", shift=-0.5, are_neighbours=True),
]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_fused_experts_accept_transposed_weights_and_any_gate(
    gate: GatedActivation, *, has_bias: bool
) -> None:
    given = Given(12, 2, 3, 40, 24, torch.float32)
    biases = (given.up_bias, given.down_bias) if has_bias else (None, None)
    turned = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (given.up, given.down)]
    given.check(MoEWeights(given.up, given.down, *biases, gate))
    given.check(MoEWeights(*turned, *biases, gate))


@pytest.mark.parametrize("gate", GATES[-3:])
def test_nan_stays_nan_below_a_limit(gate: GatedActivation) -> None:
    """So that a broken model is noticed."""
    given = Given(5, 1, 2, 32, 16, torch.float32)
    given.x[3, 5] = float("nan")
    created = kernels.fused_experts(
        given.x, given.chosen, given.shares, MoEWeights(given.up, given.down, gate=gate)
    )
    assert created.isnan().all(1).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("gate", GATES)
def test_gates_are_known_by_what_they_make(gate: GatedActivation) -> None:
    assert gate_of(lambda rows: gated(gate, rows)) == gate
    assert gate_of(lambda rows: gated(gate, rows.float())) == gate
    assert gate_of(lambda rows: gated(gate, rows) * 1.01) is None
    assert gate_of(lambda rows: gated(gate, rows.roll(1, -1))) is None
    assert gate_of(lambda rows: rows) is None


def test_function_between_the_products_may_be_any_function_of_rows() -> None:
    given = Given(7, 2, 3, 40, 24, torch.float32)

    def own(both: Any) -> Any:
        return both[..., ::2].clamp(max=0.5) * (both[..., 1::2] + 1)

    given.check(MoEWeights(given.up, given.down, given.up_bias, given.down_bias, None, own))
    ungated = MoEWeights(given.up[:, :24], given.down, between=torch.relu)
    given.check(ungated)


def test_fused_experts_accept_strided_tokens_and_invalid_expert_ids() -> None:
    given = Given(9, 3, 4, 40, 24, torch.float32)
    apart = torch.zeros(9, 100, device=DEVICE)
    apart[:, 60:] = given.x
    given.x = apart[:, 60:]
    given.chosen[2], given.chosen[4, 1], given.chosen[5, 0] = 4, -1, 700
    given.shares[4, 1] = float("nan")
    given.check(MoEWeights(given.up, given.down, gate=GatedActivation("gelu")))
    given.chosen = given.chosen.int()
    given.check(MoEWeights(given.up, given.down, gate=GatedActivation("gelu")))
    none = kernels.fused_experts(
        given.x[:0],
        given.chosen[:0],
        given.shares[:0],
        MoEWeights(given.up, given.down, gate=GatedActivation("silu")),
    )
    assert none.shape == (0, 40)


def test_tiles_of_many_rows_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a prompt on a card."""
    given = Given(150, 2, 3, 40, 24, torch.float32)
    tile = kernels._MANY._replace(n_out=16, n_in=16)
    monkeypatch.setattr(kernels, "_tile_for", lambda *given: tile)
    given.check(MoEWeights(given.up, given.down, gate=GatedActivation("silu")))


def test_many_rows_are_a_librarys_where_the_module_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' own code is a loop that asks the host, and could not be captured."""
    given = Given(5, 2, 4, 32, 16, torch.float32)
    monkeypatch.setattr(kernels, "_is_for_library", lambda *given: True)
    usual = MoEWeights(given.up, given.down, gate=GatedActivation("silu"))
    assert kernels.supports_fused_experts(given.x, given.chosen, given.shares, usual)
    grouped = usual._replace(is_grouped=True)
    assert not kernels.supports_fused_experts(given.x, given.chosen, given.shares, grouped)
    for implementation in ("eager", "grouped_mm"):
        module = mixture(implementation=implementation)
        (form,) = actual(module)
        assert form.experts(module).is_grouped == (implementation == "grouped_mm")


def test_unsupported_experts_are_reported() -> None:
    given = Given(5, 2, 4, 32, 16, torch.float32)
    usual = MoEWeights(given.up, given.down, gate=GatedActivation("silu"))
    x, chosen, shares = given.x, given.chosen, given.shares
    assert kernels.supports_fused_experts(x, chosen, shares, usual)
    assert not kernels.supports_fused_experts(x[None], chosen, shares, usual)
    assert not kernels.supports_fused_experts(x.t().contiguous().t(), chosen, shares, usual)
    assert not kernels.supports_fused_experts(x.half(), chosen, shares, usual)
    assert not kernels.supports_fused_experts(x, chosen[:3], shares[:3], usual)
    assert not kernels.supports_fused_experts(x, chosen, shares[:, :1], usual)
    assert not kernels.supports_fused_experts(
        x, chosen, shares, usual._replace(up=given.up[:, :16])
    )
    assert not kernels.supports_fused_experts(
        x, chosen, shares, usual._replace(down=given.down[:, :16])
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if each == "gpt_oss" else pytest.mark.slow) for each in MIXTURES],
)
def test_model_gives_what_it_did_and_is_not_touched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_rows: list[int] = []

    def noted(x: Any, *more: Any) -> Any:
        n_rows.append(len(x))
        return kernels.fused_experts(x, *more)

    monkeypatch.setattr(step, "fused_experts", noted)
    model = build(name).to(DEVICE)
    kinds = [type(module) for module in model.modules()]
    engine = TorchEngine.adopt(model, kv="paged", graphs=False)
    n_rows.clear()
    got = stepped(engine)
    assert n_rows == MIXTURES[name] * [6] + MIXTURES[name] * (len(IDS) - 6) * [1]
    np.testing.assert_allclose(got, plain_logits(build(name), IDS).numpy(), atol=2e-4)
    assert [type(module) for module in model.modules()] == kinds


def _write(module: Any) -> None:
    module.down_proj.data.mul_(2)


def _replace(module: Any) -> None:
    module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.detach().flip(0).clone())


def _parametrise(module: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(module, "down_proj", torch.nn.Tanh())


def _activate(module: Any) -> None:
    module.act_fn = torch.nn.ReLU()


def _hook_the_activation(module: Any) -> None:
    module.act_fn.register_forward_hook(lambda module, given, created: created + 1)


def _hook_the_mixture(module: Any) -> None:
    module.register_forward_hook(lambda module, given, created: 2 * created)


CHANGES = [_write, _replace, _parametrise, _activate, _hook_the_activation, _hook_the_mixture]


@pytest.mark.parametrize("change", CHANGES)
def test_later_change_of_a_module_changes_the_result(change: Any) -> None:
    """In a step that has nothing but these kernels."""
    module = mixture().to(DEVICE)
    call = attach_context(module)
    assert fuse_experts(module, torch.float32) == 1
    given = Given(5, 2, 6, 16, 24, torch.float32)
    n_mixed: list[int] = []

    def mixed(x: Any, *more: Any) -> Any:
        n_mixed.append(len(x))
        return kernels.fused_experts(x, *more)

    def created() -> Any:
        return module(given.x, given.chosen, given.shares)

    in_step: Any = SimpleNamespace(
        has_fused_ops=True,
        supports_fused_experts=kernels.supports_fused_experts,
        fused_experts=mixed,
    )
    with torch.inference_mode():
        before = created()
        call.step = in_step
        torch.testing.assert_close(created(), before)
        assert n_mixed == [5]
    change(module)
    with torch.inference_mode():
        got = created()
        call.step = None
        torch.testing.assert_close(got, created())
        assert (got - before).abs().max() > 1e-2


# Bytes of shared memory that a block may have.
CARDS = {90: 232_448, 80: 166_912, 89: 101_376, 120: 101_376}


@pytest.mark.slow
@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("tile", ["_FEW", "_MANY", "_OF_FLOAT32"])
@pytest.mark.parametrize(
    ("gate", "sibling"),
    [(GatedActivation("silu"), "in"), (None, "in"), (None, "out"),
     (GatedActivation("silu", 7.0, 1.702, 1.0, are_neighbours=True), "out")],
)  # fmt: skip
def test_products_fit_a_card(
    capability: int, tile: str, gate: GatedActivation | None, sibling: str
) -> None:
    """Weights are read ahead, several at once, and nothing is spilled. sibling: which strides
    are 1: those of the summed numbers, or of the result.
    """
    size = getattr(kernels, tile)
    fixed = {
        "N_IN": 2048, "N_OUT": 768, "TOP_K": 8, "HAS_BIAS": False, **kernels._constants(gate),
        "IS_FIRST": gate is not None, "BM": size.n_rows, "BN": size.n_out, "BK": size.n_in,
        "PRECISION": "tf32x3", "num_warps": size.num_warps, "num_stages": size.num_stages,
        f"{sibling}_stride": 1,
    }  # fmt: skip
    kind = "fp32" if tile == "_OF_FLOAT32" else "bf16"
    kinds = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), kind)
    created = compiled(
        "paged.experts", "fused_moe_kernel", fixed, capability=capability,
        order_ptr="i32", tile_ptr="i32", **kinds,
    )  # fmt: skip
    assert created.stack == 0
    assert created.shared <= CARDS[capability]
    assert created.ahead >= size.num_stages - 1
    assert created.narrow == 0
    assert not created.is_serial
    assert created.has_wgmma == (tile == "_MANY" and capability == 90)


@pytest.mark.slow
def test_kernels_around_the_products_fit_a_card() -> None:
    grouped = {"N_EXPERTS": 128, "PAD": 128, "BM": 16, "num_warps": 8}
    close = grouped | {"BP": 64, "IS_CLOSE": True}
    apart = grouped | {"BP": 1024, "IS_CLOSE": False}
    added = {"N_EXPERTS": 128, "TOP_K": 8, "WIDTH": 2048, "PAD": 8, "BW": 512, "num_warps": 4}
    kinds = {"chosen_ptr": "i64", "order_ptr": "i32", "tile_ptr": "i32"}
    for name, fixed in (
        ("moe_align_kernel", close),
        ("moe_align_kernel", apart),
        ("moe_sum_kernel", added),
    ):
        created = compiled("paged.experts", name, fixed, **kinds)
        assert (created.stack, created.shared <= 16384) == (0, True)
