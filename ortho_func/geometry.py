"""Which rectangle of which matrix each rank holds.

The only file that inspects DTensor. Everything here is arithmetic on shapes and placements:
no communication, nothing rank-local, the same answer on every rank.

Words: a *layout* says which box of one parameter's index space each rank of a group holds; a
*reading* says which rectangles of the parameter are matrices; a *piece* is the intersection of
a matrix with a rank's box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

try:  # torch can be built without distributed; plain tensors then still work
    import torch.distributed as dist
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    HAS_DISTRIBUTED = dist.is_available()
except ImportError:  # pragma: no cover - depends on the torch build
    HAS_DISTRIBUTED = False

# Types of which one knows, without an import, that they are no DTensor.
PLAIN = (Tensor, torch.nn.Parameter)

__all__ = [
    "Box",
    "Domain",
    "Layout",
    "MatrixGeometry",
    "Piece",
    "Reading",
    "StackBox",
    "Sums",
    "aligned",
    "box_here",
    "check_process_group",
    "domain_group",
    "group_over",
    "group_within",
    "layout_of",
    "like",
    "like_without_rows",
    "local",
    "local_shape",
    "matrices",
    "mesh_layout",
    "on_mesh",
    "placed",
    "ranks_in",
    "ranks_of",
    "replica_groups",
    "replicated_layout",
    "stack_box",
    "takes_part",
    "this_rank",
    "total",
    "work_device",
]


class Box(NamedTuple):
    """A box of a parameter's index space: the first index and the extent along each dim."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.size)


class Domain(NamedTuple):
    """The ranks over which the pieces of a set of parameters lie, in the order of their group.

    That order is ascending for a mesh, whatever the order of its axes.
    """

    ranks: tuple[int, ...]  # global ranks
    mesh: tuple[int, ...]  # shape of the mesh whose row-major order `ranks` is

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)


class Sums(NamedTuple):
    """Which replicas hold terms of one sum instead of equal copies.

    Ranks with the same `families[i]` hold its terms: an owner adds up what all replicas in its
    own family send, and divides by `over`.
    """

    families: tuple[int, ...]
    over: int = 1


@dataclass(frozen=True)
class Layout:
    """Where each rank of a domain holds which box of one parameter.

    `boxes[i]` is what the i-th rank of the domain holds, possibly empty. Ranks with the same
    `replicas[i]` hold the parameter once between them: all of it, or one term of a sum.
    `chunks[i]` says, by tensor dim, which of its chunks `boxes[i]` is.
    """

    shape: tuple[int, ...]
    domain: Domain
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...] = ()
    sums: Sums | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # of thousands of boxes, and layouts are keys of caches
        return hash((self.shape, self.domain, self.boxes, self.replicas, self.sums or ()))

    @property
    def families(self) -> tuple[int, ...]:
        """Ranks with the same number are collected from together: those of one replica or sum."""
        return self.replicas if self.sums is None else self.sums.families

    @cached_property
    def terms(self) -> int:
        """How many replicas an owner adds up."""
        pairs = set(zip(self.families, self.replicas, strict=True))
        return len(pairs) // len(set(self.families))

    def replica(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the parameter once between them, `rank` among them, in order."""
        mine = self.replicas[rank]
        return tuple(other for other, replica in enumerate(self.replicas) if replica == mine)

    @cached_property
    def mirrored(self) -> bool:
        """Whether there are several equal replicas of several ranks each, cut alike in rank order.

        Then every rank has *peers*: the ranks at its place in the other replicas.
        """
        first, *others = self._members.values()
        if self.sums is not None or not others or len(first) == 1:
            return False
        return len({tuple(self._held(rank) for rank in one) for one in (first, *others)}) == 1

    def peers(self, rank: int) -> tuple[int, ...]:
        """Where `mirrored`: the ranks that hold what `rank` holds, itself among them, in order."""
        place = self._members[self.replicas[rank]].index(rank)
        return tuple(sorted(members[place] for members in self._members.values()))

    @cached_property
    def _members(self) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for rank, replica in enumerate(self.replicas):
            members.setdefault(replica, []).append(rank)
        return members

    def _held(self, rank: int) -> tuple[Any, ...]:
        return self.boxes[rank], self.chunks[rank] if self.chunks else ()

    def averaged(self) -> Layout:
        """The same boxes, where replicas hold the terms of an average instead of equal copies."""
        count = len(set(self.replicas))
        if count == 1:
            return self
        return replace(self, sums=Sums((0,) * self.domain.size, count))


@dataclass(frozen=True)
class Reading:
    """How a parameter is read as matrices.

    `flatten` says what a parameter of three or more dims is: True, one matrix of dim 0 by all
    the others (a convolution); False, a stack of matrices over its leading dims (experts).
    `split_sizes` cuts the rows into blocks that are matrices of their own, `num_heads` into
    that many equal ones.
    """

    flatten: bool | None = None
    split_sizes: tuple[int, ...] | None = None
    num_heads: int | None = None

    def check(self, shape: Sequence[int], name: str) -> None:
        """Raise `ValueError` if a parameter of this shape cannot be read so."""
        if len(shape) < 2:
            raise ValueError(
                f"{name} has shape {tuple(shape)}: a matrix algorithm needs two or more dims. "
                "Put it in a group with algorithm='adamw', or `partition` it to `adamw`. (A 1-D "
                "parameter that should be a matrix may have been flattened by FSDP1: use "
                "fully_shard.)"
            )
        if len(shape) > 2 and self.flatten is None:
            raise ValueError(
                f"{name} has shape {tuple(shape)}: say what its dims are, flatten=False for a "
                "stack of matrices over the leading dims (experts) or flatten=True for one "
                "matrix of dim 0 by all others (a convolution)."
            )
        rows = self.dims(shape)[1]
        if self.split_sizes is not None and self.num_heads is not None:
            raise ValueError(f"{name}: give split_sizes or num_heads, not both.")
        if self.split_sizes is not None and (
            sum(self.split_sizes) != rows or min(self.split_sizes) < 1
        ):
            raise ValueError(
                f"{name} has shape {tuple(shape)}: split_sizes {self.split_sizes} must be "
                f"positive and add up to its {rows} rows, but add up to {sum(self.split_sizes)}."
            )
        if self.num_heads is not None and (self.num_heads < 1 or rows % self.num_heads):
            raise ValueError(
                f"{name} has shape {tuple(shape)}: its {rows} rows cannot be cut into "
                f"num_heads={self.num_heads} equal matrices."
            )

    def dims(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The parameter as (stack, rows, columns)."""
        if self.flatten and len(shape) > 2:
            return 1, shape[0], math.prod(shape[1:])
        return math.prod(shape[:-2]), shape[-2], shape[-1]

    def blocks(self, rows: int) -> tuple[tuple[int, int], ...]:
        """First row and number of rows of each row block."""
        sizes: Sequence[int] = (rows,)
        if self.split_sizes is not None:
            sizes = self.split_sizes
        elif self.num_heads is not None:
            sizes = (rows // self.num_heads,) * self.num_heads
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(zip(starts, sizes, strict=True))


class Piece(NamedTuple):
    """The part of a matrix that one rank holds: rows and columns of the matrix."""

    rank: int
    row: int
    rows: int
    col: int
    cols: int

    @property
    def numel(self) -> int:
        """Elements in the piece."""
        return self.rows * self.cols


@dataclass(frozen=True)
class MatrixGeometry:
    """One matrix of a parameter and its pieces, in the order of their ranks.

    `edges` are the empty pieces of ranks whose shard has no rows or no columns: nothing of the
    matrix is theirs, but state with one value per row (or column) is replicated there.
    """

    stack: int
    block: int
    rows: int
    cols: int
    pieces: tuple[Piece, ...]
    edges: tuple[Piece, ...] = ()


class StackBox(NamedTuple):
    """A rank's box seen as (stack, rows, columns): which stack indices, row and column range."""

    stack: frozenset[int]
    row: int
    rows: int
    col: int
    cols: int


def stack_box(shape: tuple[int, ...], box: Box, reading: Reading) -> StackBox:
    """A box as stack indices, rows and columns. Raises `ValueError` where it is no rectangle."""
    if not (reading.flatten and len(shape) > 2):
        lead = [range(s, s + n) for s, n in zip(box.start[:-2], box.size[:-2], strict=True)]
        stack = [0]
        for indices, extent in zip(lead, shape[:-2], strict=True):
            stack = [at * extent + i for at in stack for i in indices]
        (row, col), (rows, cols) = box.start[-2:], box.size[-2:]
        return StackBox(frozenset(stack), row, rows, col, cols)
    col, partial = 0, False
    for start, size, extent in zip(box.start[1:], box.size[1:], shape[1:], strict=True):
        col = col * extent + start
        if partial and size != extent:
            raise ValueError(
                f"A parameter of shape {shape}, flatten=True, is sharded on a kernel dim, so a "
                "shard is no rectangle of the flattened matrix. Shard it on dim 0 or dim 1."
            )
        partial = partial or size > 1
    if math.prod(box.size[1:]) == 0:
        col = math.prod(shape[1:])
    return StackBox(frozenset((0,)), box.start[0], box.size[0], col, math.prod(box.size[1:]))


@lru_cache(maxsize=256)
def matrices(layout: Layout, reading: Reading) -> tuple[MatrixGeometry, ...]:
    """The matrices of a parameter in natural order (stack index, then row block).

    In this order the pieces of a rank tile its shard, flattened, without gaps: packing a shard
    is flattening it.
    """
    stacks, rows, cols = reading.dims(layout.shape)
    if rows * cols == 0:
        return ()
    boxes = [stack_box(layout.shape, box, reading) for box in layout.boxes]
    holders = _holders(boxes, stacks)
    found = []
    shared: dict[tuple[int, int], tuple[tuple[Piece, ...], tuple[Piece, ...]]] = {}
    for index in range(stacks):
        for block, (first, count) in enumerate(reading.blocks(rows)):
            key = (block, id(holders[index]))
            if key not in shared:
                pieces = _pieces(boxes, holders[index], first, count)
                solid = tuple(piece for piece in pieces if piece.numel)
                shared[key] = (solid, tuple(piece for piece in pieces if not piece.numel))
            found.append(MatrixGeometry(index, block, count, cols, *shared[key]))
    return tuple(found)


def _holders(boxes: Sequence[StackBox], stacks: int) -> list[list[int]]:
    """By stack index, the ranks that hold it: one and the same list where they are the same."""
    alike: dict[frozenset[int], list[int]] = {}
    for rank, box in enumerate(boxes):
        alike.setdefault(box.stack, []).append(rank)
    parts: list[list[frozenset[int]]] = [[] for _ in range(stacks)]
    for stack in alike:
        for index in stack:
            parts[index].append(stack)
    merged: dict[tuple[frozenset[int], ...], list[int]] = {}
    for found in map(tuple, parts):
        if found not in merged:
            merged[found] = sorted(rank for stack in found for rank in alike[stack])
    return [merged[tuple(found)] for found in parts]


def _pieces(boxes: Sequence[StackBox], ranks: Sequence[int], first: int, count: int) -> list[Piece]:
    pieces = []
    for rank in ranks:
        box = boxes[rank]
        start, stop = max(first, box.row), min(first + count, box.row + box.rows)
        if box.rows == 0:
            pieces.append(Piece(rank, count, 0, box.col, box.cols))
        elif start < stop:
            pieces.append(Piece(rank, start - first, stop - start, box.col, box.cols))
    return pieces


# ---------------------------------------------------------------------------------------------
# Layouts of real tensors


@lru_cache(maxsize=1024)
def mesh_layout(
    shape: tuple[int, ...], ranks: tuple[int, ...], mesh: tuple[int, ...], placements: Any
) -> Layout:
    """The layout of a DTensor on a mesh of these ranks, row-major.

    Where two axes cut one dim, `_StridedShard` says that the left one cut last, as ``fully_shard``
    does with what tensor parallelism left. (DTensor's own layout function cuts from left to
    right even then, and for some uneven sizes gives other shards than the tensors have.)

    Raises `ValueError` on split factors that are no order of the mesh's axes.
    """
    orders = _cut_orders(mesh, placements)
    boxes, replicas, chunks = [], [], []
    for flat in range(len(ranks)):
        coordinate = _unravel(flat, mesh)
        boxes.append(_box(shape, mesh, coordinate, orders))
        chunks.append(_chunk(len(shape), mesh, coordinate, orders))
        replica = 0
        for extent, at, placement in zip(mesh, coordinate, placements, strict=True):
            if placement.is_replicate():
                replica = replica * extent + at
        replicas.append(replica)
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    if order != list(range(len(ranks))):  # process groups know no other order than this
        ranks, mesh = tuple(sorted(ranks)), (len(ranks),)
        boxes, replicas = [boxes[i] for i in order], [replicas[i] for i in order]
        chunks = [chunks[i] for i in order]
    return Layout(shape, Domain(ranks, mesh), tuple(boxes), tuple(replicas), tuple(chunks))


def _cut_orders(mesh: tuple[int, ...], placements: Sequence[Any]) -> dict[int, list[int]]:
    """By tensor dim, the mesh axes that cut it, in the order of the cuts.

    A split factor is the number of parts into which axes further right had cut before.
    """
    orders: dict[int, list[int]] = {}
    for axis, placement in reversed(list(enumerate(placements))):
        if placement.is_replicate():
            continue
        order = orders.setdefault(placement.dim, [])
        parts, place = 1, 0
        while parts < getattr(placement, "split_factor", 1) and place < len(order):
            parts, place = parts * mesh[order[place]], place + 1
        if parts != getattr(placement, "split_factor", 1):
            raise ValueError(
                f"placements {tuple(placements)} on a mesh of shape {mesh} are no order of "
                "cutting: a split factor must be the size of axes to its right that cut the "
                "same dim."
            )
        order.insert(place, axis)
    return orders


def _box(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: Sequence[int],
    orders: dict[int, list[int]],
) -> Box:
    """What the rank at a coordinate holds: of each dim a chunk of a chunk, as ``torch.chunk``."""
    start, size = [0] * len(shape), list(shape)
    for dim, axes in orders.items():
        for axis in axes:
            chunk = -(-size[dim] // mesh[axis])
            first = min(size[dim], chunk * coordinate[axis])
            start[dim] += first
            size[dim] = min(size[dim] - first, chunk)
        if size[dim] == 0:
            start[dim] = shape[dim]
    return Box(tuple(start), tuple(size))


def _chunk(
    dims: int, mesh: tuple[int, ...], coordinate: Sequence[int], orders: dict[int, list[int]]
) -> tuple[int, ...]:
    """By tensor dim, the number of the chunk at a coordinate, in the order of the cuts."""
    numbers = [0] * dims
    for dim, axes in orders.items():
        for axis in axes:
            numbers[dim] = numbers[dim] * mesh[axis] + coordinate[axis]
    return tuple(numbers)


def replicated_layout(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Layout:
    """The layout of a plain tensor of which every rank of a group holds an equal copy."""
    box = Box((0,) * len(shape), shape)
    count = len(ranks)
    chunks = ((0,) * len(shape),) * count
    return Layout(shape, Domain(ranks, (count,)), (box,) * count, tuple(range(count)), chunks)


def layout_of(
    tensor: Tensor, *, process_group: ProcessGroup | None = None, name: str = "parameter"
) -> Layout:
    """The layout of a parameter: of its mesh if it is a DTensor, else of `process_group`.

    Raises `ValueError` on placements that are no layout of a parameter, such as Partial.
    """
    shape = tuple(tensor.shape)
    if not on_mesh(tensor):
        if process_group is None:
            return replicated_layout(shape, (this_rank(),))
        return replicated_layout(shape, ranks_in(process_group))
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    for placement in placements:
        if not _is_layout(placement):
            raise ValueError(
                f"{name} has placement {placement}: a parameter can be Shard or Replicate. "
                "Redistribute it before building the optimizer."
            )
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    try:
        layout = mesh_layout(shape, ranks, tuple(mesh.mesh.shape), placements)
    except ValueError as error:
        raise ValueError(f"{name} of shape {shape}: {error}") from None
    _check_shard(tensor, layout, name)
    return layout


def box_here(tensor: Tensor) -> Box:
    """Which box of a parameter this rank holds: all of it unless it is a DTensor."""
    layout = layout_of(tensor)
    return layout.boxes[layout.domain.ranks.index(this_rank())]


def _is_layout(placement: Any) -> bool:
    """Whether a placement is Replicate, Shard or _StridedShard."""
    kinds = dtensors()
    return isinstance(
        placement, (kinds.Replicate, kinds.Shard, kinds.placement_types._StridedShard)
    )


def _check_shard(tensor: DTensor, layout: Layout, name: str) -> None:
    """What is here must be what the layout says, or the ranks would exchange other sizes."""
    rank = dist.get_rank()
    if rank not in layout.domain.ranks or 0 in layout.shape:  # nothing is exchanged of nothing
        return
    planned = layout.boxes[layout.domain.ranks.index(rank)].size
    if planned != local_shape(tensor):
        raise ValueError(
            f"{name} of shape {layout.shape} with placements {tuple(tensor.placements)} on a mesh "
            f"of shape {tuple(tensor.device_mesh.mesh.shape)} has a shard of shape "
            f"{local_shape(tensor)} where its placements say {planned}. Place it with fully_shard "
            "or parallelize_module, or choose sizes that divide evenly."
        )


def _unravel(flat: int, shape: Sequence[int]) -> list[int]:
    coordinate = []
    for extent in reversed(shape):
        coordinate.append(flat % extent)
        flat //= extent
    return coordinate[::-1]


def this_rank() -> int:
    """This process's global rank, 0 without a process group."""
    return dist.get_rank() if HAS_DISTRIBUTED and dist.is_initialized() else 0


def takes_part(tensor: Tensor) -> bool:
    """Whether this rank is in the parameter's mesh."""
    if not on_mesh(tensor):
        return True
    return tensor.device_mesh.get_coordinate() is not None


def ranks_of(tensor: Tensor, process_group: ProcessGroup | None = None) -> tuple[int, ...]:
    """The ranks over which a parameter lies, in the order of their group; none if on its own."""
    if on_mesh(tensor):
        return tuple(sorted(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist()))
    return () if process_group is None else ranks_in(process_group)


def ranks_in(process_group: ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a process group, in its order."""
    return tuple(dist.get_process_group_ranks(process_group))


def domain_group(tensor: Tensor, process_group: ProcessGroup | None) -> Any:
    """The process group over which one parameter's pieces travel, None if it is on its own."""
    return group_over([tensor], process_group) if on_mesh(tensor) else process_group


def replica_groups(tensor: Tensor, process_group: ProcessGroup | None) -> list[Any]:
    """The process groups over which a parameter is replicated, one for each axis of its mesh."""
    if not on_mesh(tensor):
        return [] if process_group is None else [process_group]
    mesh = tensor.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    ]


def check_process_group(process_group: Any) -> None:
    """Raise `TypeError` for what is no process group."""
    if process_group is None or (HAS_DISTRIBUTED and isinstance(process_group, dist.ProcessGroup)):
        return
    kind = type(process_group).__name__
    raise TypeError(
        f"process_group must be a torch.distributed.ProcessGroup, got {kind}. Of a mesh, give "
        "mesh.get_group()."
    )


def placed(tensor: Tensor) -> str:
    """In words, how a parameter is placed, and on what its matrices are worked on."""
    device = work_device(tensor).type
    if not on_mesh(tensor):
        return f"replicated, on {device}"
    placements = ", ".join(map(str, tensor.placements))
    mesh = tuple(tensor.device_mesh.mesh.shape)
    return f"placements ({placements}) on a mesh of shape {mesh}, on {device}"


def group_over(tensors: Sequence[Tensor], process_group: ProcessGroup | None) -> Any:
    """The process group over the ranks of parameters that lie over the same ranks.

    `process_group` if it is over these ranks; or one of a mesh, chosen alike on all ranks whatever
    the order of the parameters; or else a new one, for which all these ranks must ask.
    """
    if process_group is not None and (
        not tensors or ranks_of(tensors[0], process_group) == ranks_in(process_group)
    ):
        return process_group
    meshes = [tensor.device_mesh for tensor in tensors if on_mesh(tensor)]
    first: Any = min(meshes, key=lambda mesh: (mesh.ndim, mesh.mesh_dim_names or ()))
    world: Any = dist.group.WORLD
    ranks, backend = ranks_of(tensors[0]), dist.get_backend(first.get_group(0))
    if len(ranks) == world.size() and backend == dist.get_backend():
        return world
    return group_within(first, ranks)


def group_within(mesh: Any, ranks: tuple[int, ...]) -> Any:
    """The process group over all or some axes of a mesh: its own, or else a new one.

    All of `ranks`, in ascending order and this process among them, must ask for it.
    """
    for axis in range(mesh.ndim):
        if ranks_in(mesh.get_group(axis)) == ranks:
            return mesh.get_group(axis)
    for flat in getattr(mesh._get_root_mesh(), "_flatten_mapping", {}).values():
        if tuple(sorted(flat.mesh.flatten().tolist())) == ranks:
            return flat.get_group()
    world: Any = dist.group.WORLD
    if world.bound_device_id is not None:  # its communicator is split: all must ask
        return _part_of(mesh, ranks)._flatten().get_group()
    return dist.distributed_c10d._new_group_with_tag(  # the same one to who asks again
        list(ranks), backend=dist.get_backend(mesh.get_group(0)), pg_tag="ortho_func",
        use_local_synchronization=True,
    )  # fmt: skip


def _part_of(mesh: Any, ranks: tuple[int, ...]) -> Any:
    """The axes of a mesh along which some of its ranks differ."""
    if len(ranks) == mesh.size():
        return mesh
    found = torch.isin(mesh.mesh, torch.tensor(ranks)).nonzero()
    axes = [axis for axis in range(mesh.ndim) if len(found[:, axis].unique()) > 1]
    if mesh.mesh_dim_names is None:
        raise ValueError(
            "exchanges in two hops need a process group over several axes of the mesh: name them "
            "(mesh_dim_names=), or choose hops='one'."
        )
    return mesh[tuple(mesh.mesh_dim_names[axis] for axis in axes)]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, waited for: the tensor itself unless it is a DTensor."""
    if not on_mesh(tensor):
        return tensor
    if torch.compiler.is_compiling():
        return tensor.to_local()
    shard = tensor._local_tensor
    return shard.wait() if isinstance(shard, AsyncCollectiveTensor) else shard


def shards(tensors: Sequence[Tensor]) -> list[tuple[Any, Tensor]]:
    """The DTensors among these, each with its shard, for `same_shards`."""
    return [(x, x._local_tensor) for x in tensors if on_mesh(x)]


def same_shards(pairs: Sequence[tuple[Any, Tensor]]) -> bool:
    """Whether these shards are still the same tensors: a wrapper may make them anew."""
    return all(x._local_tensor is shard for x, shard in pairs)


def work_device(tensor: Tensor) -> torch.device:
    """Where a parameter's matrices travel and are whole: its mesh's device, else its shard's.

    They differ for offloaded shards, which lie on the CPU while the mesh is an accelerator's.
    """
    home = local(tensor).device
    if not on_mesh(tensor):
        return home
    kind = tensor.device_mesh.device_type
    if kind in (home.type, "cpu"):
        return home
    return torch.device(kind, torch.get_device_module(kind).current_device())


def on_mesh(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor."""
    if type(tensor) in PLAIN:
        return False
    return HAS_DISTRIBUTED and isinstance(tensor, dtensors().DTensor)


def dtensors() -> Any:
    """``torch.distributed.tensor``: to import it takes longer than all of this library."""
    import torch.distributed.tensor as module

    return module


def local_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of this rank's shard."""
    return tuple(local(tensor).shape)


def like(parameter: Tensor, shard: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Wrap this rank's `shard` with the parameter's placements (a plain tensor stays plain).

    `shape` is the whole tensor's shape if it differs from the parameter's in dims of extent
    one; on such dims a sharded placement becomes Replicate.
    """
    if not on_mesh(parameter):
        return shard
    whole = tuple(parameter.shape if shape is None else shape)
    placed_as: Sequence[Any] = parameter.placements
    placements = [
        dtensors().Replicate()
        if not p.is_replicate() and whole[p.dim] != parameter.shape[p.dim]
        else p
        for p in placed_as
    ]
    strides = torch.empty(whole, device="meta").stride()
    wrapped: Tensor = dtensors().DTensor.from_local(
        shard,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(whole),
        stride=strides,
    )
    return wrapped


def like_without_rows(
    parameter: Tensor, shard: Tensor, shape: Sequence[int], row_dim: int
) -> Tensor:
    """Wrap a shard whose dims are the parameter's without `row_dim`, and one more at the end.

    Where the parameter's rows are sharded it is replicated. A plain tensor stays plain.
    """
    if not on_mesh(parameter):
        return shard
    wrapped: Tensor = dtensors().DTensor.from_local(
        shard,
        parameter.device_mesh,
        [_without_rows(placement, row_dim) for placement in parameter.placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(tuple(shape), device="meta").stride(),
    )
    return wrapped


def _without_rows(placement: Any, row_dim: int) -> Any:
    if placement.is_replicate() or placement.dim == row_dim:
        return dtensors().Replicate()
    dim = placement.dim - (placement.dim > row_dim)
    if hasattr(placement, "split_factor"):
        return type(placement)(dim, split_factor=placement.split_factor)
    return dtensors().Shard(dim)


def total(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """The sum of values, each a 0-d sum over this rank's shard of a tensor, over all shards.

    One all-reduce of a number for each mesh and way of sharding, replicas counted once. Raises
    `ValueError` on DTensors that hold partial sums.
    """
    here: list[Tensor] = []
    spread: dict[tuple[Any, tuple[bool, ...]], list[Tensor]] = {}
    for value, tensor in zip(values, tensors, strict=True):
        if not on_mesh(tensor):
            here.append(value)
            continue
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError("a gradient holds partial sums: redistribute it as its parameter is.")
        cut = tuple(not placement.is_replicate() for placement in tensor.placements)
        spread.setdefault((tensor.device_mesh, cut), []).append(value)
    for (mesh, cut), values in spread.items():
        kinds = dtensors()
        placements = [kinds.Partial() if along else kinds.Replicate() for along in cut]
        shard = torch.stack(values).sum()
        summed = kinds.DTensor.from_local(shard, mesh, placements, run_check=False)
        here.append(summed.full_tensor())
    return torch.stack(here).sum()


def aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the parameter's placements (a Partial one is reduced first), dense."""
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    if not (on_mesh(gradient) and on_mesh(parameter)):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)
