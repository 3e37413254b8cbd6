"""The optimizers: defaults around the shell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from ortho_func.optim.shell import OrthogonalOptimizer
from ortho_func.plan import Balance, Hops, TeamSize, Wire

__all__ = ["Dion", "Dion2", "Dion3", "Muon", "NorMuon"]

Orthogonalize = str | Callable[[Tensor], Tensor]


class Options(TypedDict, total=False):
    """What every optimizer takes besides its own arguments; see `Muon`."""

    momentum: float | Tensor
    adjust_lr_fn: str | None
    orthogonalizer: Orthogonalize
    ns_steps: int | None
    eps: float
    cautious: bool
    nonfinite: str
    flatten: bool | None
    split_sizes: Sequence[int] | None
    num_heads: int | None
    wire_dtype: torch.dtype
    compute_dtype: torch.dtype
    momentum_dtype: torch.dtype | None
    variance_dtype: torch.dtype | None
    bf16_writes: str
    process_group: Any
    bucket_bytes: int | None
    wire: Wire
    balance: Balance
    hops: Hops
    team_size: TeamSize
    reduce_gradients: bool
    metrics: bool
    compile: bool | dict[str, Any]


class Muon(OrthogonalOptimizer):
    """Muon on whole matrices, whatever their sharding.

    M ← μM + (1 − μ)G;  B = (1 − μ)G + μM (Nesterov) or M;  X ← (1 − lr·λ)X − lr·s·orth(B)

    Args:
        params: parameters or groups, as in ``torch.optim``. DTensors bring their mesh. A group
            may set every option below but those from process_group on, and ``algorithm``:
            "muon", "normuon", "dion2", "dion3", "dion", or for what is no matrix "adamw" or "lion",
            which take ``betas`` and ``adam_eps``.
        lr: learning rate, a number or a 0-d tensor.
        weight_decay: λ, decoupled.
        momentum: μ.
        nesterov: look ahead by one step.
        adjust_lr_fn: s of an R×C matrix: "original" (None) √max(1, R/C), "match_rms_adamw"
            0.2·√max(R, C), "spectral_norm" √(R/C), "none" 1.
        orthogonalizer: a name that `orthogonalize` knows, or a callable [n, R, C] → [n, R, C].
        ns_steps: iterations; None takes as many as the schedule has.
        eps: as in ``torch.optim.Muon``; the orthogonalizers scale by the matrix's own norm and
            need none, NorMuon adds it to √V.
        cautious: decay only where update and parameter agree in sign.
        nonfinite: what becomes of a matrix in whose gradient or momentum something is not finite:
            "propagate", it becomes NaN, as in torch; "skip", the step leaves it and its state as
            they were, on all ranks alike and without another collective. Under AdamW or Lion the
            same holds of each element on its own.
        flatten: what a parameter of three or more dims is: False, a stack of matrices over its
            leading dims (experts); True, one matrix of dim 0 by all others (a convolution).
        split_sizes: rows that are matrices of their own, as in a fused QKV.
        num_heads: as many equal row blocks that are matrices of their own.
        wire_dtype: dtype in which matrices travel between ranks.
        compute_dtype: dtype in which they are orthogonalized.
        momentum_dtype: dtype of M, and of AdamW's and Lion's averages of gradients; None is the
            parameter's. Sums are computed in float32 at least and rounded once.
        variance_dtype: dtype of NorMuon's and Dion3's V (None: float32) and of AdamW's averages
            of squares (None: the parameter's). In bfloat16 an average stands still once it is
            within 2⁻⁹/(1 − β₂) of its goal, 4% at β₂ = 0.95 and everything at 0.999.
        bf16_writes: how parameters in bfloat16 are rounded: "nearest", by which updates below
            2⁻⁹ of a parameter are lost; "stochastic", at random to one of the two neighbours, right
            in the mean (state: 8 bytes a parameter); or "compensated", with what is cut off kept
            for the next step (state: 2 bytes an element). Random bits follow from a counter in the
            state and an element's place in its parameter: equal on replicas, in every layout and
            in a resumed run. Parameters in other dtypes are rounded to nearest.
        process_group: for plain tensors that are replicated over it (DDP).
        bucket_bytes: bound on the matrices that a rank owns in a bucket (a larger one alone
            excepted); by default 64 MiB, on CPUs 8 MiB. With replicas (HSDP, DDP) a rank gets
            back as many times that as there are replicas.
        wire: "auto", "dense" or "exact": how pieces lie on the wire; results are the same.
        balance: "cost", every rank does equally much arithmetic; or "uniform", every rank has the
            same batch of every shape, filled up with zero matrices, and so the same graph: for
            compiled training steps in which the compiler reorders collectives.
        hops: "one", "two" or "auto": whether results reach the replicas of a mesh with both
            replicas and shards (HSDP) directly, or by way of the owner's replica with fewer
            connections, equally many bytes and equal results; see `plan`. On a 1-D mesh (FSDP,
            DDP) and with reduce_gradients nothing changes. Dion takes one.
        team_size: how many ranks may own one matrix together, each a range of its long side, for
            models with fewer large matrices than ranks. The plan takes as many as lower the busiest
            rank's arithmetic by five per cent; "auto" also counts what the sums of Gram matrices
            within a team move. Results differ by the rounding of these sums. Muon and NorMuon;
            other algorithms, a callable as orthogonalizer, and stacks have one owner a matrix.
        reduce_gradients: the gradients differ between replicas (DDP under ``no_sync``) and the
            optimizer averages them: each replica sends its own momentum to a matrix's owner and
            gets the result back, in all as many bytes as an all-reduce of the gradients; other
            parameters' gradients are all-reduced. A missing gradient counts as zero. Call
            ``average_state_()`` on all ranks before saving.
        metrics: every step measures what it does to each matrix, for ``metrics()``: sixteen
            products of each update with a vector on its owner, two passes over the shards, and an
            all-reduce of 28 bytes a matrix.
        compile: compile the whole step as one graph; a dict gives options of ``torch.compile``.

    Raises:
        ValueError: at construction, on every rank alike, for what cannot be done.

    Source: Jordan 2024, https://kellerjordan.github.io/posts/muon/.

    Examples:
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> opt = Muon(layer.parameters(), lr=0.02)
        >>> layer(torch.randn(2, 8)).square().mean().backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        *,
        momentum: float | Tensor = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str | None = None,
        orthogonalizer: Orthogonalize = "auto",
        ns_steps: int | None = None,
        eps: float = 1e-7,
        cautious: bool = False,
        nonfinite: str = "propagate",
        flatten: bool | None = None,
        split_sizes: Sequence[int] | None = None,
        num_heads: int | None = None,
        wire_dtype: torch.dtype = torch.bfloat16,
        compute_dtype: torch.dtype = torch.bfloat16,
        momentum_dtype: torch.dtype | None = None,
        variance_dtype: torch.dtype | None = None,
        bf16_writes: str = "nearest",
        process_group: Any = None,
        bucket_bytes: int | None = None,
        wire: Wire = "auto",
        balance: Balance = "cost",
        hops: Hops = "auto",
        team_size: TeamSize = 1,
        reduce_gradients: bool = False,
        metrics: bool = False,
        compile: bool | dict[str, Any] = False,  # noqa: A002 - torch's word for it
    ) -> None:
        super().__init__(
            params,
            "muon",
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            adjust_lr_fn=adjust_lr_fn,
            orthogonalizer=orthogonalizer,
            ns_steps=ns_steps,
            eps=eps,
            cautious=cautious,
            nonfinite=nonfinite,
            flatten=flatten,
            split_sizes=split_sizes,
            num_heads=num_heads,
            wire_dtype=wire_dtype,
            compute_dtype=compute_dtype,
            momentum_dtype=momentum_dtype,
            variance_dtype=variance_dtype,
            bf16_writes=bf16_writes,
            process_group=process_group,
            bucket_bytes=bucket_bytes,
            wire=wire,
            balance=balance,
            hops=hops,
            team_size=team_size,
            reduce_gradients=reduce_gradients,
            metrics=metrics,
            compile=compile,
        )


class NorMuon(OrthogonalOptimizer):
    """NorMuon: Muon with rows normalized by their running mean square.

    O = orth(B);  V ← β₂V + (1 − β₂)mean_C(O²);  Ô = O/(√V + ε) · ‖O‖_F/‖O/(√V + ε)‖_F;
    X ← (1 − lr·λ)X − lr·s·Ô

    V, fp32 at least, has one value per row of each matrix. The result does not depend on the
    sharding.

    Args:
        params: as in `Muon`.
        lr: as in `Muon`.
        weight_decay: as in `Muon`.
        beta2: decay of V, a number or a 0-d tensor.
        nesterov: as in `Muon`.
        options: everything else that `Muon` takes.

    Source: arXiv 2510.05491, Algorithm 1, which is ``nesterov=False`` and
    ``adjust_lr_fn="match_rms_adamw"`` here; its authors' code looks ahead.

    Examples:
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> opt = NorMuon(layer.parameters(), lr=0.02)
        >>> sorted(opt.state[layer.weight])
        ['momentum_buffer', 'row_variance']
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        *,
        beta2: float | Tensor = 0.95,
        nesterov: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, "normuon", lr=lr, weight_decay=weight_decay, beta2=beta2, nesterov=nesterov,
            **options,
        )  # fmt: skip


class Dion2(OrthogonalOptimizer):
    """Dion2: a fraction of each matrix's slices is orthogonalized, the rest waits in M.

    M ← M + G;  K = ⌈αn⌉ slices of the shorter side with largest L1 norm;
    X ← (1 − lr·λ)X − lr·s·orth(M_K) on K;  M_K ← μM_K

    Args:
        params: as in `Muon`.
        lr: as in `Muon`.
        weight_decay: as in `Muon`.
        fraction: α, in (0, 1].
        selection: "global", exact on any sharding, whole matrices travel; or "local", each
            shard chooses its own top slices and only they travel: cheaper, and dependent on
            the number of shards.
        options: everything else that `Muon` takes; nesterov has no meaning here.

    Source: arXiv 2512.16928.

    Examples:
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> opt = Dion2(layer.parameters(), lr=0.02, fraction=0.5)
        >>> layer(torch.randn(2, 8)).square().mean().backward()
        >>> before = layer.weight.detach().clone()
        >>> opt.step()
        >>> int((layer.weight != before * (1 - 0.02 * 0.1)).any(dim=1).sum())
        2
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        *,
        fraction: float = 0.25,
        selection: str = "local",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, "dion2", lr=lr, weight_decay=weight_decay, fraction=fraction,
            selection=selection, **options,
        )  # fmt: skip


class Dion3(OrthogonalOptimizer):
    """Dion3 (NorDion2): Dion2 with the selected rows normalized as in NorMuon.

    M ← M + G;  K = the ⌈αR⌉ rows with largest L1 norm;  O = orth(M_K);
    V_K ← β₂V_K + (1 − β₂)mean_C(O²);  Ô = O/(√V_K + ε), of O's norm;
    X ← (1 − lr·λ)X − lr·s·Ô on K;  M_K ← μM_K

    Args:
        params: as in `Muon`.
        lr: as in `Muon`.
        weight_decay: as in `Muon`.
        fraction: as in `Dion2`; rows are selected whatever the shape.
        selection: as in `Dion2`.
        beta2: as in `NorMuon`.
        options: everything else that `Muon` takes; nesterov has no meaning here.

    Source: arXiv 2512.16928 and arXiv 2510.05491.

    Examples:
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> opt = Dion3(layer.parameters(), lr=0.02, fraction=0.5)
        >>> sorted(opt.state[layer.weight])
        ['momentum_buffer', 'row_variance']
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        *,
        fraction: float = 0.25,
        selection: str = "local",
        beta2: float | Tensor = 0.95,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params, "dion3", lr=lr, weight_decay=weight_decay, fraction=fraction,
            selection=selection, beta2=beta2, **options,
        )  # fmt: skip


class Dion(OrthogonalOptimizer):
    """Dion: an orthonormal update of low rank; what it leaves out waits in M.

    B = M + G;  P = orthonormal basis of BQ;  W = BᵀP;  M ← B − (1 − μ)PWᵀ;
    Q ← W with columns of norm 1;  X ← (1 − lr·λ)X − lr·√(R/C)·PQᵀ

    Q, of C×r for a matrix of R×C, r = ⌈rank_fraction·min(R, C)⌉, is state: `right_factor`, fp32 at
    least.

    Matrices never travel: BQ is summed over the ranks that share rows, P comes back, then BᵀP is
    summed over those that share columns and Q comes back. That is 2Rr elements a matrix for every
    rank that holds all its rows and 2Cr for every rank that holds all its columns, so many ranks
    along one dim can move more than Muon's 2RC/W a rank does; two dims are where it pays.

    Args:
        params: as in `Muon`.
        lr: as in `Muon`.
        weight_decay: as in `Muon`.
        rank_fraction: r over the shorter side, in (0, 1].
        options: everything else that `Muon` takes but orthogonalizer, ns_steps and nesterov.
            ``adjust_lr_fn=None`` is "spectral_norm" here, √(R/C). Products are computed in fp32;
            ``wire_dtype`` is that of the factors on the wire. With ``reduce_gradients=True``
            replicas send factors of their own gradients, and the result is that of their
            average: data parallelism that synchronizes thin factors alone.

    Raises:
        ValueError: as `Muon` does.
        TypeError: for an option that Dion has no use for.

    Source: arXiv 2504.05295, Algorithms 1 and 2.

    Examples:
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> opt = Dion(layer.parameters(), lr=0.02, rank_fraction=0.5)
        >>> layer(torch.randn(2, 8)).square().mean().backward()
        >>> opt.step()
        >>> opt.state[layer.weight]["right_factor"].shape
        torch.Size([8, 2])
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        *,
        rank_fraction: float = 0.25,
        **options: Unpack[Options],
    ) -> None:
        for name in ("orthogonalizer", "ns_steps"):
            if name in options:
                raise TypeError(f"Dion takes no {name}: its update is orthonormal by a QR.")
        super().__init__(
            params, "dion", lr=lr, weight_decay=weight_decay, rank_fraction=rank_fraction,
            **options,
        )  # fmt: skip
