"""Naive references: every algorithm on whole matrices, in one process, as its formula reads.

Each function takes parameters and the gradients of some steps, all as dicts by name, and returns
new parameters and state; the arguments are left alone. A second call with that state continues.
`flatten`, `split_sizes` and `num_heads` hold for all parameters, or are dicts by name.
A gradient of None leaves parameter and state alone. Arithmetic is in `dtype` throughout.

In comments: X parameter, G gradient, M momentum, O orthogonal factor, R x C a matrix's shape.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Params = Mapping[str, Tensor]
Grads = Mapping[str, Tensor | None]
State = dict[str, dict[str, Any]]
Result = tuple[dict[str, Tensor], State]
Orth = Callable[[Tensor], Tensor]
Shards = Sequence[tuple[int, int]]  # the rows [start, stop) that each rank holds


def polar(x: Tensor) -> Tensor:
    """U Vᵀ of the SVD in float64; directions whose singular value is zero stay zero."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    tiny = max(x.shape) * torch.finfo(torch.float64).eps
    kept = s > s.max() * tiny if s.numel() else s > 0
    o: Tensor = u[:, kept] @ vh[kept]
    return o.to(x.dtype)


# Which matrices a parameter consists of, and which slices of one are selected.


def matrices(
    x: Tensor,
    *,
    flatten: bool | None = None,
    split_sizes: Sequence[int] | None = None,
    num_heads: int | None = None,
) -> list[Tensor]:
    """The matrices of a parameter in order, as views: writing into one writes into `x`."""
    if x.ndim < 2:
        raise ValueError(f"a parameter of shape {tuple(x.shape)} holds no matrix")
    if x.ndim > 2 and flatten is None:
        raise ValueError("three or more dims: say flatten=True or flatten=False")
    if x.ndim == 2:
        wholes = [x]
    elif flatten:
        wholes = [x.view(x.shape[0], -1)]
    else:
        wholes = list(x.view(-1, x.shape[-2], x.shape[-1]))
    result = []
    for whole in wholes:
        rows = whole.shape[0]
        sizes = [rows] if split_sizes is None else list(split_sizes)
        if num_heads is not None:
            sizes = [rows // num_heads] * num_heads
        if sum(sizes) != rows:
            raise ValueError(f"row blocks {sizes} do not add up to {rows} rows")
        start = 0
        for size in sizes:
            result.append(whole[start : start + size])
            start += size
    return result


def block_shards(shards: Shards, blocks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each row block of a row-sharded matrix: the ranks' ranges, in the block's own rows."""
    result = []
    first = 0
    for size in blocks:
        ranges = []
        for start, stop in shards:
            start, stop = max(start - first, 0), min(stop - first, size)
            ranges.append((start, max(start, stop)))
        result.append(ranges)
        first += size
    return result


def largest(scores: Tensor, count: int) -> list[int]:
    """Indices of the `count` largest scores, ascending; of equal scores the first is taken."""
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    return sorted(order[:count])


def select(
    m: Tensor, fraction: float, shards: Shards | None = None, *, rows_only: bool = False
) -> tuple[int, list[int]]:
    """The selected slices of a matrix: (dim, indices), dim 0 for rows and 1 for columns.

    Without shards (global): the ⌈αn⌉ slices with largest L1 norm along the shorter side of n,
    or always of rows.
    With (local): of each shard its own top ⌈α⌈R/W⌉⌉ rows, or all when it has fewer.
    """
    rows, columns = m.shape
    if shards is None:
        dim = 0 if rows_only or rows <= columns else 1
        scores = m.abs().sum(dim=1 - dim)
        return dim, largest(scores, math.ceil(fraction * m.shape[dim] - 1e-9))
    scores = m.abs().sum(dim=1)
    quota = math.ceil(fraction * math.ceil(rows / len(shards)) - 1e-9)
    indices = []
    for start, stop in shards:
        indices += [start + i for i in largest(scores[start:stop], quota)]
    return 0, indices


# What algorithms share.


def shape_scale(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The factor s of the learning rate for a matrix of this shape."""
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "spectral_norm":
        return math.sqrt(rows / columns)
    if adjust_lr_fn == "none":
        return 1.0
    raise ValueError(f"unknown adjust_lr_fn {adjust_lr_fn!r}")


def apply_update_(x: Tensor, u: Tensor, *, lr: float, weight_decay: float, cautious: bool) -> None:
    """X ← X − lr·λ·X − U; cautious: decay only where U and X have the same sign."""
    decay = lr * weight_decay * x
    if cautious:
        decay = torch.where(torch.sign(u) == torch.sign(x), decay, torch.zeros_like(decay))
    x.copy_(x - decay - u)


def normalize_slices(o: Tensor, v: Tensor, *, dim: int, beta2: float, eps: float) -> Tensor:
    """NorMuon's second moment per slice along `dim`; updates V in place.

    V ← β₂V + (1−β₂) mean(O²); Ô = O/(√V + ε), rescaled to the Frobenius norm of O.
    """
    v.copy_(beta2 * v + (1 - beta2) * (o * o).mean(dim=1 - dim, keepdim=True))
    scaled = o / (v.sqrt() + eps)
    norm = torch.linalg.matrix_norm(scaled)
    if norm == 0:
        return torch.zeros_like(o)
    rescaled: Tensor = scaled * (torch.linalg.matrix_norm(o) / norm)
    return rescaled


def _of(option: Any, name: str) -> Any:
    return option.get(name) if isinstance(option, Mapping) else option


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _begin(params: Params, state: State | None, dtype: torch.dtype) -> Result:
    new = {name: _copy(p.detach()).to(dtype) for name, p in params.items()}
    return new, _copy(state) if state is not None else {name: {} for name in new}


class _Layout:
    """The matrices of named parameters, by the options all references have."""

    def __init__(self, flatten: Any, split_sizes: Any, num_heads: Any) -> None:
        self.options = {"flatten": flatten, "split_sizes": split_sizes, "num_heads": num_heads}

    def __call__(self, name: str, x: Tensor) -> list[Tensor]:
        return matrices(x, **{key: _of(value, name) for key, value in self.options.items()})


# The algorithms.


def muon(
    params: Params,
    steps: Sequence[Grads],
    state: State | None = None,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    adjust_lr_fn: str | None = None,
    cautious: bool = False,
    flatten: Any = None,
    split_sizes: Any = None,
    num_heads: Any = None,
    orth: Orth = polar,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """Muon. State per name: `momentum_buffer`, of the parameter's shape.

    M ← μM + (1−μ)G; B = (1−μ)G + μM or M; X ← (1−lr·λ)X − lr·s·orth(B).
    """
    new, state = _begin(params, state, dtype)
    layout = _Layout(flatten, split_sizes, num_heads)
    for name, x in new.items():
        state[name].setdefault("momentum_buffer", torch.zeros_like(x))
    for grads in steps:
        for name, x in new.items():
            grad = grads.get(name)
            if grad is None:
                continue
            b = _muon_momentum_(state[name], grad.to(dtype), momentum, nesterov)
            for x_i, b_i in zip(layout(name, x), layout(name, b), strict=True):
                u = lr * shape_scale(adjust_lr_fn, *x_i.shape) * orth(b_i)
                apply_update_(x_i, u, lr=lr, weight_decay=weight_decay, cautious=cautious)
    return new, state


def _muon_momentum_(state: dict[str, Any], g: Tensor, momentum: float, nesterov: bool) -> Tensor:
    m = momentum * state["momentum_buffer"] + (1 - momentum) * g
    state["momentum_buffer"] = m
    b: Tensor = (1 - momentum) * g + momentum * m if nesterov else m
    return b.contiguous()


def normuon(
    params: Params,
    steps: Sequence[Grads],
    state: State | None = None,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    beta2: float = 0.95,
    eps: float = 1e-7,
    adjust_lr_fn: str | None = None,
    cautious: bool = False,
    flatten: Any = None,
    split_sizes: Any = None,
    num_heads: Any = None,
    orth: Orth = polar,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """NorMuon (arXiv 2510.05491): Muon with the rows of O normalized.

    State per name: `momentum_buffer`; `second_moment`, a list with one (R, 1) per matrix.
    """
    new, state = _begin(params, state, dtype)
    layout = _Layout(flatten, split_sizes, num_heads)
    for name, x in new.items():
        state[name].setdefault("momentum_buffer", torch.zeros_like(x))
        v = [x.new_zeros(x_i.shape[0], 1) for x_i in layout(name, x)]
        state[name].setdefault("second_moment", v)
    for grads in steps:
        for name, x in new.items():
            grad = grads.get(name)
            if grad is None:
                continue
            b = _muon_momentum_(state[name], grad.to(dtype), momentum, nesterov)
            for i, x_i in enumerate(layout(name, x)):
                o = orth(layout(name, b)[i])
                v = state[name]["second_moment"][i]
                o = normalize_slices(o, v, dim=0, beta2=beta2, eps=eps)
                u = lr * shape_scale(adjust_lr_fn, *x_i.shape) * o
                apply_update_(x_i, u, lr=lr, weight_decay=weight_decay, cautious=cautious)
    return new, state


def dion2(
    params: Params,
    steps: Sequence[Grads],
    state: State | None = None,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    fraction: float = 0.25,
    shards: Any = None,
    adjust_lr_fn: str | None = None,
    cautious: bool = False,
    flatten: Any = None,
    split_sizes: Any = None,
    num_heads: Any = None,
    orth: Orth = polar,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """Dion2 (arXiv 2512.16928). State per name: `momentum_buffer`, of the parameter's shape.

    M ← M + G; O = orth(M[selected]); X ← (1−lr·λ)X − lr·s·scatter(O); M[selected] ← μM[selected].
    `shards` selects locally (see `select`): the row ranges of every matrix, or a dict by name of
    either one such list for all matrices of the parameter or a list of them, one per matrix.
    """
    return _dion2(
        params,
        steps,
        state,
        _Layout(flatten, split_sizes, num_heads),
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        fraction=fraction,
        shards=shards,
        adjust_lr_fn=adjust_lr_fn,
        cautious=cautious,
        orth=orth,
        dtype=dtype,
        normalize=None,
    )


def dion3(
    params: Params,
    steps: Sequence[Grads],
    state: State | None = None,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    fraction: float = 0.25,
    shards: Any = None,
    beta2: float = 0.95,
    eps: float = 1e-7,
    adjust_lr_fn: str | None = None,
    cautious: bool = False,
    flatten: Any = None,
    split_sizes: Any = None,
    num_heads: Any = None,
    orth: Orth = polar,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """Dion3 (NorDion2): Dion2 with the selected slices of O normalized as NorMuon's rows are.

    Rows are selected whatever the shape. State per name: `momentum_buffer`; `second_moment`, a
    list with one V per matrix, (R, 1). Rows not selected keep their V.
    """
    return _dion2(
        params,
        steps,
        state,
        _Layout(flatten, split_sizes, num_heads),
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        fraction=fraction,
        shards=shards,
        adjust_lr_fn=adjust_lr_fn,
        cautious=cautious,
        orth=orth,
        dtype=dtype,
        normalize={"beta2": beta2, "eps": eps},
    )


def _dion2(
    params: Params,
    steps: Sequence[Grads],
    state: State | None,
    layout: _Layout,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    fraction: float,
    shards: Any,
    adjust_lr_fn: str | None,
    cautious: bool,
    orth: Orth,
    dtype: torch.dtype,
    normalize: dict[str, float] | None,
) -> Result:
    new, state = _begin(params, state, dtype)
    for name, x in new.items():
        state[name].setdefault("momentum_buffer", torch.zeros_like(x))
    for grads in steps:
        for name, x in new.items():
            grad = grads.get(name)
            if grad is None:
                continue
            m = state[name]["momentum_buffer"]
            m.copy_(m + grad.to(dtype))
            for i, (x_i, m_i) in enumerate(zip(layout(name, x), layout(name, m), strict=True)):
                dim, indices = select(
                    m_i, fraction, _shards_of(shards, name, i), rows_only=normalize is not None
                )
                chosen = torch.tensor(indices)
                o = orth(m_i.index_select(dim, chosen))
                if normalize is not None:
                    o = _normalize_chosen_(o, state[name], i, m_i, dim, chosen, normalize)
                whole = torch.zeros_like(x_i)
                whole.index_copy_(dim, chosen, o)
                u = lr * shape_scale(adjust_lr_fn, *x_i.shape) * whole
                apply_update_(x_i, u, lr=lr, weight_decay=weight_decay, cautious=cautious)
                for j in indices:
                    m_i.select(dim, j).mul_(momentum)
    return new, state


def _shards_of(shards: Any, name: str, i: int) -> Shards | None:
    ranges = _of(shards, name)
    nested = ranges is not None and not isinstance(ranges[0][0], int)
    chosen: Shards | None = ranges[i] if nested else ranges
    return chosen


def _normalize_chosen_(
    o: Tensor,
    state: dict[str, Any],
    i: int,
    m: Tensor,
    dim: int,
    chosen: Tensor,
    hyper: dict[str, float],
) -> Tensor:
    v = state.setdefault("second_moment", [])
    if len(v) == i:  # matrices come in order: this one's first step
        v.append(m.new_zeros(m.shape[0], 1) if dim == 0 else m.new_zeros(1, m.shape[1]))
    v_chosen = v[i].index_select(dim, chosen)
    o = normalize_slices(o, v_chosen, dim=dim, beta2=hyper["beta2"], eps=hyper["eps"])
    v[i].index_copy_(dim, chosen, v_chosen)
    return o


def dion(
    params: Params,
    steps: Sequence[Grads],
    state: State | None = None,
    *,
    q: Mapping[str, Sequence[Tensor]] | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    rank_fraction: float = 0.25,
    eps: float = 1e-12,
    adjust_lr_fn: str | None = "spectral_norm",
    cautious: bool = False,
    flatten: Any = None,
    split_sizes: Any = None,
    num_heads: Any = None,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """Dion (arXiv 2504.05295), low rank r = ⌈fraction·min(R, C)⌉.

    B = M + G; P = orthonormal(BQ); W = BᵀP; M ← B − (1−μ)PWᵀ; Q ← W with columns normalized;
    X ← (1−lr·λ)X − lr·√(R/C)·PQᵀ. Where B is zero there is no update, and Q stays.
    State per name: `momentum_buffer`; `q`, a list with one (C, r) per matrix, first from `q`
    or else of cosines.
    """
    new, state = _begin(params, state, dtype)
    layout = _Layout(flatten, split_sizes, num_heads)
    for name, x in new.items():
        state[name].setdefault("momentum_buffer", torch.zeros_like(x))
        first = [_first_q(x_i, rank_fraction) for x_i in layout(name, x)]
        if q is not None:
            first = [q_i.to(dtype, copy=True) for q_i in q[name]]
        state[name].setdefault("q", first)
    for grads in steps:
        for name, x in new.items():
            grad = grads.get(name)
            if grad is None:
                continue
            m = state[name]["momentum_buffer"]
            m.copy_(m + grad.to(dtype))
            for i, (x_i, m_i) in enumerate(zip(layout(name, x), layout(name, m), strict=True)):
                o, state[name]["q"][i] = _dion_step_(m_i, state[name]["q"][i], momentum, eps)
                u = lr * shape_scale(adjust_lr_fn, *x_i.shape) * o
                apply_update_(x_i, u, lr=lr, weight_decay=weight_decay, cautious=cautious)
    return new, state


def _first_q(x: Tensor, rank_fraction: float) -> Tensor:
    """Columns of the orthonormal DCT-II, with rows of pseudo-random signs."""
    cols, rank = x.shape[1], math.ceil(rank_fraction * min(x.shape) - 1e-9)
    q = torch.empty(cols, rank, dtype=torch.float64)
    for c in range(cols):
        sign = -1 if ((c + 1) * 2654435761 >> 15) & 1 else 1
        for k in range(rank):
            q[c, k] = sign * math.cos(math.pi * (2 * c + 1) * k / (2 * cols))
    return (q / torch.linalg.vector_norm(q, dim=0)).to(x.dtype)


def _dion_step_(b: Tensor, q: Tensor, momentum: float, eps: float) -> tuple[Tensor, Tensor]:
    """The update PQᵀ and the next Q; `b` becomes the next momentum."""
    if not b.any():
        return torch.zeros_like(b), q
    p = torch.linalg.qr(b @ q).Q
    w = b.T @ p
    b.copy_(b - (1 - momentum) * p @ w.T)
    q = w / (torch.linalg.vector_norm(w, dim=0, keepdim=True) + eps)
    return p @ q.T, q


def lion(
    params: Params,
    steps: Sequence[Grads],
    state: State | None = None,
    *,
    lr: float = 1e-4,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.99),
    cautious: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """Lion (arXiv 2302.06675), any shape. State per name: `momentum_buffer`.

    X ← (1−lr·λ)X − lr·sign(β₁M + (1−β₁)G); M ← β₂M + (1−β₂)G.
    """
    new, state = _begin(params, state, dtype)
    for name, x in new.items():
        state[name].setdefault("momentum_buffer", torch.zeros_like(x))
    for grads in steps:
        for name, x in new.items():
            grad = grads.get(name)
            if grad is None:
                continue
            g, m = grad.to(dtype), state[name]["momentum_buffer"]
            u = lr * torch.sign(betas[0] * m + (1 - betas[0]) * g)
            apply_update_(x, u, lr=lr, weight_decay=weight_decay, cautious=cautious)
            m.copy_(betas[1] * m + (1 - betas[1]) * g)
    return new, state


def adamw(
    params: Params,
    steps: Sequence[Grads],
    state: State | None = None,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    cautious: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """torch.optim.AdamW, one optimizer per parameter. State per name: as AdamW's own."""
    new, state = _begin(params, state, dtype)
    for name, x in new.items():
        p = torch.nn.Parameter(x)
        decay = 0.0 if cautious else weight_decay
        optimizer = torch.optim.AdamW([p], lr=lr, betas=betas, eps=eps, weight_decay=decay)
        optimizer.state[p].update(state[name])
        for grads in steps:
            grad = grads.get(name)
            if grad is None:
                continue
            before = x.clone()
            p.grad = grad.to(dtype)
            optimizer.step()
            if cautious:
                u = before - p.detach()
                x.copy_(before)
                apply_update_(x, u, lr=lr, weight_decay=weight_decay, cautious=True)
        state[name] = dict(optimizer.state[p])
    return new, state
