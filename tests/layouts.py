"""What the table of layouts is made of: parameters placed as users place them, and how to run them.

A layout is a function of the world that turns whole tensors into parameters. Every algorithm runs
on every layout and must equal the naive one-process reference on the gathered tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import reference
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ortho_func

WHOLE = {
    "muon": (ortho_func.Muon, reference.muon, {}),
    "normuon": (ortho_func.NorMuon, reference.normuon, {"beta2": 0.9}),
    "dion2": (ortho_func.Dion2, reference.dion2, {"fraction": 0.3}),
    "dion3": (ortho_func.Dion3, reference.dion3, {"fraction": 0.3, "beta2": 0.9}),
    "dion": (ortho_func.Dion, reference.dion, {"rank_fraction": 0.4}),
}


def exact(algorithm: str) -> dict[str, Any]:
    """Options under which an algorithm's formula is exact, and no layout matters."""
    options = {} if algorithm == "dion" else {"orthogonalizer": "svd"}
    return {**options, "selection": "global"} if algorithm in ("dion2", "dion3") else options


@dataclass(frozen=True)
class Case:
    """Shapes by name, how to place them, and options of the algorithm."""

    shapes: Mapping[str, tuple[int, ...]]
    place: Callable[..., dict[str, Tensor]]
    options: Mapping[str, Any] = field(default_factory=dict)


def whole_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """The same random tensors on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float32)
        for name, shape in shapes.items()
    }


class Weights(nn.Module):
    """A module that holds parameters and has no forward."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


def by_fully_shard(tensors: Mapping[str, Tensor], mesh: tuple[int, ...], **options: Any) -> Any:
    """Real FSDP2 (1-D mesh) or HSDP (2-D mesh: replicate, shard)."""
    names = ("replicate", "shard")[-len(mesh) :]
    module = Weights(tensors)
    fully_shard(module, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names), **options)
    return dict(module.named_parameters())


def by_placements(
    tensors: Mapping[str, Tensor], mesh: tuple[int, ...], placements: Any
) -> dict[str, Tensor]:
    """`distribute_tensor` with the placements given, one list for all or a dict by name."""
    grid = init_device_mesh("cpu", mesh, mesh_dim_names=tuple(f"axis{i}" for i in range(len(mesh))))
    found = {}
    for name, tensor in tensors.items():
        chosen = placements[name] if isinstance(placements, Mapping) else placements
        found[name] = nn.Parameter(distribute_tensor(tensor.clone(), grid, list(chosen)))
    return found


class TwoLayers(nn.Module):
    """A column-wise and a row-wise parallel layer."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up = nn.Linear(up.shape[1], up.shape[0], bias=False, dtype=up.dtype)
        self.down = nn.Linear(down.shape[1], down.shape[0], bias=False, dtype=down.dtype)
        with torch.no_grad():
            self.up.weight.copy_(up)
            self.down.weight.copy_(down)


def by_tensor_parallel(tensors: Mapping[str, Tensor], mesh: tuple[int, ...]) -> dict[str, Tensor]:
    """`parallelize_module`, and on a 2-D mesh `fully_shard` over its first axis as well."""
    names = ("fsdp", "tp")[-len(mesh) :]
    grid = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    module = TwoLayers(tensors["up"], tensors["down"])
    parallelize_module(module, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if len(mesh) == 2:
        fully_shard(module, mesh=grid["fsdp"])
    return {"up": module.up.weight, "down": module.down.weight}


def scatter_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor placed as a parameter is, without communication."""
    if not isinstance(parameter, DTensor):
        return whole.clone()
    shards = distribute_like(whole, parameter)
    return shards


def distribute_like(whole: Tensor, parameter: DTensor) -> DTensor:
    """This rank's box of `whole` under the parameter's placements."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, start = compute_local_shape_and_global_offset(
        whole.shape, parameter.device_mesh, parameter.placements
    )
    box = tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))
    shard = whole[box].clone()
    assert shard.shape == parameter._local_tensor.shape
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def gather(parameter: Tensor) -> Tensor:
    """The whole parameter on every rank."""
    found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return found.detach()


def relative_error(mine: Tensor, right: Tensor) -> float:
    """‖mine − right‖ / ‖right‖ in float64; NaN counts as infinite."""
    error = (mine.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30)
    return float(error) if torch.isfinite(error) else float("inf")


def train(
    parameters: Mapping[str, Tensor],
    gradients: list[dict[str, Tensor | None]],
    algorithm: str,
    **options: Any,
) -> torch.optim.Optimizer:
    """Run the library's optimizer over whole gradients, placed like the parameters."""
    cls, _, extra = WHOLE[algorithm]
    optimizer = cls(list(parameters.items()), **{**extra, **options})
    for step in gradients:
        for name, parameter in parameters.items():
            whole = step[name]
            parameter.grad = None if whole is None else scatter_like(whole, parameter)
        optimizer.step()
    return optimizer


def expected(
    tensors: Mapping[str, Tensor],
    gradients: list[dict[str, Tensor | None]],
    algorithm: str,
    **options: Any,
) -> dict[str, Tensor]:
    """What the naive one-process reference makes of it."""
    _, naive, extra = WHOLE[algorithm]
    return naive(tensors, gradients, **{**extra, **options})[0]


__all__ = [
    "WHOLE",
    "Case",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Weights",
    "by_fully_shard",
    "by_placements",
    "by_tensor_parallel",
    "exact",
    "expected",
    "gather",
    "relative_error",
    "scatter_like",
    "train",
    "whole_tensors",
]
