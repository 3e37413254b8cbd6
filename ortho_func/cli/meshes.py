"""Where meshes of thousands of ranks put a model's weights, without processes.

As PyTorch's own wrappers place them: ``fully_shard`` on one axis or two (HSDP), on top of
``parallelize_module``, and with experts on an axis of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ortho_func.cli.models import Model, Weight
from ortho_func.geometry import Layout, mesh_layout
from ortho_func.plan import ParamSpec

__all__ = ["MESHES", "Mesh", "find_mesh", "specs_of"]


@dataclass(frozen=True)
class Mesh:
    """A kind of mesh, the number of ranks, and the extent of its second kind of parallelism."""

    kind: str
    ranks: int
    extent: int = 1

    def layout(self, weight: Weight) -> Layout:
        """Where each rank holds which part of a weight."""
        shape, placements = MESHES[self.kind](self, weight)
        return mesh_layout(weight.shape, tuple(range(self.ranks)), shape, placements)


Placed = tuple[tuple[int, ...], tuple[Any, ...]]  # shape of the mesh, placements


def _sharded(weight: Weight, shards: int) -> Any:
    """What ``fully_shard`` does: dim 0; of a stack with fewer experts than shards, dim 1."""
    return Shard(1 if weight.is_stack and shards > weight.shape[0] else 0)


def _ddp(mesh: Mesh, weight: Weight) -> Placed:
    return (mesh.ranks,), (Replicate(),)


def _fsdp(mesh: Mesh, weight: Weight) -> Placed:
    return (mesh.ranks,), (_sharded(weight, mesh.ranks),)


def _hsdp(mesh: Mesh, weight: Weight) -> Placed:
    shards = mesh.ranks // mesh.extent
    return (mesh.extent, shards), (Replicate(), _sharded(weight, shards))


def _fsdp_tp(mesh: Mesh, weight: Weight) -> Placed:
    shards = mesh.ranks // mesh.extent
    shape, fsdp = (shards, mesh.extent), _sharded(weight, shards)
    if weight.split == "none":
        return shape, (fsdp, Replicate())
    matrix_dim = len(weight.shape) - 2 if weight.is_stack else 0
    tp = Shard(matrix_dim if weight.split == "column" else matrix_dim + 1)
    if fsdp == tp:  # fully_shard cuts what tensor parallelism has left of the dim
        return shape, (_StridedShard(tp.dim, split_factor=mesh.extent), tp)
    return shape, (fsdp, tp)


def _ep(mesh: Mesh, weight: Weight) -> Placed:
    if not weight.is_stack:
        return _fsdp(mesh, weight)
    return (mesh.ranks // mesh.extent, mesh.extent), (Shard(1), Shard(0))


#: Kinds of mesh: a mesh and a weight to the shape of the mesh and the weight's placements.
MESHES: dict[str, Callable[[Mesh, Weight], Placed]] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "fsdp-tp": _fsdp_tp,
    "ep": _ep,
}


def find_mesh(text: str, ranks: int) -> Mesh:
    """A mesh by its name: "ddp", "fsdp", "hsdp:8" (replicas), "fsdp-tp:8" or "ep:8".

    Raises:
        ValueError: for an unknown name, or an extent that does not divide the ranks.

    Examples:
        >>> find_mesh("hsdp:8", 64)
        Mesh(kind='hsdp', ranks=64, extent=8)
    """
    kind, _, tail = text.partition(":")
    if kind not in MESHES:
        raise ValueError(f"mesh must be one of {', '.join(MESHES)}, got {text!r}.")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}.")
    if kind in ("ddp", "fsdp"):
        if tail:
            raise ValueError(f"mesh {kind!r} takes no extent, got {text!r}.")
        return Mesh(kind, ranks)
    if not tail.isdigit() or int(tail) < 1:
        raise ValueError(f"mesh {kind!r} needs an extent, such as '{kind}:8', got {text!r}.")
    if ranks % int(tail):
        raise ValueError(f"mesh {text!r}: {ranks} ranks are not divisible by {tail}.")
    return Mesh(kind, ranks, int(tail))


def specs_of(model: Model, mesh: Mesh, group: int = 0) -> list[ParamSpec]:
    """The weights of a model as the plan sees them."""
    return [
        ParamSpec(weight.name, mesh.layout(weight), weight.reading, group)
        for weight in model.weights
    ]
