"""Who is compared: entries that make an optimizer, and how exact their orthogonalization is.

Every peer is optional: one that isn't installed, or can't run, is named with the reason.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ortho_func
from ortho_func.primitives.orthogonalize import polar_svd

DION_VARIABLE = "ORTHO_FUNC_BENCH_DION"  # a checkout of microsoft/dion, for worker processes too
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95

Params = Sequence[nn.Parameter]


@dataclass(frozen=True)
class Entry:
    """An optimizer under a name; `make(params, mesh)` builds it, `mesh` None in one process.

    `schedule` is what it orthogonalizes with, for readers. `even` entries can't take shards of
    unequal sizes.
    """

    name: str
    schedule: str
    make: Callable[[Params, Any], Any]
    ours: bool = False
    even: bool = False
    compiles: bool = False


@dataclass(frozen=True)
class Absent:
    """A peer that can't take part, and why."""

    name: str
    reason: str


Found = tuple[list[Entry], list[Absent]]


def use_dion(path: str | None) -> None:
    """Make a checkout of microsoft/dion importable, here and in processes started from here."""
    if path is not None:
        os.environ[DION_VARIABLE] = str(Path(path).resolve())
    if DION_VARIABLE in os.environ and os.environ[DION_VARIABLE] not in sys.path:
        sys.path.insert(0, os.environ[DION_VARIABLE])


def _ours(algorithm: str, **options: Any) -> Callable[[Params, Any], Any]:
    kind = getattr(ortho_func, algorithm)

    def make(params: Params, mesh: Any) -> Any:
        return kind(list(params), lr=LR, weight_decay=DECAY, **options)

    return make


def ours(algorithm: str = "Muon", *, compiled: bool = True, three: bool = True) -> list[Entry]:
    """This library's entries: the default, with fewer steps, and compiled."""
    found = [Entry("ortho_func", "minimax, 4", _ours(algorithm), ours=True)]
    if three:
        make = _ours(algorithm, ns_steps=3)
        found.append(Entry("ortho_func, 3 steps", "minimax, 3", make, ours=True))
    if compiled:
        make = _ours(algorithm, compile=True)
        found.append(Entry("ortho_func, compiled", "minimax, 4", make, ours=True, compiles=True))
    if compiled and three:
        make = _ours(algorithm, compile=True, ns_steps=3)
        found.append(
            Entry("ortho_func, compiled, 3 steps", "minimax, 3", make, ours=True, compiles=True)
        )
    return found


def _torch_muon(params: Params, mesh: Any) -> Any:
    return torch.optim.Muon(list(params), lr=LR, weight_decay=DECAY, momentum=MOMENTUM)


def _pytorch_optimizer(params: Params, mesh: Any, coefficients: str = "original") -> Any:
    groups = [{"params": list(params), "use_muon": True}]
    module = importlib.import_module("pytorch_optimizer")
    return module.Muon(groups, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, ns_coeffs=coefficients)


def _heavyball(params: Params, mesh: Any) -> Any:
    module = importlib.import_module("heavyball")
    return module.Muon(list(params), lr=LR, weight_decay=DECAY, betas=(MOMENTUM, 0.99))


def _muon_fsdp2(params: Params, mesh: Any) -> Any:
    group = {"params": list(params), "use_muon": True, "lr": LR, "weight_decay": DECAY}
    return importlib.import_module("muon_fsdp2").Muon([{**group, "rms_scale": False}])


def _dion(params: Params, mesh: Any, algorithm: str = "Muon") -> Any:
    options: dict[str, Any] = {"adjust_lr": None}
    if algorithm == "Muon":
        options["nesterov"] = True
    kind = getattr(importlib.import_module("dion"), algorithm)
    return kind(list(params), distributed_mesh=mesh, lr=LR, weight_decay=DECAY, **options)


def one_process() -> Found:
    """Peers without a process group; muon-fsdp2's code for it calls a function it lacks."""
    candidates = [
        Entry("torch.optim.Muon", "Jordan, 5", _torch_muon),
        Entry("pytorch-optimizer", "Jordan, 5", _pytorch_optimizer),
        Entry(
            "pytorch-optimizer, Polar Express",
            "Polar Express, 5",
            partial(_pytorch_optimizer, coefficients="polar_express"),
        ),
        Entry("heavyball", "You, 5", _heavyball, compiles=True),
        Entry("muon-fsdp2", "Jordan, 5", _muon_fsdp2, compiles=True),
        Entry("microsoft/dion", "Polar Express, 5", _dion, compiles=True),
    ]
    return _those_that_run(candidates)


def sharded(algorithm: str) -> Found:
    """Peers over a mesh of ranks."""
    make = partial(_dion, algorithm=algorithm)
    candidates = [Entry("microsoft/dion", "Polar Express, 5", make, compiles=True)]
    if algorithm == "Muon":
        candidates += [
            Entry("muon-fsdp2", "Jordan, 5", _muon_fsdp2, even=True, compiles=True),
            Entry("torch.optim.Muon", "Jordan, 5", _torch_muon, even=True),
        ]
    return _those_that_import(candidates)


MODULES = {
    "pytorch-optimizer": "pytorch_optimizer",
    "pytorch-optimizer, Polar Express": "pytorch_optimizer",
    "heavyball": "heavyball",
    "muon-fsdp2": "muon_fsdp2",
    "microsoft/dion": "dion",
}


def _those_that_import(candidates: Sequence[Entry]) -> Found:
    there: list[Entry] = []
    absent: list[Absent] = []
    for entry in candidates:
        try:
            importlib.import_module(MODULES.get(entry.name, "torch"))
            there.append(entry)
        except Exception as error:  # whatever another package does at import
            absent.append(Absent(entry.name, _said(error)))
    return there, absent


def _those_that_run(candidates: Sequence[Entry]) -> Found:
    there, absent = _those_that_import(candidates)
    able = []
    for entry in there:
        try:
            params = parameters([(8, 16)])
            set_gradients(params, [torch.ones(8, 16)])
            entry.make(params, None).step()
            able.append(entry)
        except Exception as error:  # a peer's own fault: said, not raised
            absent.append(Absent(entry.name, _said(error)))
    return able, absent


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


# --- parameters and gradients ------------------------------------------------------------------


def parameters(shapes: Sequence[tuple[int, ...]], device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(0.02 * x.to(device)) for x in drawn]


def gradients(params: Params) -> list[Tensor]:
    """Gradients for parameters or their shards, made once."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(local(p).shape, generator=generator).to(local(p)) for p in params]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def set_gradients(params: Params, grads: Sequence[Tensor]) -> None:
    """Present the gradients anew: some peers overwrite them or take them away."""
    for p, g in zip(params, grads, strict=True):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        local(p.grad).copy_(g)


# --- accuracy ----------------------------------------------------------------------------------


def with_spectrum(values: Tensor, rows: int, cols: int, generator: torch.Generator) -> Tensor:
    def orthogonal(n: int) -> Tensor:
        drawn = torch.randn(n, len(values), dtype=torch.float64, generator=generator)
        return torch.linalg.qr(drawn).Q

    return (orthogonal(rows) * values.double()) @ orthogonal(cols).mT


def spectra() -> list[Tensor]:
    """Three gradients by which orthogonalizations are judged, in float32."""
    generator = torch.Generator().manual_seed(0)
    log = with_spectrum(torch.logspace(0, -3, 256), 256, 512, generator)
    flat = [torch.randn(shape, generator=generator) for shape in ((256, 1024), (256, 256))]
    return [*flat, log.float()]


def relative_errors(updates: Sequence[Tensor], matrices: Sequence[Tensor]) -> list[float]:
    """Of each update to the polar factor of its matrix, in the Frobenius norm."""
    polar = [polar_svd(x.double()) for x in matrices]
    pairs = zip(updates, polar, strict=True)
    return [float((u.double() - p).norm() / p.norm()) for u, p in pairs]


def errors(entry: Entry) -> list[float]:
    """Errors of what an entry's first step takes from parameters that are zero.

    Momentum is then a multiple of the gradient, decay nothing, and the shape scale of matrices
    with no more rows than columns is one: the step is lr times the orthogonalized gradient.
    """
    matrices = spectra()
    params = [nn.Parameter(torch.zeros_like(x)) for x in matrices]
    set_gradients(params, matrices)
    entry.make(params, None).step()
    return relative_errors([-p.detach() / LR for p in params], matrices)


# Two measurements of one schedule in bfloat16 differ by this much with the draw of the matrix.
ROUNDING = 0.02


def no_worse(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether errors are no worse on any of the spectra, up to `ROUNDING` of them."""
    return all(m <= t * (1 + ROUNDING) for m, t in zip(mine, theirs, strict=True))
