"""The contract of torch.optim.Optimizer, and agreement with torch's own Muon and AdamW."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim._muon import _adjust_lr
from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz
from torch.utils._python_dispatch import TorchDispatchMode

from ortho_func import Dion2, Dion3, Muon, NorMuon

OPTIMIZERS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "muon": (Muon, {"momentum_buffer"}),
    "normuon": (NorMuon, {"momentum_buffer", "row_variance"}),
    "dion2": (Dion2, {"momentum_buffer"}),
    "dion3": (Dion3, {"momentum_buffer", "row_variance"}),
}
ADAMW = {"step", "exp_avg", "exp_avg_sq"}
every = pytest.mark.parametrize("name", list(OPTIMIZERS))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Fresh random data; pytest shows the seed with a failure."""
    number = torch.seed() % 2**31
    print(f"torch.manual_seed({number})")
    torch.manual_seed(number)


class Net(nn.Module):
    """Wide, tall and square matrices, experts, a convolution, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.mix = nn.Linear(10, 10)
        self.down = nn.Linear(10, 4)
        self.experts = nn.Parameter(torch.randn(3, 5, 7))
        self.conv = nn.Conv2d(2, 6, 3)

    def groups(self) -> list[dict[str, Any]]:
        biases = [p for p in self.parameters() if p.ndim < 2]
        return [
            {"params": [p for p in self.parameters() if p.ndim == 2]},
            {"params": [self.experts], "flatten": False},
            {"params": [self.conv.weight], "flatten": True},
            {"params": biases, "algorithm": "adamw", "lr": 1e-2},
        ]


def fill(parameters: Any) -> None:
    """Give every parameter a fresh random gradient."""
    for p in parameters:
        p.grad = torch.randn_like(p)


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def bitwise(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        one[k].dtype == two[k].dtype and torch.equal(one[k], two[k]) for k in one
    )


def states_equal(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> bool:
    mine, theirs = one.state_dict()["state"], two.state_dict()["state"]
    return mine.keys() == theirs.keys() and all(bitwise(mine[k], theirs[k]) for k in mine)


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


# Construction: what may be given.


@every
@pytest.mark.parametrize("how", ["list", "generator", "groups", "group of generator", "named"])
def test_parameters_may_be_given_as_torch_takes_them(name: str, how: str) -> None:
    net = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 4, bias=False))
    given = {
        "list": lambda: list(net.parameters()),
        "generator": net.parameters,
        "groups": lambda: [{"params": [p]} for p in net.parameters()],
        "group of generator": lambda: [{"params": net.parameters(), "lr": 0.5}],
        "named": net.named_parameters,
    }[how]()
    opt = OPTIMIZERS[name][0](given, lr=0.5)
    fill(net.parameters())
    before = snapshot(net)
    opt.step()
    assert sum(len(group["params"]) for group in opt.param_groups) == 2
    assert not any(torch.equal(before[k], v) for k, v in snapshot(net).items())
    if how == "named":
        assert opt.param_groups[0]["param_names"] == ["0.weight", "1.weight"]
    assert isinstance(opt, torch.optim.Optimizer)


@every
def test_named_groups_and_single_tensors(name: str) -> None:
    net = Net()
    cls, _ = OPTIMIZERS[name]
    opt = cls([{"params": [("up", net.up.weight), ("mix", net.mix.weight)]}])
    assert opt.param_groups[0]["param_names"] == ["up", "mix"]
    single = cls([{"params": net.up.weight}])
    assert single.param_groups[0]["params"] == [net.up.weight]


@every
def test_no_parameters_at_all(name: str) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        OPTIMIZERS[name][0]([])


@every
def test_state_exists_from_construction(name: str) -> None:
    net = Net()
    cls, matrix_state = OPTIMIZERS[name]
    opt = cls(net.groups())
    for group in opt.param_groups:
        keys = ADAMW if group["algorithm"] == "adamw" else matrix_state
        for p in group["params"]:
            assert set(opt.state[p]) == keys
            assert all(isinstance(t, Tensor) for t in opt.state[p].values())
            assert all(not t.any() for t in opt.state[p].values())
            for key in keys - {"step", "row_variance"}:
                assert opt.state[p][key].shape == p.shape
                assert opt.state[p][key].dtype == p.dtype
    kept = {p: dict(opt.state[p]) for group in opt.param_groups for p in group["params"]}
    fill(net.parameters())
    opt.step()
    for p, state in kept.items():  # written in place, never replaced
        assert all(opt.state[p][key] is tensor for key, tensor in state.items())


def test_the_plan_is_for_everyone_to_see() -> None:
    net = Net()
    opt = Muon(net.groups())
    assert opt.plan is not None
    assert "7 matrices" in opt.plan.describe()  # three, three experts, a convolution
    assert Muon([{"params": [net.up.bias], "algorithm": "adamw"}]).plan is None


# Signatures.


@every
def test_overridden_methods_have_torchs_signatures(name: str) -> None:
    cls, _ = OPTIMIZERS[name]
    checked = set()
    for ancestor in cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]:
        for method, mine in vars(ancestor).items():
            theirs = getattr(torch.optim.Optimizer, method, None)
            if method == "__init__" or not inspect.isfunction(mine) or theirs is None:
                continue
            if method in vars(object):
                continue
            both = [
                [(p.name, p.kind) for p in inspect.signature(f).parameters.values()]
                for f in (mine, theirs)
            ]
            assert both[0] == both[1], method
            checked.add(method)
    assert {"step", "state_dict", "load_state_dict", "add_param_group"} <= checked


def test_muon_starts_like_torchs() -> None:
    mine = inspect.signature(Muon.__init__).parameters
    theirs = inspect.signature(torch.optim.Muon.__init__).parameters
    positional = [n for n, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)[: len(positional)]
    for option in ("lr", "weight_decay", "momentum", "nesterov", "eps", "adjust_lr_fn"):
        assert mine[option].default == theirs[option].default, option


# Closures, hooks, zero_grad.


@every
def test_closure_is_called_once_with_gradients_enabled(name: str) -> None:
    net = nn.Linear(6, 4, bias=False)
    opt = OPTIMIZERS[name][0](net.parameters(), lr=0.1)
    x, calls = torch.randn(5, 6), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    before = net(x).square().mean().item()
    loss = opt.step(closure)
    assert calls == [True]
    assert loss.item() == before
    assert opt.step(closure=closure).item() != before
    assert opt.step() is None
    with torch.no_grad():
        opt.step(closure)
    assert calls == [True, True, True]


@every
def test_step_hooks(name: str) -> None:
    net = nn.Linear(6, 4, bias=False)
    opt = OPTIMIZERS[name][0](net.parameters(), lr=0.1)
    fill(net.parameters())
    seen: list[Any] = []
    before = net.weight.detach().clone()
    handles = [
        opt.register_step_pre_hook(
            lambda o, args, kwargs: seen.append(("pre", o is opt, torch.equal(net.weight, before)))
        ),
        opt.register_step_post_hook(
            lambda o, args, kwargs: seen.append(("post", o is opt, torch.equal(net.weight, before)))
        ),
    ]
    opt.step()
    assert seen == [("pre", True, True), ("post", True, False)]
    for handle in handles:
        handle.remove()
    opt.step()
    assert len(seen) == 2


@every
def test_state_dict_hooks(name: str) -> None:
    net = nn.Linear(6, 4, bias=False)
    opt = OPTIMIZERS[name][0](net.parameters())
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("saving"))
    opt.register_state_dict_post_hook(lambda o, saved: seen.append("saved"))
    opt.register_load_state_dict_pre_hook(lambda o, saved: seen.append("loading"))
    opt.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["saving", "saved", "loading", "loaded"]


def test_zero_grad() -> None:
    net = Net()
    opt = NorMuon(net.groups())
    fill(net.parameters())
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in net.parameters())


# Groups.


@every
def test_groups_added_later_take_part(name: str) -> None:
    net = Net()
    cls, matrix_state = OPTIMIZERS[name]
    opt = cls([net.up.weight], lr=0.1)
    opt.add_param_group({"params": [net.mix.weight, net.down.weight], "lr": 0.2})
    opt.add_param_group({"params": (p for p in [net.up.bias]), "algorithm": "adamw"})
    opt.add_param_group(param_group={"params": net.experts, "flatten": False})
    assert set(opt.state[net.mix.weight]) == matrix_state
    assert set(opt.state[net.up.bias]) == ADAMW
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.2, 0.1, 0.1]
    fill(net.parameters())
    before = snapshot(net)
    opt.step()
    moved = {k for k, v in snapshot(net).items() if not torch.equal(v, before[k])}
    assert moved == {"up.weight", "mix.weight", "down.weight", "up.bias", "experts"}


@every
def test_adding_a_group_keeps_the_state_of_the_others(name: str) -> None:
    """The same as if the group had been there but without gradients."""
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    cls, _ = OPTIMIZERS[name]
    late = cls([net.up.weight], lr=0.1)
    whole = cls([{"params": [twin.up.weight]}, {"params": [twin.mix.weight]}], lr=0.1)
    for step in range(4):
        if step == 2:
            late.add_param_group({"params": [net.mix.weight]})
        for p, q in ((net.up.weight, twin.up.weight), (net.mix.weight, twin.mix.weight)):
            g = torch.randn_like(p)
            skipped = step < 2 and p is net.mix.weight
            p.grad, q.grad = (None, None) if skipped else (g, g.clone())
        late.step()
        whole.step()
    assert bitwise(snapshot(net), snapshot(twin))


BAD_GROUPS: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "1-D": (lambda: {"params": weights((5,))}, ValueError, "adamw"),
    "silent about three dims": (lambda: {"params": weights((2, 3, 4))}, ValueError, "flatten"),
    "splits": (
        lambda: {"params": weights((6, 4)), "split_sizes": (4, 4)},
        ValueError,
        "split_sizes",
    ),
    "lr": (lambda: {"params": weights((6, 4)), "lr": -1.0}, ValueError, "lr"),
    "algorithm": (
        lambda: {"params": weights((6, 4)), "algorithm": "sgd"},
        ValueError,
        "algorithm.*sgd",
    ),
    "no tensor": (lambda: {"params": [3.0]}, TypeError, "Tensor"),
}


@every
@pytest.mark.parametrize("case", list(BAD_GROUPS))
def test_a_group_that_is_refused_leaves_no_trace(name: str, case: str) -> None:
    make, kind, match = BAD_GROUPS[case]
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    cls, _ = OPTIMIZERS[name]
    opt, other = cls(net.groups(), lr=0.1), cls(twin.groups(), lr=0.1)
    groups = [dict(group) for group in opt.param_groups]
    plan, states = opt.plan, set(opt.state)
    with pytest.raises(kind, match=match):
        opt.add_param_group(make())
    assert opt.param_groups == groups
    assert opt.plan == plan
    assert set(opt.state) == states
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    opt.step()
    other.step()
    assert bitwise(snapshot(net), snapshot(twin))
    assert states_equal(opt, other)


def test_a_parameter_in_two_groups_is_refused() -> None:
    (w,) = weights((6, 4))
    opt = Muon([w])
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": [w]})
    assert len(opt.param_groups) == 1


def test_a_group_may_name_another_algorithm() -> None:
    """One optimizer carries what two would; each group as its own optimizer."""
    first = weights((6, 10), (10, 6), (8, 8))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    one = Muon(
        [
            {"params": [first[0]]},
            {"params": [first[1]], "algorithm": "normuon", "beta2": 0.5},
            {"params": [first[2]], "algorithm": "dion2", "fraction": 0.5},
        ],
        lr=0.1,
    )
    three = [
        Muon([second[0]], lr=0.1),
        NorMuon([second[1]], lr=0.1, beta2=0.5),
        Dion2([second[2]], lr=0.1, fraction=0.5),
    ]
    for _ in range(3):
        for p, q in zip(first, second, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        one.step()
        for opt in three:
            opt.step()
    for p, q in zip(first, second, strict=True):
        assert torch.equal(p, q)


# Schedulers.


def scheduled(opt: Any, kind: str) -> Any:
    if kind == "lambda":
        return lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    if kind == "one cycle":
        return lr_scheduler.OneCycleLR(opt, max_lr=[0.2, 0.01], total_steps=10)
    if kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(opt, T_max=10)
    warm = lr_scheduler.LinearLR(opt, 0.1, total_iters=3)
    rest = lr_scheduler.CosineAnnealingLR(opt, T_max=7)
    return lr_scheduler.SequentialLR(opt, [warm, rest], milestones=[3])


@every
@pytest.mark.parametrize("kind", ["lambda", "one cycle", "cosine", "sequential"])
@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers_are_obeyed(name: str, kind: str, tensor: bool) -> None:
    """A step goes as far as the learning rate that the scheduler set says, for each group."""
    w, b = weights((6, 10), (10,))

    def rate(value: float) -> Any:
        return torch.tensor(value) if tensor else value

    cls, _ = OPTIMIZERS[name]
    opt = cls(
        [{"params": [w]}, {"params": [b], "algorithm": "adamw", "lr": rate(0.01)}],
        lr=rate(0.2),
        weight_decay=0.0,
        momentum=0.0,
    )
    scheduler = scheduled(opt, kind)
    built, used = opt._built, []
    for _ in range(8):
        fill([w, b])
        before = w.detach().clone(), b.detach().clone()
        rates = [float(group["lr"]) for group in opt.param_groups]
        used.append(rates)
        opt.step()
        moved = (w - before[0]).norm()
        assert 0.3 * rates[0] < moved / math.sqrt(6) < 1.5 * rates[0] or name.startswith("dion")
        assert (b - before[1]).abs().max() <= 2 * rates[1]
        scheduler.step()
    assert opt._built is built  # nothing was planned anew
    # The same schedule on torch's own optimizer says what the rates had to be.
    reference = torch.optim.SGD(
        [{"params": weights((1,))}, {"params": weights((1,)), "lr": 0.01}], lr=0.2, momentum=0.5
    )
    theirs = scheduled(reference, kind)
    for mine in used:
        assert mine == pytest.approx([group["lr"] for group in reference.param_groups], rel=1e-5)
        reference.step()
        theirs.step()


def test_plateau_scheduler() -> None:
    (w,) = weights((6, 10))
    opt = Muon([w], lr=0.2)
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for loss in (1.0, 2.0, 3.0):
        fill([w])
        opt.step()
        scheduler.step(loss)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.05)


def test_one_cycle_cycles_the_momentum() -> None:
    (w,) = weights((6, 10))
    opt = Muon([w], lr=0.2)
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=10)
    seen = []
    for _ in range(9):
        fill([w])
        opt.step()
        scheduler.step()
        seen.append(opt.param_groups[0]["momentum"])
    assert min(seen) == pytest.approx(0.85, abs=0.02)
    assert max(seen) == pytest.approx(0.95, abs=0.02)


def test_each_group_keeps_its_own_rate() -> None:
    """The shape factor is never stored in the group, and lr not shared between groups."""
    w, b = weights((16, 4), (10,))
    opt = Muon([{"params": [w], "lr": 2e-2}, {"params": [b], "algorithm": "adamw", "lr": 1e-5}])
    scheduler = lr_scheduler.LambdaLR(opt, lambda step: 0.5)
    fill([w, b])
    opt.step()
    scheduler.step()
    assert [group["lr"] for group in opt.param_groups] == [1e-2, 5e-6]


# Saving and loading.


def restored(saved: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint goes; nothing in it needs unpickling of code."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every
@pytest.mark.parametrize("keyword", [False, True])
def test_resume_is_bitwise(name: str, keyword: bool) -> None:
    net = Net()
    cls, _ = OPTIMIZERS[name]
    opt = cls(net.groups(), lr=0.1)
    gradients = [[torch.randn_like(p) for p in net.parameters()] for _ in range(6)]

    def train(module: Net, optimizer: Any, steps: range) -> None:
        for step in steps:
            for p, g in zip(module.parameters(), gradients[step], strict=True):
                p.grad = g.clone()
            optimizer.step()

    train(net, opt, range(3))
    saved = restored({"net": net.state_dict(), "opt": opt.state_dict()})
    train(net, opt, range(3, 6))
    fresh = Net()
    fresh.load_state_dict(saved["net"])
    again = cls(fresh.groups(), lr=0.5)  # the saved rate wins
    if keyword:
        again.load_state_dict(state_dict=saved["opt"])
    else:
        again.load_state_dict(saved["opt"])
    train(fresh, again, range(3, 6))
    assert bitwise(snapshot(net), snapshot(fresh))
    assert states_equal(opt, again)
    assert [g["lr"] for g in again.param_groups] == [0.1, 0.1, 0.1, 1e-2]


@every
def test_loading_copies(name: str) -> None:
    """Neither the saved dict nor the live state becomes the other's storage."""
    net = Net()
    opt = OPTIMIZERS[name][0](net.groups(), lr=0.1)
    fill(net.parameters())
    opt.step()
    saved = opt.state_dict()
    kept = copy.deepcopy(saved)
    live = {p: dict(state) for p, state in opt.state.items()}
    opt.load_state_dict(copy.deepcopy(saved))
    for p, state in live.items():
        assert all(opt.state[p][key] is tensor for key, tensor in state.items())
    other = OPTIMIZERS[name][0](Net().groups(), lr=0.1)
    other.load_state_dict(kept)
    fill(p for group in other.param_groups for p in group["params"])
    other.step()
    for index, state in kept["state"].items():
        assert bitwise(state, saved["state"][index])


@every
def test_keys_that_others_add_survive(name: str) -> None:
    """A scheduler's initial_lr, or anything else, comes back as it was."""
    net = Net()
    cls, _ = OPTIMIZERS[name]
    opt = cls(net.groups(), lr=0.1)
    scheduler = lr_scheduler.LambdaLR(opt, lambda step: 0.9**step)
    opt.param_groups[0]["purpose"] = "hidden"
    for _ in range(3):
        fill(net.parameters())
        opt.step()
        scheduler.step()
    saved = restored({"opt": opt.state_dict(), "scheduler": scheduler.state_dict()})
    assert saved["opt"]["param_groups"][0]["initial_lr"] == 0.1
    again = cls(Net().groups(), lr=0.1)
    again.load_state_dict(saved["opt"])
    assert again.param_groups[0]["purpose"] == "hidden"
    assert [g["initial_lr"] for g in again.param_groups] == [0.1, 0.1, 0.1, 1e-2]
    more = lr_scheduler.LambdaLR(again, lambda step: 0.9**step, last_epoch=2)
    more.load_state_dict(saved["scheduler"])
    fill(p for group in again.param_groups for p in group["params"])
    again.step()
    more.step()
    assert again.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**4)


@every
def test_a_tensor_rate_is_saved_as_a_number(name: str) -> None:
    w, b = weights((6, 10), (10,))
    rate = torch.tensor(0.25)
    cls, _ = OPTIMIZERS[name]

    def make(lr: Any) -> Any:
        return cls([{"params": [w]}, {"params": [b], "algorithm": "adamw"}], lr=lr)

    opt = make(rate)
    assert opt.param_groups[0]["lr"] is rate
    saved = opt.state_dict()
    assert [type(group["lr"]) for group in saved["param_groups"]] == [float, float]
    assert saved["param_groups"][0]["lr"] == 0.25
    live = torch.tensor(1.0)
    again = make(live)
    again.load_state_dict(restored(saved))
    assert again.param_groups[0]["lr"] is live  # whoever holds it still steers
    assert live.item() == 0.25
    assert rate.item() == 0.25
    plain = make(1.0)
    plain.load_state_dict(restored(saved))
    assert plain.param_groups[0]["lr"] == 0.25
    assert type(plain.param_groups[0]["lr"]) is float


@pytest.mark.parametrize("option", ["lr", "weight_decay", "momentum", "beta2"])
def test_changes_of_a_tensor_take_effect(option: str) -> None:
    """Numbers and tensors of the same value do the same, also when they change."""
    first = weights((6, 10), (10, 4))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    live = torch.tensor(0.5, dtype=torch.float64)
    one, two = NorMuon(first, **{option: live}), NorMuon(second, **{option: 0.5})
    for value in (0.5, 0.25, 0.0, 0.125):
        live.fill_(value)
        two.param_groups[0][option] = value
        for p, q in zip(first, second, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        one.step()
        two.step()
        for p, q in zip(first, second, strict=True):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), value


@every
def test_dtypes_of_state_survive_loading(name: str) -> None:
    net = Net().to(torch.bfloat16)
    cls, _ = OPTIMIZERS[name]
    opt = cls(net.groups(), lr=0.1)

    def dtypes(optimizer: Any) -> list[dict[str, torch.dtype]]:
        return [
            {key: t.dtype for key, t in optimizer.state[p].items()}
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    at_first = dtypes(opt)
    assert at_first[0]["momentum_buffer"] == torch.bfloat16
    assert at_first[-1]["step"] == torch.float32
    assert at_first[0].get("row_variance", torch.float32) == torch.float32
    fill(net.parameters())
    opt.step()
    assert dtypes(opt) == at_first
    twin = Net().to(torch.bfloat16)
    again = cls(twin.groups(), lr=0.1)
    again.load_state_dict(restored(opt.state_dict()))
    assert dtypes(again) == at_first
    assert states_equal(opt, again)
    # Saved in fp32 by somebody else: the dtype here stays.
    wide = opt.state_dict()
    wide["state"] = {
        k: {n: t.float() for n, t in state.items()} for k, state in wide["state"].items()
    }
    again.load_state_dict(wide)
    assert dtypes(again) == at_first


def test_steps_are_counted_past_256_in_bf16() -> None:
    (b,) = weights((10,), dtype=torch.bfloat16)
    opt = Muon([{"params": [b], "algorithm": "adamw"}])
    saved = opt.state_dict()
    saved["state"][0]["step"].fill_(250)
    opt.load_state_dict(saved)
    for _ in range(20):
        fill([b])
        opt.step()
    assert opt.state[b]["step"].item() == 270


def test_state_of_another_number_of_groups_is_refused() -> None:
    net = Net()
    saved = Muon(net.groups()).state_dict()
    with pytest.raises(ValueError, match="param"):
        Muon([net.up.weight]).load_state_dict(saved)


# Copies.


@every
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_are_whole_and_apart(name: str, how: str) -> None:
    net = Net()
    opt = OPTIMIZERS[name][0](net.groups(), lr=0.1)
    fill(net.parameters())
    opt.step()
    pair = (net, opt)
    twin, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert type(other) is type(opt)
    assert states_equal(opt, other)
    before = snapshot(net)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    other.step()
    assert bitwise(before, snapshot(net))  # the original is untouched
    opt.step()
    assert bitwise(snapshot(net), snapshot(twin))
    assert states_equal(opt, other)
    (late,) = weights((4, 4))
    other.add_param_group({"params": [late]})
    fill([late])
    other.step()
    assert len(opt.param_groups) == 4
    assert len(other.param_groups) == 5


# What a step writes, and what it leaves alone.


@every
def test_gradients_are_not_written(name: str) -> None:
    net = Net()
    opt = OPTIMIZERS[name][0](net.groups(), lr=0.1)
    for dtype in (torch.float32, torch.bfloat16):
        net.to(dtype)
        opt = OPTIMIZERS[name][0](net.groups(), lr=0.1)
        fill(net.parameters())
        kept = [p.grad.clone() for p in net.parameters()]
        held = [p.grad for p in net.parameters()]
        opt.step()
        for p, was, g in zip(net.parameters(), kept, held, strict=True):
            assert p.grad is g
            assert torch.equal(g, was)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_is_the_average_of_gradients(nesterov: bool, dtype: torch.dtype) -> None:
    """With a zero rate nothing but the momentum changes, and it is not what was normalized."""
    w = nn.Parameter(torch.zeros(8, 5, dtype=dtype))
    opt = Muon([w], lr=0.0, weight_decay=0.0, momentum=0.9, nesterov=nesterov)
    w.grad = torch.ones_like(w)
    opt.step()
    expected = torch.full((8, 5), 0.1, dtype=dtype)
    assert torch.allclose(opt.state[w]["momentum_buffer"], expected)
    assert not w.any()
    assert bool((w.grad == 1).all())


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 3])
def test_zero_gradients_move_nothing(name: str, dtype: torch.dtype, before: int) -> None:
    """Zero momentum gives a zero update, not 0/0; then only decay moves the parameter."""
    net = Net().to(dtype)
    opt = OPTIMIZERS[name][0](net.groups(), lr=0.1, weight_decay=0.0, momentum=0.0)
    for _ in range(before):
        fill(net.parameters())
        opt.step()
    if before:  # momentum zero again, whatever the algorithm; second moments stay
        for state in opt.state.values():
            for key in ("momentum_buffer", "exp_avg"):
                if key in state:
                    state[key].zero_()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    kept = snapshot(net)
    opt.step()
    assert bitwise(kept, snapshot(net))
    for state in opt.state.values():
        assert all(torch.isfinite(t).all() for t in state.values())
    for group in opt.param_groups:
        group["weight_decay"] = 0.5
    opt.step()
    for key, p in snapshot(net).items():
        lr = 0.1 if kept[key].ndim > 1 else 1e-2
        assert torch.allclose(p.float(), kept[key].float() * (1 - 0.5 * lr), rtol=1e-2)


@every
def test_one_zero_matrix_of_a_batch_does_not_disturb_the_others(name: str) -> None:
    first = weights(*[(6, 8)] * 4)
    second = [nn.Parameter(p.detach().clone()) for p in first]
    cls, _ = OPTIMIZERS[name]
    one, two = cls(first, lr=0.1), cls(second, lr=0.1)
    for p, q in zip(first, second, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    second[2].grad = torch.zeros_like(second[2])
    one.step()
    two.step()
    for n in (0, 1, 3):
        assert torch.equal(first[n], second[n])
    assert torch.isfinite(second[2]).all()


@every
@pytest.mark.parametrize("missing", [{"up.weight"}, {"experts", "conv.weight"}, {"up.bias"}, "all"])
def test_missing_gradients_leave_bits_unchanged(name: str, missing: Any) -> None:
    """No decay, no momentum, no count; the others as if nothing were missing."""
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    cls, _ = OPTIMIZERS[name]
    opt, other = (
        cls(module.groups(), lr=0.1, weight_decay=0.3, compute_dtype=torch.float32)
        for module in (net, twin)
    )
    fill(net.parameters())
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad.clone()
    opt.step()
    other.step()
    absent = dict(net.named_parameters()).keys() if missing == "all" else missing
    held = snapshot(net)
    states = {k: {n: t.clone() for n, t in opt.state[p].items()} for k, p in net.named_parameters()}
    for (key, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        q.grad = torch.randn_like(q)
        p.grad = None if key in absent else q.grad.clone()
    opt.step()
    other.step()
    for (key, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        if key in absent:
            assert torch.equal(p, held[key]), key
            assert bitwise(opt.state[p], states[key]), key
        else:
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), key


def test_parameters_that_need_no_gradient_are_left_alone() -> None:
    w, frozen = weights((6, 4), (6, 4))
    frozen.requires_grad_(False)
    opt = Muon([w, frozen], lr=0.1)
    w.grad = torch.randn_like(w)
    kept = frozen.detach().clone()
    opt.step()
    assert torch.equal(frozen, kept)


@pytest.mark.parametrize("layout", ["transposed", "channels last", "expanded gradient"])
def test_strides_are_the_parameters_own(layout: str) -> None:
    if layout == "transposed":
        p, flatten = torch.randn(6, 4).t(), None
    elif layout == "channels last":
        p, flatten = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last), True
    else:
        p, flatten = torch.randn(6, 4), None
    w, plain = nn.Parameter(p), nn.Parameter(p.detach().clone().contiguous())
    g = torch.randn(1, 4).expand(6, 4) if layout == "expanded gradient" else torch.randn_like(p)
    for one in (w, plain):
        opt = Muon([one], lr=0.1, flatten=flatten, compute_dtype=torch.float32)
        one.grad = g if one is w else g.contiguous()
        opt.step()
    assert w.stride() == p.stride()
    assert torch.allclose(w, plain, rtol=1e-5, atol=1e-6)


class NoSync(TorchDispatchMode):
    """Forbids whatever waits for a device to say a number."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = str(func)
        assert "_local_scalar_dense" not in named, named
        assert "nonzero" not in named, named
        assert "is_nonzero" not in named, named
        return func(*args, **(kwargs or {}))


@every
@pytest.mark.parametrize("tensor", [False, True])
def test_a_step_reads_no_number_back(name: str, tensor: bool) -> None:
    net = Net()
    hyper = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    if tensor:
        hyper = {key: torch.tensor(value) for key, value in hyper.items()}
    opt = OPTIMIZERS[name][0](net.groups()[:3], **hyper)
    opt.add_param_group({"params": [net.up.bias], "algorithm": "adamw"})
    opt.add_param_group({"params": [net.down.bias], "algorithm": "lion"})
    fill(net.parameters())
    before = snapshot(net)
    with NoSync():
        opt.step()
    assert not torch.equal(before["up.bias"], net.up.bias)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoSync():
        net.up.bias.sum().item()


# Agreement with torch.


@pytest.fixture
def wide_torch_muon(monkeypatch: Any) -> None:
    """torch.optim.Muon in fp32: its cast becomes a copy."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())


def pairs(shapes: list[tuple[int, int]]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    first = weights(*shapes)
    return first, [nn.Parameter(p.detach().clone()) for p in first]


SHAPES = [(16, 16), (12, 40), (40, 12), (64, 9), (8, 3), (1, 16), (16, 1)]


@pytest.mark.usefixtures("wide_torch_muon")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_is_torchs_muon_step_for_step(
    nesterov: bool, adjust_lr_fn: str | None, weight_decay: float
) -> None:
    mine, theirs = pairs(SHAPES)
    options: dict[str, Any] = {
        "lr": 0.05, "weight_decay": weight_decay, "nesterov": nesterov,
        "adjust_lr_fn": adjust_lr_fn,
    }  # fmt: skip
    ours = Muon(mine, orthogonalizer="jordan", ns_steps=5, compute_dtype=torch.float32, **options)
    right = torch.optim.Muon(theirs, **options)
    for _ in range(5):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        right.step()
        for p, q in zip(mine, theirs, strict=True):
            error = (p - q).norm() / q.norm()
            assert error < 1e-5, (tuple(p.shape), error)
            buffers = ours.state[p]["momentum_buffer"], right.state[q]["momentum_buffer"]
            assert torch.allclose(*buffers, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("wide_torch_muon")
def test_muon_has_torchs_defaults() -> None:
    mine, theirs = pairs(SHAPES)
    ours = Muon(mine, orthogonalizer="jordan", compute_dtype=torch.float32)
    right = torch.optim.Muon(theirs)
    for key in ("lr", "weight_decay", "momentum", "nesterov", "eps", "adjust_lr_fn"):
        assert ours.defaults[key] == right.defaults[key]
    for p, q in zip(mine, theirs, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    ours.step()
    right.step()
    for p, q in zip(mine, theirs, strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_muon_is_torchs_muon_in_bf16(adjust_lr_fn: str | None) -> None:
    """Each in bf16: the updates differ by as much as torch's own does from exact arithmetic."""
    mine, theirs = pairs([(32, 32), (24, 64), (64, 24)])
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.0, "adjust_lr_fn": adjust_lr_fn}
    ours = Muon(mine, orthogonalizer="jordan", ns_steps=5, **options)
    right = torch.optim.Muon(theirs, **options)
    for p, q in zip(mine, theirs, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    before = [p.detach().clone() for p in mine]
    ours.step()
    right.step()
    for p, q, was in zip(mine, theirs, before, strict=True):
        scale = _adjust_lr(0.05, adjust_lr_fn, p.shape)
        exact = jordan(p.grad)
        update, reference = (was - p) / scale, (was - q) / scale
        torchs_error = (reference - exact).norm() / exact.norm()
        assert (update - exact).norm() / exact.norm() <= 2 * torchs_error + 1e-3
        assert (update - reference).norm() / reference.norm() <= 3 * torchs_error + 1e-3
        assert torchs_error < 0.05


def jordan(g: Tensor) -> Tensor:
    """The quintic of https://kellerjordan.github.io/posts/muon/ in float64."""
    x = g.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.T if g.shape[0] > g.shape[1] else x).float()


def test_the_reference_of_the_comparison_is_torchs() -> None:
    g = torch.randn(24, 40)
    found = torch_newton_schulz(g, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert (found.float() - jordan(g)).norm() / jordan(g).norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adamw_groups_are_torchs_adamw(dtype: torch.dtype) -> None:
    first = weights((10,), (6, 4), (), (2, 3, 4), dtype=dtype)
    second = [nn.Parameter(p.detach().clone()) for p in first]
    ours = Muon(
        [{"params": first, "algorithm": "adamw", "betas": (0.8, 0.99), "adam_eps": 1e-6}],
        lr=0.1,
        weight_decay=0.2,
    )
    right = torch.optim.AdamW(
        second, lr=0.1, weight_decay=0.2, betas=(0.8, 0.99), eps=1e-6, fused=True
    )
    for step in range(7):
        for p, q in zip(first, second, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if step == 4:
            first[1].grad = second[1].grad = None
        for opt in (ours, right):
            opt.param_groups[0]["lr"] = 0.1 / (1 + step)
            opt.step()
        for p, q in zip(first, second, strict=True):
            assert torch.equal(p, q)
            assert bitwise(ours.state[p], right.state[q])


def test_adamw_groups_agree_with_every_form_of_torchs() -> None:
    first = weights((10,), (6, 4))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    ours = Muon([{"params": first, "algorithm": "adamw", "betas": (0.9, 0.999)}], lr=0.1)
    right = torch.optim.AdamW(second, lr=0.1, weight_decay=0.1)
    for _ in range(5):
        for p, q in zip(first, second, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        right.step()
        for p, q in zip(first, second, strict=True):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


# Mistakes: each is an error at construction that names what is wrong.


def ints() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4, dtype=torch.int64), requires_grad=False)


def sparse() -> nn.Parameter:
    return nn.Parameter(torch.eye(4).to_sparse())


BAD_PARAMETERS: dict[str, tuple[Callable[[], nn.Parameter], str]] = {
    "1-D": (lambda: weights((8,))[0], r"\(8,\).*two or more dims.*algorithm='adamw'"),
    "0-d": (lambda: weights(())[0], r"\(\).*two or more dims"),
    "empty 1-D": (lambda: weights((0,))[0], r"two or more dims"),
    "integer": (ints, "int64"),
    "complex": (lambda: weights((4, 4), dtype=torch.complex64)[0], "complex64"),
    "sparse": (sparse, "sparse"),
    "meta": (lambda: nn.Parameter(torch.ones(4, 4, device="meta")), "meta device.*to_empty"),
    "3-D": (lambda: weights((2, 3, 4))[0], "flatten=False.*flatten=True"),
}


@every
@pytest.mark.parametrize("case", list(BAD_PARAMETERS))
def test_parameters_that_are_no_matrices(name: str, case: str) -> None:
    make, match = BAD_PARAMETERS[case]
    cls, _ = OPTIMIZERS[name]
    good = weights((4, 4))[0]
    with pytest.raises(ValueError, match=f"(?s)blocks.1.odd.*{match}"):
        cls([("blocks.0.good", good), ("blocks.1.odd", make())])
    with pytest.raises(ValueError, match=f"(?s)parameter 1 of group 0.*{match}"):
        cls([good, make()])


@pytest.mark.parametrize("case", ["integer", "complex", "sparse", "meta"])
def test_parameters_that_adamw_groups_refuse_too(case: str) -> None:
    make, match = BAD_PARAMETERS[case]
    with pytest.raises(ValueError, match=f"(?s)odd.*{match}"):
        Muon([{"params": [("odd", make())], "algorithm": "adamw"}])


NAN, INF = math.nan, math.inf
BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": -1.0}, ValueError, r"lr must lie in \[0.0, inf\), got -1"),
    ({"lr": NAN}, ValueError, "lr must lie in"),
    ({"lr": INF}, ValueError, "lr must lie in"),
    ({"lr": True}, TypeError, "lr must be a number, got True"),
    ({"lr": "0.1"}, TypeError, "lr must be a number, got '0.1'"),
    ({"lr": None}, TypeError, "lr must be a number, got None"),
    ({"lr": torch.ones(2)}, ValueError, "lr as a tensor must have one element"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay must lie in"),
    ({"weight_decay": NAN}, ValueError, "weight_decay must lie in"),
    ({"momentum": 1.045}, ValueError, r"momentum must lie in \[0.0, 1.0\), got 1.045"),
    ({"momentum": 1.0}, ValueError, "momentum must lie in"),
    ({"momentum": -0.1}, ValueError, "momentum must lie in"),
    ({"momentum": NAN}, ValueError, "momentum must lie in"),
    ({"beta2": 1.0}, ValueError, "beta2 must lie in"),
    ({"fraction": 0}, ValueError, r"fraction must lie in \(0.0, 1.0\], got 0"),
    ({"fraction": 0.0}, ValueError, "fraction must lie in"),
    ({"fraction": 1.5}, ValueError, "fraction must lie in"),
    ({"fraction": NAN}, ValueError, "fraction must lie in"),
    ({"fraction": torch.tensor(0.5)}, TypeError, "fraction is static"),
    ({"eps": -1e-8}, ValueError, "eps must lie in"),
    ({"nesterov": 1}, TypeError, "nesterov must be True or False"),
    ({"cautious": "yes"}, TypeError, "cautious must be True or False, got 'yes'"),
    ({"selection": "best"}, ValueError, "selection must be 'local' or 'global', got 'best'"),
    ({"orthogonalizer": "qr"}, ValueError, "orthogonalizer 'qr'.*jordan"),
    ({"orthogonalizer": 3}, TypeError, "orthogonalizer.*got int"),
    ({"ns_steps": 0, "orthogonalizer": "jordan"}, ValueError, "steps"),
    ({"adjust_lr_fn": "rms"}, ValueError, "adjust_lr_fn must be one of .*got 'rms'"),
    ({"wire_dtype": "bf16"}, ValueError, "wire_dtype must be one of .*got 'bf16'"),
    ({"wire_dtype": torch.int8}, ValueError, "wire_dtype must be one of"),
    ({"compute_dtype": torch.float16}, ValueError, "compute_dtype must be"),
    ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be at least 1"),
    ({"wire": "sparse"}, ValueError, "wire must be"),
    ({"flatten": False, "split_sizes": (3, 3)}, ValueError, "parameter 0 of group 0.*split_sizes"),
    ({"num_heads": 3}, ValueError, "parameter 0 of group 0.*num_heads=3"),
    ({"learning_rate": 0.1}, TypeError, "learning_rate"),
]
ONLY = {"beta2": ("normuon", "dion3"), "fraction": ("dion2", "dion3"),
        "selection": ("dion2", "dion3"), "nesterov": ("muon", "normuon")}  # fmt: skip


BAD_CASES = [
    pytest.param(name, *case, id=f"{name} {case[0]}")
    for name in OPTIMIZERS
    for case in BAD_OPTIONS
    if all(name in ONLY.get(option, OPTIMIZERS) for option in case[0])
]


@pytest.mark.parametrize(("name", "options", "kind", "match"), BAD_CASES)
def test_options_that_make_no_sense(
    name: str, options: dict[str, Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=f"(?s){match}"):
        OPTIMIZERS[name][0](weights((4, 4)), **options)
    if not set(options) & {"bucket_bytes", "wire", "learning_rate"}:
        with pytest.raises(kind, match=f"(?s){match}"):  # in a group it is the same mistake
            Muon([{"params": weights((4, 4)), "algorithm": name, **options}])


def test_algorithms_that_there_are_not() -> None:
    with pytest.raises(ValueError, match=r"algorithm must be one of .*adamw.*got 'sgd'"):
        Muon([{"params": weights((4, 4)), "algorithm": "sgd"}])


@pytest.mark.parametrize("betas", [(0.9,), 0.9, (0.9, 1.0), (-0.1, 0.9), ("a", 0.9)])
def test_betas_that_make_no_sense(betas: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="betas"):
        Muon([{"params": weights((4,)), "algorithm": "adamw", "betas": betas}])


@pytest.mark.parametrize("cls", [Dion2, Dion3])
@pytest.mark.parametrize("compiled", [False, {"backend": "eager"}])
def test_whole_numbers_where_fractions_are_expected(cls: Any, compiled: Any) -> None:
    first, second = pairs([(6, 10), (10, 4)])
    one = cls(first, lr=1, momentum=0, weight_decay=0, fraction=1, eps=0, compile=compiled)
    two = cls(second, lr=1.0, momentum=0.0, weight_decay=0.0, fraction=1.0, eps=0.0)
    for p, q in zip(first, second, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    one.step()
    two.step()
    for p, q in zip(first, second, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-5)


def test_a_changed_option_takes_effect_or_is_refused() -> None:
    """Also what is built into the step: it is built again."""
    first, second = pairs([(6, 10)])
    one = Muon(first, lr=0.1, compute_dtype=torch.float32)
    two = Muon(second, lr=0.1, compute_dtype=torch.float32, adjust_lr_fn="match_rms_adamw")
    one.param_groups[0]["adjust_lr_fn"] = "match_rms_adamw"
    first[0].grad = torch.randn_like(first[0])
    second[0].grad = first[0].grad.clone()
    one.step()
    two.step()
    assert torch.equal(first[0], second[0])
    one.param_groups[0]["adjust_lr_fn"] = "rms"
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        one.step()
    assert torch.equal(first[0], second[0])
