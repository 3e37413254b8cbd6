"""Between shards and whole matrices: what one route does with its buffers.

Four pure functions, each the inverse of another: `load` puts a rank's shards into a send buffer,
`assemble` makes whole matrices of what arrived, `disassemble` and `unload` are their mirror
image. Shapes: n matrices, R rows, C columns; s sources; i, j row and column parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import rearrange, repeat
from torch import Tensor

from ortho_func.primitives.packing import concatenate, decode, encode, views
from ortho_func.primitives.padding import narrow, pad_to_max
from ortho_func.routing import Batch, Entry, Route, Run

__all__ = ["assemble", "disassemble", "load", "unload"]

Sided = tuple[Tensor, tuple[Tensor, ...]]  # a tensor and its side vectors


def load(route: Route, shards: Sequence[Tensor], sides: Sequence[Sequence[Tensor]]) -> Tensor:
    """The send buffer: shards padded, flattened and joined in the order of the wire.

    Args:
        route: where everything goes.
        shards: by entry, [stack, rows, cols] or anything that can be reshaped to it.
        sides: by entry, its side vectors, [stack, values], fp32.
    """
    dtype = route.bucket.wire_dtype
    if route.pack_order is not None:
        parts = [_wire_part(route, run, shards, sides) for run in route.pack_order]
        if not parts:
            return torch.zeros(0, dtype=dtype, device=_device(shards))
        return concatenate(parts, dtype=dtype)
    return _load_by_tables(route, shards, sides)


def _wire_part(
    route: Route, run: Run, shards: Sequence[Tensor], sides: Sequence[Sequence[Tensor]]
) -> Tensor:
    dtype = route.bucket.wire_dtype
    if run.entry < 0:
        return torch.zeros(run.filler, dtype=dtype, device=_device(shards))
    entry = route.entries[run.entry]
    if run.side < 0:
        return _padded(entry, shards[run.entry])
    return encode(_padded_side(entry, run.side, sides[run.entry][run.side]), dtype)


def _padded(entry: Entry, shard: Tensor) -> Tensor:
    if entry.shape == entry.padded:
        return shard
    if shard.numel() == 0:
        return shard.new_zeros(entry.padded)
    return pad_to_max(shard.reshape(entry.shape), entry.padded)


def _padded_side(entry: Entry, side: int, values: Tensor) -> Tensor:
    if values.numel() == 0:
        return values.new_zeros(math.prod(entry.padded_sides[side]))
    return pad_to_max(values, entry.padded_sides[side]).reshape(-1)


def _load_by_tables(
    route: Route, shards: Sequence[Tensor], sides: Sequence[Sequence[Tensor]]
) -> Tensor:
    dtype, tables = route.bucket.wire_dtype, route.tables
    assert tables.pack is not None
    parts = [
        _padded(entry, shard)
        for entry, shard in zip(route.entries, shards, strict=True)
        if math.prod(entry.padded)
    ]
    if not parts:
        return torch.zeros(0, dtype=dtype, device=_device(shards))
    flat = concatenate(parts, dtype=dtype)
    if tables.pack_sides is not None:
        values = concatenate(
            [
                _padded_side(entry, side, found[side]).float()
                for entry, found in zip(route.entries, sides, strict=True)
                for side in range(len(entry.sides))
            ]
        )
        flat = torch.cat([flat, encode(values.index_select(0, tables.pack_sides), dtype)])
    return flat.reshape(-1, route.unit).index_select(0, tables.pack).reshape(-1)


def _device(tensors: Sequence[Tensor]) -> torch.device | None:
    return tensors[0].device if tensors else None


def assemble(route: Route, arrived: Tensor) -> list[Sided]:
    """Whole matrices [n, R, C] by batch, and their side vectors [n, R] or [n, C].

    Where replicas hold terms of a sum, the matrices are the sums, in fp32 at least.
    """
    if route.bucket.dense:
        return _assemble_dense(route, arrived)
    units = arrived.reshape(-1, route.unit)
    found = []
    for batch, table, side_tables in zip(
        route.batches, route.tables.assemble, route.tables.assemble_sides, strict=True
    ):
        terms = units.index_select(0, table)
        shape = (route.bucket.terms, batch.count, batch.rows, batch.cols)
        whole = _summed(route, terms.reshape(shape))
        sides = tuple(
            _picked(arrived, index, route.width).reshape(batch.count, -1)
            if batch.count
            else torch.zeros(0, _extent(batch, kind), device=arrived.device)
            for index, kind in zip(side_tables, batch.sides, strict=True)
        )
        found.append((whole, sides))
    return found


def _summed(route: Route, terms_kx: Tensor) -> Tensor:
    """The sum over dim 0, divided as the plan says; a single term is left as it is."""
    bucket = route.bucket
    if bucket.terms == 1:
        return terms_kx[0]
    dtype = torch.promote_types(terms_kx.dtype, torch.float32)
    return terms_kx.sum(0, dtype=dtype) / bucket.over


def _picked(buffer: Tensor, index: Tensor, width: int) -> Tensor:
    """Side values at the places that a table says."""
    return decode(buffer.reshape(-1, width).index_select(0, index).reshape(-1))


def _extent(batch: Batch, kind: str) -> int:
    return batch.rows if kind == "row" else batch.cols


def _assemble_dense(route: Route, arrived: Tensor) -> list[Sided]:
    sources = sum(size > 0 for size in route.arrive)
    per_source = arrived.reshape(max(1, sources), -1)
    lanes = list(per_source.split(_lane_sizes(route), dim=1))
    if route.bucket.terms > 1 and sources > 1:
        count = len(route.batches)
        lanes = [_sum_of_terms(route, x) for x in lanes[:count]] + [
            lane[list(route.terms[0])] for lane in lanes[count:]
        ]
    mains, rest = lanes[: len(route.batches)], list(lanes[len(route.batches) :])
    found = []
    for batch, lane in zip(route.batches, mains, strict=True):
        sides = tuple(_assemble_side(batch, kind, rest.pop(0)) for kind in batch.sides)
        found.append((_assemble_main(batch, lane), sides))
    return found


def _sum_of_terms(route: Route, lane_sx: Tensor) -> Tensor:
    """From all sources' pieces to those of the sum, as of one replica."""
    order = [place for term in route.terms for place in term]
    if order != list(range(lane_sx.shape[0])):
        lane_sx = lane_sx[order]
    return _summed(route, rearrange(lane_sx, "(k s) x -> k s x", k=route.bucket.terms))


def _lane_sizes(route: Route) -> list[int]:
    """Elements of each lane in one source's segment of a dense bucket."""
    sizes = []
    for batch in route.batches:
        assert batch.grid is not None
        sizes.append(batch.count * batch.grid.rows * batch.grid.cols)
    for batch in route.batches:
        assert batch.grid is not None
        for kind in batch.sides:
            extent = batch.grid.rows if kind == "row" else batch.grid.cols
            sizes.append(batch.count * extent * route.width)
    return sizes


def _assemble_main(batch: Batch, lane_sx: Tensor) -> Tensor:
    grid = batch.grid
    assert grid is not None
    if batch.count == 0:
        return lane_sx.new_zeros(0, batch.rows, batch.cols)
    source = "(i j)" if grid.order == "ij" else "(j i)"
    whole = rearrange(
        lane_sx,
        f"{source} (n r c) -> n (i r) (j c)",
        i=grid.row_parts, j=grid.col_parts, r=grid.rows, c=grid.cols,
    )  # fmt: skip
    return narrow(whole, (batch.rows, batch.cols))


def _assemble_side(batch: Batch, kind: str, lane_sx: Tensor) -> Tensor:
    grid = batch.grid
    assert grid is not None
    if batch.count == 0:
        return torch.zeros(0, _extent(batch, kind), device=lane_sx.device)
    source = "(i j)" if grid.order == "ij" else "(j i)"
    lane_ijx = rearrange(lane_sx, f"{source} x -> i j x", i=grid.row_parts, j=grid.col_parts)
    spoken = lane_ijx[:, 0] if kind == "row" else lane_ijx[0]
    values = decode(spoken.reshape(-1)).reshape(spoken.shape[0], batch.count, -1)
    return narrow(rearrange(values, "s n x -> n (s x)"), (_extent(batch, kind),))


def disassemble(route: Route, results: Sequence[Sided]) -> Tensor:
    """The return buffer: each rank's piece of every result, in the order of the wire."""
    if route.bucket.dense:
        return _disassemble_dense(route, results)
    dtype, tables = route.bucket.wire_dtype, route.tables
    assert tables.disassemble is not None
    flat = concatenate([whole.reshape(-1) for whole, _ in results], dtype=dtype)
    if tables.disassemble_sides is not None:
        values = concatenate([side.reshape(-1).float() for _, sides in results for side in sides])
        picked = values.index_select(0, tables.disassemble_sides)
        flat = torch.cat([flat, encode(picked, dtype)])
    return flat.reshape(-1, route.unit).index_select(0, tables.disassemble).reshape(-1)


def _disassemble_dense(route: Route, results: Sequence[Sided]) -> Tensor:
    dtype = route.bucket.wire_dtype
    lanes = [_split_main(batch, whole.to(dtype)) for batch, (whole, _) in _zip(route, results)]
    lanes += [
        _split_side(batch, kind, side, dtype)
        for batch, (_, sides) in _zip(route, results)
        for kind, side in zip(batch.sides, sides, strict=True)
    ]
    lanes = [lane for lane in lanes if lane.numel()]
    if not lanes:
        return torch.zeros(0, dtype=dtype, device=results[0][0].device)
    per_source = lanes[0] if len(lanes) == 1 else torch.cat(lanes, dim=1)
    if route.parts != tuple(range(per_source.shape[0])):
        per_source = torch.stack([per_source[part] for part in route.parts])
    return per_source.reshape(-1)


def _zip(route: Route, results: Sequence[Sided]) -> list[tuple[Batch, Sided]]:
    return list(zip(route.batches, results, strict=True))


def _split_main(batch: Batch, whole_nrc: Tensor) -> Tensor:
    grid = batch.grid
    assert grid is not None
    source = "(i j)" if grid.order == "ij" else "(j i)"
    padded = pad_to_max(whole_nrc, (grid.row_parts * grid.rows, grid.col_parts * grid.cols))
    return rearrange(
        padded, f"n (i r) (j c) -> {source} (n r c)", i=grid.row_parts, j=grid.col_parts
    )


def _split_side(batch: Batch, kind: str, side_nx: Tensor, dtype: torch.dtype) -> Tensor:
    grid = batch.grid
    assert grid is not None
    along, across = (grid.row_parts, grid.col_parts)
    extent = grid.rows
    if kind == "col":
        along, across, extent = across, along, grid.cols
    padded = pad_to_max(side_nx.float(), (along * extent,))
    parts = rearrange(padded, "n (s x) -> s (n x)", s=along)
    coded = encode(parts.reshape(-1), dtype).reshape(along, -1)
    if kind == "row":
        pattern = "i x -> (i j) x" if grid.order == "ij" else "i x -> (j i) x"
        return coded if across == 1 else repeat(coded, pattern, j=across)
    pattern = "j x -> (i j) x" if grid.order == "ij" else "j x -> (j i) x"
    return coded if across == 1 else repeat(coded, pattern, i=across)


def unload(route: Route, home: Tensor, *, dtype: torch.dtype) -> list[tuple[Tensor, list[Tensor]]]:
    """What came home, by entry: [stack, rows, cols] in `dtype`; sides [stack, values] in fp32."""
    if route.unpack_order is not None:
        return _unload_in_order(route, home, dtype)
    tables = route.tables
    assert tables.unpack is not None
    flat = home.reshape(-1, route.unit).index_select(0, tables.unpack).reshape(-1).to(dtype)
    mains = views(flat, [entry.padded for entry in route.entries])
    sides: list[list[Tensor]] = [[] for _ in route.entries]
    if tables.unpack_sides is not None:
        values = _picked(home, tables.unpack_sides, route.width)
        sizes = [math.prod(shape) for entry in route.entries for shape in entry.padded_sides]
        parts = iter(values.split(sizes))
        sides = [
            [_unpadded(entry, n, next(parts)) for n in range(len(entry.sides))]
            for entry in route.entries
        ]
    return [
        (narrow(main, entry.shape), side)
        for entry, main, side in zip(route.entries, mains, sides, strict=True)
    ]


def _unpadded(entry: Entry, side: int, values: Tensor) -> Tensor:
    return narrow(values.reshape(entry.padded_sides[side]), entry.sides[side])


def _unload_in_order(
    route: Route, home: Tensor, dtype: torch.dtype
) -> list[tuple[Tensor, list[Tensor]]]:
    assert route.unpack_order is not None
    shapes = [_shape_on_wire(route, run) for run in route.unpack_order]
    whole = home.to(dtype)
    mains: dict[int, Tensor] = {}
    codes: dict[tuple[int, int], Tensor] = {}
    # Matrices are read in `dtype`, side vectors as they are coded.
    for run, main in zip(route.unpack_order, views(whole, shapes), strict=True):
        if run.side < 0:
            mains[run.entry] = main
    if any(run.side >= 0 for run in route.unpack_order):
        for run, code in zip(route.unpack_order, views(home, shapes), strict=True):
            codes[run.entry, run.side] = code
    found = []
    for number, entry in enumerate(route.entries):
        if number not in mains:  # this rank has no part of it
            zeros = whole.new_zeros(entry.shape)
            found.append((zeros, [zeros.new_zeros(shape) for shape in entry.sides]))
            continue
        sides = [
            _unpadded(entry, side, decode(codes[number, side])) for side in range(len(entry.sides))
        ]
        main = mains[number]
        found.append((main if entry.shape == entry.padded else narrow(main, entry.shape), sides))
    return found


def _shape_on_wire(route: Route, run: Run) -> tuple[int, ...]:
    if run.entry < 0:
        return (run.filler,)
    entry = route.entries[run.entry]
    if run.side < 0:
        return entry.padded
    return (math.prod(entry.padded_sides[run.side]) * route.width,)
