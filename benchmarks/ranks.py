"""Run a function on some gloo ranks, one thread each, and bring back what rank 0 returns."""

import datetime
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

PATIENCE = datetime.timedelta(seconds=500)  # for a rank that compiles while others wait


def on_ranks(function: Callable[..., Any], world: int, *arguments: Any) -> Any:
    """What ``function(rank, world, *arguments)`` returns on rank 0; every rank runs it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        started = torch.multiprocessing.start_processes(
            _rank, (world, f"{folder}/store", queue, function, arguments),
            nprocs=world, join=False, start_method="spawn",
        )  # fmt: skip
        assert started is not None
        good, found = queue.get(timeout=2 * PATIENCE.total_seconds())
        while not started.join():
            pass
    if not good:
        raise RuntimeError(found)
    return found


def _rank(
    rank: int,
    world: int,
    store: str,
    queue: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=Path(store).as_uri(), rank=rank, world_size=world, timeout=PATIENCE
    )
    try:
        found = function(rank, world, *arguments)
    except Exception:
        queue.put((False, traceback.format_exc()))
        raise
    if rank == 0:
        queue.put((True, found))
    dist.barrier()
    dist.destroy_process_group()
