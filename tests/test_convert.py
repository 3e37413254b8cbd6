"""State of torch.optim's and microsoft/dion's optimizers goes on here as it would have there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import WHOLE, Weights, by_fully_shard, gather, relative_error, scatter_like
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ortho_func
from ortho_func.optim.convert import from_dion, from_torch

EXACT = {"wire_dtype": torch.float32, "compute_dtype": torch.float32}
JORDAN = {**EXACT, "orthogonalizer": "jordan"}


def model_of(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    torch.manual_seed(0)
    return Weights({name: torch.randn(shape) for name, shape in shapes.items()})


def give_gradients(model: nn.Module, step: int, without: tuple[str, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        g = torch.randn(p.shape, generator=generator)
        p.grad = None if name in without else scatter_like(g, p)


def same(first: nn.Module, second: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        assert relative_error(gather(p), gather(q)) < tolerance, name


# ---------------------------------------------------------------------------------------------
# torch.optim

TORCH = {"up": (6, 10), "down": (10, 4), "idle": (4, 6), "bias": (6,), "quiet": (3,)}
IDLE = ("idle", "quiet")


def torchs(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim == 1]
    options = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.9, "nesterov": False}
    return [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(rest, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3),
    ]


def ours(model: nn.Module, rest_first: bool = False) -> torch.optim.Optimizer:
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    rest = [(name, p) for name, p in model.named_parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
    return ortho_func.Muon(groups[::-1] if rest_first else groups, lr=9.0, **JORDAN)


@pytest.fixture
def wide_torch_muon(monkeypatch: Any) -> None:
    """torch.optim.Muon in fp32: its cast becomes a copy."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())


@pytest.mark.usefixtures("wide_torch_muon")
@pytest.mark.parametrize("form", ["by number", "by name"])
def test_torchs_muon_and_adamw_go_on(form: str) -> None:
    """Also parameters that have had no step so far."""
    old_model = model_of(TORCH)
    old = torchs(old_model)
    schedule = torch.optim.lr_scheduler.LambdaLR(old[0], lambda step: 0.9**step)
    for step in range(3):
        give_gradients(old_model, step, without=IDLE)
        [optimizer.step() for optimizer in old]
        schedule.step()
    new_model = copy.deepcopy(old_model)
    new = ours(new_model, rest_first=form == "by name")
    give_gradients(new_model, 99)  # what was here before is gone, also where nothing was
    new.step()
    new_model.load_state_dict(old_model.state_dict())
    if form == "by number":
        new.load_state_dict(from_torch(*(one.state_dict() for one in old)))
    else:
        for p in old_model.parameters():
            p.grad = None
        state = from_torch(get_optimizer_state_dict(old_model, old))
        set_optimizer_state_dict(new_model, new, state)
    rates = [group["lr"] for group in new.param_groups]
    assert sorted(rates) == sorted(group["lr"] for one in old for group in one.param_groups)
    muon = next(group for group in new.param_groups if group["algorithm"] == "muon")
    assert muon["initial_lr"] == 0.05
    for step in range(3, 6):
        for model in (old_model, new_model):
            give_gradients(model, step)
        [optimizer.step() for optimizer in (*old, new)]
        same(new_model, old_model)
    for name in ("up", "idle", "bias", "quiet"):
        p, q = getattr(new_model, name), getattr(old_model, name)
        theirs = {**old[0].state, **old[1].state}[q]
        for key, value in theirs.items():
            torch.testing.assert_close(new.state[p][key], value)


def test_several_state_dicts_are_numbered_through() -> None:
    model = model_of(TORCH)
    one = from_torch(*(optimizer.state_dict() for optimizer in torchs(model)))
    assert [group["params"] for group in one["param_groups"]] == [[0, 1, 2], [3, 4]]
    assert one["state"] == dict.fromkeys(range(5))


def sharded_torch(rank: int, world: int, directory: str) -> float:
    """A checkpoint of sharded parameters under torch's Muon, read under another layout."""
    shapes = {"up": (8, 12), "down": (12, 4)}
    tensors = dict(model_of(shapes).named_parameters())
    old_model, new_model = nn.Module(), nn.Module()
    for model, mesh in ((old_model, (world,)), (new_model, (2, world // 2))):
        for name, p in by_fully_shard(tensors, mesh).items():
            model.register_parameter(name, p)
    old = torch.optim.Muon(old_model.parameters(), lr=0.05)
    give_gradients(old_model, 1)
    old.step()
    state = get_optimizer_state_dict(old_model, old)
    dcp.save({"optim": state}, checkpoint_id=directory)
    # read into tensors laid out as the new parameters are: those of an old optimizer of them
    reader = torch.optim.Muon(new_model.parameters(), lr=1.0)
    state = get_optimizer_state_dict(new_model, reader)
    dcp.load({"optim": state}, checkpoint_id=directory)
    new = ortho_func.Muon(new_model.parameters(), lr=9.0, **JORDAN)
    set_optimizer_state_dict(new_model, new, from_torch(state))
    with torch.no_grad():
        for p, q in zip(new_model.parameters(), old_model.parameters(), strict=True):
            p.copy_(scatter_like(gather(q), p))
    for model, optimizer in ((old_model, old), (new_model, new)):
        give_gradients(model, 2)
        optimizer.step()
    pairs = zip(new_model.parameters(), old_model.parameters(), strict=True)
    return max(relative_error(gather(p), gather(q)) for p, q in pairs)


def test_a_sharded_checkpoint_of_torchs_muon(pool: Any, tmp_path: Path) -> None:
    assert max(pool.run(sharded_torch, str(tmp_path), world=4)) < 5e-3  # bf16 there


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: torch.optim.AdamW([p], amsgrad=True), "no amsgrad"),
        (lambda p: torch.optim.AdamW([p], maximize=True), "no maximize"),
        (lambda p: torch.optim.Adam([p], weight_decay=0.1), "not decoupled"),
        (lambda p: torch.optim.SGD([p], lr=0.1), r"neither of torch.optim.Muon"),
    ],
)
def test_what_has_no_counterpart_is_refused(make: Callable[[Tensor], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        from_torch(make(nn.Parameter(torch.randn(3, 4))).state_dict())


# ---------------------------------------------------------------------------------------------
# microsoft/dion, by its formulas and its layout of state

MU, BETA2, FRACTION, LR, DECAY = 0.9, 0.8, 0.5, 0.05, 0.1
ORTHO = {"lr": LR, "weight_decay": DECAY, "step": 3, "epsilon": 1e-8, "adjust_lr": "rms_norm"}
GROUPS: dict[str, dict[str, Any]] = {
    "muon": {"mu": MU, "nesterov": True, "cautious_wd": False},
    "normuon": {"mu": MU, "muon_beta2": BETA2, "nesterov": False},
    "dion2": {"ef_decay": MU, "fraction": FRACTION, "selection_scope": "global"},
    "nordion2": {
        "mu": MU, "muon_beta2": BETA2, "fraction": FRACTION, "selection_scope": "global",
    },
    "dion": {"mu": MU, "rank_fraction": FRACTION},
}  # fmt: skip
MINE = {"muon": "muon", "normuon": "normuon", "dion2": "dion2", "nordion2": "dion3", "dion": "dion"}


def polar(x: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


def normalized(u: Tensor, v: Tensor) -> Tensor:
    """NorMuon's rows, and V in place."""
    v.lerp_(u.square().mean(dim=-1, keepdim=True), 1 - BETA2)
    found = u / (v.sqrt() + 1e-8)
    return found * (u.norm() / found.norm())


def selected(m: Tensor, rows_only: bool) -> tuple[int, Tensor]:
    dim = 0 if rows_only or m.shape[0] <= m.shape[1] else 1
    return dim, m.abs().sum(dim=1 - dim).topk(math.ceil(FRACTION * m.shape[dim])).indices


def direction(algorithm: str, g: Tensor, state: dict[str, Tensor]) -> Tensor:
    """What dion would have subtracted, over lr and scale; its state in place."""
    m = state["momentum"]
    if algorithm in ("muon", "normuon"):
        m.mul_(MU).add_(g)
        if algorithm == "muon":
            return polar(g + MU * m)
        return normalized(polar(m), state["variance_neuron"])
    m.add_(g)
    if algorithm == "dion":
        p = torch.linalg.qr(m @ state["Q"]).Q
        r = m.mT @ p
        m.sub_((1 - MU) * p @ r.mT)
        state["Q"].copy_(r / r.norm(dim=0))
        return p @ state["Q"].mT
    dim, index = selected(m, algorithm == "nordion2")
    u = polar(m.index_select(dim, index))
    if algorithm == "nordion2":
        v = state["variance_neuron"][index]
        u = normalized(u, v)
        state["variance_neuron"][index] = v
    m.index_copy_(dim, index, MU * m.index_select(dim, index))
    return torch.zeros_like(m).index_copy_(dim, index, u)


def first_state(algorithm: str, p: Tensor) -> dict[str, Tensor]:
    state = {"momentum": torch.zeros_like(p)}
    if algorithm in ("normuon", "nordion2"):
        state["variance_neuron"] = torch.zeros_like(p[..., 0:1])
    if algorithm == "dion":
        state["Q"] = torch.randn(p.shape[1], math.ceil(FRACTION * min(p.shape)))
    return state


@pytest.mark.parametrize("algorithm", list(GROUPS))
def test_dions_matrices_go_on(algorithm: str) -> None:
    shapes = {"wide": (6, 10), "tall": (9, 4)}
    old, new = model_of(shapes), model_of(shapes)
    state = {n: first_state(algorithm, p.detach()) for n, p in enumerate(old.parameters())}

    def step(number: int) -> None:
        give_gradients(old, number)
        for n, p in enumerate(old.parameters()):
            u = direction(algorithm, p.grad, state[n])
            scale = 0.2 * math.sqrt(max(p.shape))
            if algorithm == "dion":
                scale = math.sqrt(p.shape[0] / p.shape[1])
            with torch.no_grad():
                p.mul_(1 - LR * DECAY).sub_(LR * scale * u)

    for number in range(3):
        step(number)
    group = {**ORTHO, **GROUPS[algorithm], "algorithm": algorithm, "params": [0, 1]}
    new.load_state_dict(old.state_dict())
    low_rank = algorithm == "dion"
    options = {"rank_fraction": FRACTION} if low_rank else {"orthogonalizer": "svd"}
    optimizer = WHOLE[MINE[algorithm]][0](new.parameters(), lr=9.0, **options)
    kept = copy.deepcopy(state)
    optimizer.load_state_dict(from_dion({"state": state, "param_groups": [group]}))
    torch.testing.assert_close(state, kept, rtol=0, atol=0)
    for number in range(3, 6):
        step(number)
        give_gradients(new, number)
        optimizer.step()
        same(new, old)


def test_dions_left_factors_are_carried_to_the_right() -> None:
    """Where dion transposes, Q has a row for each row; the basis it would take next is kept."""
    wide, square = torch.randn(4, 7), torch.randn(5, 5)
    factors = [torch.randn(4, 2), torch.randn(5, 3)]
    group = {**ORTHO, **GROUPS["dion"], "algorithm": "dion", "params": ["wide", "square"]}
    state = {
        name: {"momentum": m, "Q": q}
        for name, m, q in zip(("wide", "square"), (wide, square), factors, strict=True)
    }
    old = {"state": state, "param_groups": [group]}
    found = from_dion(old, square_left=True)["state"]
    for name, m, q in zip(("wide", "square"), (wide, square), factors, strict=True):
        right = found[name]["right_factor"]
        torch.testing.assert_close(right.norm(dim=0), torch.ones(q.shape[1]))
        mine, theirs = (torch.linalg.qr(x).Q for x in (right, m.mT @ q))
        torch.testing.assert_close(mine @ mine.mT, theirs @ theirs.mT)
    assert from_dion(old)["state"]["square"]["right_factor"] is factors[1]
    state["wide"]["momentum"] = torch.zeros(4, 7)  # no step yet
    assert from_dion(old)["state"]["wide"]["right_factor"].isfinite().all()


def test_dions_adamw_and_lion_go_on() -> None:
    """The count of steps is each parameter's, in older checkpoints the group's."""
    gradients = torch.randn(6, 5).unbind()
    theirs = torch.optim.AdamW([nn.Parameter(torch.ones(5))], lr=0.1, betas=(0.8, 0.9), eps=1e-6)
    x = theirs.param_groups[0]["params"][0]
    for g in gradients[:3]:
        x.grad = g.clone()
        theirs.step()
    averages = theirs.state[x]
    common = {"beta1": 0.8, "beta2": 0.9, "lr": 0.1, "weight_decay": 0.01, "epsilon": 1e-6}
    group = {**common, "algorithm": "adamw", "params": [0], "step": 3}
    lion = {**common, "algorithm": "lion", "params": [1], "step": 3}
    momentum = {"momentum": averages["exp_avg"], "variance": averages["exp_avg_sq"]}
    for steps in ({}, {"step_dev": averages["step"].clone()}):
        state = {0: {**momentum, **steps}, 1: {"momentum": torch.full((5,), 2.0)}}
        weights = [nn.Parameter(x.detach().clone()), nn.Parameter(torch.ones(5))]
        optimizer = ortho_func.Muon(
            [{"params": [weights[0]], "algorithm": "adamw"},
             {"params": [weights[1]], "algorithm": "lion"}]
        )  # fmt: skip
        optimizer.load_state_dict(from_dion({"state": state, "param_groups": [group, lion]}))
        right = copy.deepcopy(theirs)
        expected = right.param_groups[0]["params"][0]
        for g in gradients[3:]:
            expected.grad, weights[0].grad = g.clone(), g.clone()
            right.step()
            optimizer.step()
            torch.testing.assert_close(weights[0], expected)
        assert optimizer.state[weights[1]]["momentum_buffer"].equal(torch.full((5,), 2.0))
        assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)
        assert optimizer.param_groups[1]["adam_eps"] == 1e-6


def test_dions_flattened_convolutions() -> None:
    """There V is a mean over the last dim; the mean of those is that over the matrix's columns."""
    variance = torch.rand(6, 3, 2, 1)
    group = {**ORTHO, **GROUPS["normuon"], "algorithm": "normuon", "flatten": True, "params": [0]}
    old = {
        "state": {0: {"momentum": torch.randn(6, 3, 2, 4), "variance_neuron": variance}},
        "param_groups": [group],
    }
    kernel = nn.Parameter(torch.randn(6, 3, 2, 4))
    optimizer = ortho_func.NorMuon([kernel], flatten=True)
    optimizer.load_state_dict(from_dion(old))
    found = optimizer.state[kernel]["row_variance"]
    torch.testing.assert_close(found.flatten(), variance.flatten(1).mean(dim=1))


def test_a_state_dict_of_something_else() -> None:
    with pytest.raises(ValueError, match="a group of dion's says algorithm"):
        from_dion({"state": {}, "param_groups": [{"params": [0], "lr": 1.0}]})
    group = {**ORTHO, **GROUPS["muon"], "algorithm": "muon", "params": [0]}
    with pytest.raises(ValueError, match="state of 0 has no 'momentum'"):
        from_dion({"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [group]})


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["Muon", "NorMuon", "Dion2", "NorDion2", "Dion"])
def test_the_real_dion(name: str) -> None:
    """Where microsoft/dion can be imported; it rounds to bf16 before it orthogonalizes."""
    dion = pytest.importorskip("dion")
    shapes = {"wide": (24, 40), "tall": (40, 16), "idle": (12, 12), "bias": (8,), "gain": (6,)}
    old, new = model_of(shapes), model_of(shapes)
    kind = "Dion3" if name == "NorDion2" else name

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [model.wide, model.tall, model.idle]},
            {"params": [model.bias], "algorithm": "adamw"},
            {"params": [model.gain], "algorithm": "lion"},
        ]

    low_rank = kind == "Dion"
    exact = {"orthogonalizer": "svd", **EXACT}
    options = {"ef_decay": MU} if name == "Dion2" else {"mu": MU}
    extra = {"rank_fraction": 0.5} if low_rank else {}
    if not low_rank:
        options["newton_schulz_func"] = lambda x, epsilon: polar(x.float())
    with torch.compiler.set_stance("force_eager"):
        theirs = getattr(dion, name)(groups(old), lr=LR, **options, **extra)
        for step in range(3):
            give_gradients(old, step, without=("idle",))
            theirs.step()
        new.load_state_dict(old.state_dict())
        mine = getattr(ortho_func, kind)(groups(new), lr=9.0, **(extra if low_rank else exact))
        mine.load_state_dict(from_dion(theirs.state_dict()))
        before = copy.deepcopy(new)
        for step in range(3, 6):
            for model, optimizer in ((old, theirs), (new, mine)):
                give_gradients(model, step)
                optimizer.step()
    for (key, p), q, x in zip(
        new.named_parameters(), old.parameters(), before.parameters(), strict=True
    ):
        if low_rank and key in ("wide", "idle"):
            continue  # transposed there: another iteration; and another Q before the first step
        assert relative_error((p - x).detach(), (q - x).detach()) < 0.02, key
