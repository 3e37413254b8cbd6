"""The exchange. The only file that touches functional collectives.

They return new tensors and are traced by ``torch.compile``, so a whole step stays one graph.
An exchange is begun where `all_to_all` stands in the program and waited for where `wait` does;
what stands between overlaps it, in eager mode as in compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["all_reduce", "all_to_all", "wait"]


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], *, group: str) -> Tensor:
    """Begin to send `send[r]` elements to each rank r of the group and receive `receive[r]`.

    Args:
        x: 1-D and contiguous, the parts for rank 0, 1, … one after the other.
        send: how many elements go to each rank; zeros are fine (but NCCL connects the ranks
            all the same). Static integers that come from the plan: what a rank sends must be
            what the other expects.
        receive: how many come from each rank.
        group: the process group's name (``group.group_name``).

    Returns:
        A 1-D tensor of ``sum(receive)`` elements whose content is there only after `wait`.

    Raises:
        ValueError: if `send` does not add up to the buffer's size.

    Examples:
        >>> import torch.distributed as dist
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> name = dist.group.WORLD.group_name
        >>> wait(all_to_all(torch.arange(3.0), [3], [3], group=name))
        tensor([0., 1., 2.])
        >>> dist.destroy_process_group()
    """
    if x.numel() != sum(send):
        raise ValueError(f"the buffer has {x.numel()} elements, send sizes add up to {sum(send)}.")
    begun: Tensor = torch.ops._c10d_functional.all_to_all_single(
        x, list(receive), list(send), group
    )
    return begun


def all_reduce(x: Tensor, *, group: str) -> Tensor:
    """Begin to sum a tensor over the group's ranks; the content is there only after `wait`."""
    begun: Tensor = torch.ops._c10d_functional.all_reduce(x, "sum", group)
    return begun


def wait(x: Tensor) -> Tensor:
    """Wait for what `all_to_all` or `all_reduce` began: the tensor with its content there."""
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return arrived
