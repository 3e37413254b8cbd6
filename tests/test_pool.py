"""The worker pool itself."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import ALLOWED_WARNINGS, Pool, RunError


def ranks_and_sum(rank: int, world: int, scale: float = 1.0) -> tuple[int, int, int, torch.Tensor]:
    x = torch.full((3,), scale * rank)
    dist.all_reduce(x)
    return rank, world, os.getpid(), x


def mesh_sum(rank: int, world: int) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    return (x + x).full_tensor()  # type: ignore[attr-defined, no-any-return]


def compiled(rank: int, world: int) -> torch.Tensor:
    @torch.compile(fullgraph=True, backend="eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    return double(torch.ones(2))


def random_values(rank: int, world: int) -> torch.Tensor:
    return torch.rand(4)


def raise_on(rank: int, world: int, bad: tuple[int, ...]) -> None:
    if rank in bad:
        raise ValueError(f"parameter 'gate' is wrong on rank {rank}")


def raise_before_collective(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.all_reduce(torch.ones(1))


def raise_rank_types(rank: int, world: int) -> None:
    raise (ValueError if rank == 0 else TypeError)("wrong")


def wait_for_absent(rank: int, world: int) -> None:
    if rank == 0:
        sleep_long()
    dist.all_reduce(torch.ones(1))


def sleep_long() -> None:
    time.sleep(1000)


def die(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def warn(rank: int, world: int) -> None:
    warnings.warn("unheard of", UserWarning, stacklevel=1)


def warn_allowed(rank: int, world: int) -> None:
    warnings.warn("`torch.jit.script` is deprecated.", DeprecationWarning, stacklevel=1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # an orphan that ended may wait for init to notice
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_results_come_in_rank_order_from_the_same_processes(pool: Pool) -> None:
    seen: list[int] = []
    for world in [2, 1, 3, 8, 4, 5, 6, 7]:
        results = pool.run(ranks_and_sum, world=world, scale=2.0)
        assert [result[:2] for result in results] == [(rank, world) for rank in range(world)]
        for result in results:
            assert torch.equal(result[3], torch.full((3,), float(world * (world - 1))))
        pids = [result[2] for result in results]
        shared = min(len(pids), len(seen))
        assert pids[:shared] == seen[:shared]
        seen = max(pids, seen, key=len)
    assert pool.pids == seen


def test_group_is_made_anew_quickly(pool: Pool) -> None:
    pool.run(ranks_and_sum, world=4)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        pool.run(ranks_and_sum, world=4)
        seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[10] < 2.0, seconds  # about 0.1 s on an idle machine


def test_meshes_of_destroyed_groups_are_forgotten(pool: Pool) -> None:
    expected = 2 * torch.arange(6.0).view(3, 2)
    for world in [2, 4, 2, 4]:
        assert all(torch.equal(x, expected) for x in pool.run(mesh_sum, world=world))


def test_compiler_is_available(pool: Pool) -> None:
    for _ in range(2):
        assert torch.equal(pool.run(compiled, world=1, timeout=120)[0], torch.full((2,), 2.0))


def test_all_ranks_start_from_one_seed(pool: Pool) -> None:
    first, second = pool.run(random_values, world=2), pool.run(random_values, world=2)
    assert all(torch.equal(first[0], x) for x in first + second)


def test_rank_that_raises(pool: Pool) -> None:
    pool.run(ranks_and_sum, world=3)
    pids = pool.pids
    with pytest.raises(AssertionError, match="'gate' is wrong on rank 1") as caught:
        pool.run(raise_on, (1,), world=3)
    assert "rank 0 ----\nended without an error" in str(caught.value)
    assert "in raise_on" in str(caught.value)
    assert pool.run(ranks_and_sum, world=3)[2][2] == pids[2]


def test_rank_that_raises_while_others_wait_for_it(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match="only here"):
        pool.run(raise_before_collective, world=3)
    assert time.monotonic() - start < 30
    assert len(pool.run(ranks_and_sum, world=3)) == 3


def test_rank_that_never_ends() -> None:
    pool = Pool()
    pool.run(ranks_and_sum, world=2)
    pids = pool.pids
    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        pool.run(wait_for_absent, world=2, timeout=4)
    assert time.monotonic() - start < 15
    assert "in sleep_long" in str(caught.value)
    assert "all_reduce" in str(caught.value)
    assert pool.pids == []
    assert not any(map(is_alive, pids))
    assert len(pool.run(ranks_and_sum, world=2)) == 2
    pool.close()


def test_rank_that_dies() -> None:
    pool = Pool()
    with pytest.raises(RunError, match=r"exit code -11[\s\S]*in die"):
        pool.run(die, world=2)
    assert len(pool.run(ranks_and_sum, world=1)) == 1
    pool.close()


def test_expected_errors(pool: Pool) -> None:
    messages = pool.expect_error(raise_on, (0, 1), world=2, match="gate", raises=ValueError)
    assert messages == [f"parameter 'gate' is wrong on rank {rank}" for rank in range(2)]
    with pytest.raises(RunError, match=r"rank 0 did not raise builtins\.Exception"):
        pool.expect_error(raise_on, (1,), world=2)
    with pytest.raises(RunError, match=r"rank 0 did not raise builtins\.TypeError"):
        pool.expect_error(raise_on, (0, 1), world=2, raises=TypeError)
    with pytest.raises(RunError, match="lacks 'router'"):
        pool.expect_error(raise_on, (0, 1), world=2, match="router")
    with pytest.raises(RunError, match="different types"):
        pool.expect_error(raise_rank_types, world=2)


def test_warnings_are_errors_in_workers(pool: Pool) -> None:
    pool.expect_error(warn, world=1, match="unheard of", raises=UserWarning)
    pool.run(warn_allowed, world=1)
    warn_allowed(0, 1)  # the same list holds in the tests' own process


def test_allowed_warnings_fit_one_ini_line() -> None:
    assert all(":" not in allowed.message for allowed in ALLOWED_WARNINGS)


def test_wrong_calls_are_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match=r"world must be in 1\.\.8, got 9"):
        pool.run(ranks_and_sum, world=9)
    with pytest.raises(TypeError, match="top level"):
        pool.run(lambda rank, world: None, world=1)


OWNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import test_pool
from pool import Pool
pool = Pool()
pool.run(test_pool.ranks_and_sum, world=1)
print(*pool.pids, flush=True)
pool.run(test_pool.wait_for_absent, world=1, timeout=1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_owner(number: signal.Signals, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 1
    assert is_alive(pids[0])
    time.sleep(0.5)  # into the second run
    owner.send_signal(number)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while is_alive(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pids[0])
