"""Worker processes for distributed tests: started once, reused by every test.

    def check(rank, world, scale):            # at module level: workers import it
        x = torch.full((2,), float(rank))
        dist.all_reduce(x)
        return scale * x

    def test_sum(pool):
        results = pool.run(check, 2.0, world=4)     # results[rank]

Each run gets a fresh gloo default group over the first `world` workers. When a rank fails, all
ranks' tracebacks are in the error; when one never ends, its Python stack is, every worker is
killed, and the next run starts new ones. No worker outlives the process that owns the pool.
"""

import atexit
import builtins
import faulthandler
import gc
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

MAX_WORLD = 8
START_SECONDS = 180.0  # to import torch on a busy machine; not part of a run's timeout
MOST_THREADS = 150
GRACE_SECONDS = 5.0  # after a first failure: then ranks that have not ended are killed
RELEASE_SHARE = 0.2  # of the grace: then the failed ranks close their connections
LEAVE_SECONDS = 20.0  # to destroy a process group in which nothing is pending
LOG_BYTES = 12_000  # of each rank's output quoted in an error


class AllowedWarning(NamedTuple):
    """A warning that is no error; `message` matches from its start and holds no colon."""

    message: str
    category: str
    reason: str

    def as_ini(self) -> str:
        """The same as a line of pytest's `filterwarnings`."""
        return f"ignore:{self.message}:{self.category}"


ALLOWED_WARNINGS: tuple[AllowedWarning, ...] = (
    AllowedWarning(
        r"`torch\.jit\.script(_method)?` is deprecated",
        "DeprecationWarning",
        "torch's own code does it while the compiler is imported",
    ),
)


def make_warnings_errors() -> None:
    """Set the filters that hold in every worker: all warnings but the allowed ones are errors."""
    warnings.simplefilter("error")
    for allowed in ALLOWED_WARNINGS:
        category = getattr(builtins, allowed.category)
        warnings.filterwarnings("ignore", message=allowed.message, category=category)


# What parent and worker tell each other.


@dataclass(frozen=True)
class Job:
    payload: bytes  # (fn, args, kwargs)
    rank: int
    world: int
    store: str  # a file's name, new in each run
    seed: int
    group_timeout: float


@dataclass(frozen=True)
class Done:
    payload: bytes


@dataclass(frozen=True)
class Failed:
    kind: str
    bases: tuple[str, ...]  # qualified names of the error's class and its bases
    message: str
    trace: str


Outcome = Done | Failed


class RunError(AssertionError):
    """A run in which some rank raised, died or never ended."""

    def __init__(self, headline: str, outcomes: dict[int, Outcome]) -> None:
        self.outcomes = outcomes
        parts = [headline]
        for rank, outcome in sorted(outcomes.items()):
            text = outcome.trace if isinstance(outcome, Failed) else "ended without an error"
            parts.append(f"---- rank {rank} ----\n{text.rstrip()}")
        super().__init__("\n".join(parts))


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loads(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), weights_only=False)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


# The parent's side.


class Pool:
    """At most `MAX_WORLD` workers, started when a run first needs them."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._stores: tempfile.TemporaryDirectory[str] | None = None
        self._runs = 0
        atexit.register(self.close)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world: int,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(rank, world, *args, **kwargs)` on every rank; the results in rank order.

        `fn` must be importable from a module, its arguments and result picklable (tensors are
        copied). Raises `RunError`, an AssertionError, with every rank's traceback or stack.
        """
        outcomes = self._run(fn, args, kwargs, world, timeout, GRACE_SECONDS)
        failed = [rank for rank, outcome in outcomes.items() if isinstance(outcome, Failed)]
        if failed:
            raise RunError(f"{_name_of(fn)} failed on ranks {failed} of {world}", outcomes)
        return [_loads(outcomes[rank].payload) for rank in range(world)]  # type: ignore[union-attr]

    def expect_error(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world: int,
        match: str = "",
        raises: type[BaseException] = Exception,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[str]:
        """Every rank must raise, all the same type, a subclass of `raises`, matching `match`.

        Returns the messages in rank order. A rank that raises does not disturb the others, so
        a hang on one rank takes the whole timeout.
        """
        outcomes = self._run(fn, args, kwargs, world, timeout, float("inf"))
        messages, kinds = [], set()
        for rank, outcome in sorted(outcomes.items()):
            if isinstance(outcome, Done) or _name(raises) not in outcome.bases:
                raise RunError(f"rank {rank} did not raise {_name(raises)}", outcomes)
            if not re.search(match, outcome.message):
                raise RunError(f"rank {rank}: {outcome.message!r} lacks {match!r}", outcomes)
            messages.append(outcome.message)
            kinds.add(outcome.kind)
        if len(kinds) != 1:
            raise RunError(f"ranks raised different types: {sorted(kinds)}", outcomes)
        return messages

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers, in rank order."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill all workers; a later run starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.reap()
        if self._stores is not None:
            self._stores.cleanup()
            self._stores = None

    def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        world: int,
        timeout: float,
        grace: float,
    ) -> dict[int, Outcome]:
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world must be in 1..{MAX_WORLD}, got {world}")
        payload = _job_payload(fn, args, kwargs)
        try:
            workers = self._start(world)
            self._send(workers, payload, zlib.crc32(_name_of(fn).encode()), timeout)
            outcomes = _collect(workers, time.monotonic() + timeout, grace)
            if not _leave(workers, outcomes):
                self.close()
        except BaseException:  # an interrupt too: nothing may keep running
            self.close()
            raise
        return outcomes

    def _start(self, world: int) -> "list[_Worker]":
        if any(worker.process.poll() is not None or worker.crowded for worker in self._workers):
            self.close()
        while len(self._workers) < world:
            self._workers.append(_Worker())
        deadline = time.monotonic() + START_SECONDS
        for worker in self._workers:
            worker.await_start(deadline)
        return self._workers[:world]

    def _send(self, workers: "list[_Worker]", payload: bytes, seed: int, timeout: float) -> None:
        if self._stores is None:
            self._stores = tempfile.TemporaryDirectory(prefix="pool-")
        self._runs += 1
        # A file, as a TCPStore's clients ask the name server now and then: stalls of 5 s.
        store = str(Path(self._stores.name) / str(self._runs))
        # Shorter than the run's: a rank that waits in vain says where, before it is killed.
        group_timeout = max(0.5 * timeout, timeout - GRACE_SECONDS - 2.0)
        for rank, worker in enumerate(workers):
            worker.begin(Job(payload, rank, len(workers), store, seed, group_timeout))


def _name_of(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


def _job_payload(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return _dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{_name_of(fn)} and its arguments must be picklable, and the function at a "
            f"module's top level: {error}"
        ) from error


def _collect(workers: "list[_Worker]", deadline: float, grace: float) -> dict[int, Outcome]:
    """Every rank's outcome; ranks without one by the deadline are killed."""
    outcomes: dict[int, Outcome] = {}
    release = float("inf")
    while len(outcomes) < len(workers) and time.monotonic() < deadline:
        waiting = {workers[r].connection: r for r in range(len(workers)) if r not in outcomes}
        pause = min(deadline, release) if time.monotonic() < release else deadline
        for connection in wait(list(waiting), _left(pause)):
            rank = waiting[connection]  # type: ignore[index]
            outcomes[rank] = workers[rank].receive()
            if isinstance(outcomes[rank], Failed) and release == float("inf"):
                release = time.monotonic() + RELEASE_SHARE * grace
                deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() >= release:  # ranks that wait for a failed one now fail as well
            for rank, outcome in outcomes.items():
                if isinstance(outcome, Failed):
                    workers[rank].release()
    missing = [rank for rank in range(len(workers)) if rank not in outcomes]
    for rank, stack in zip(missing, _stacks([workers[r] for r in missing]), strict=True):
        outcomes[rank] = Failed("unfinished", (), "did not end", f"did not end; {stack}")
    return outcomes


def _leave(workers: "list[_Worker]", outcomes: dict[int, Outcome]) -> bool:
    """Let every rank destroy its group; False when the workers are no longer of use."""
    if any(isinstance(o, Failed) and o.kind in ("unfinished", "died") for o in outcomes.values()):
        return False
    for worker in workers:
        worker.release()
    deadline = time.monotonic() + LEAVE_SECONDS
    clean = True
    for rank, worker in enumerate(workers):
        fault = worker.await_idle(deadline)
        if fault is not None:
            clean = False
            if isinstance(outcomes[rank], Done):
                outcomes[rank] = Failed("leaving", (), "could not leave the group", fault)
    return clean


def _stacks(workers: "list[_Worker]") -> list[str]:
    """Ask each worker for its Python stack; the tails of their output."""
    for worker in workers:
        worker.signal(signal.SIGUSR1)
    if workers:
        time.sleep(0.5)
    return [worker.output() for worker in workers]


class _Worker:
    """One child process, the pipe to it, and what it printed."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self._log_start = 0
        self._ready = False
        self._released = False
        self.connection, theirs = Pipe()
        tests = Path(__file__).resolve().parent
        paths = list(dict.fromkeys([str(tests), str(tests.parent), *filter(None, sys.path)]))
        boot = (
            "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            f"importlib.import_module({__name__!r}).work(int(sys.argv[2]))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", boot, json.dumps(paths), str(theirs.fileno())],
            stdin=subprocess.PIPE,  # never written: its end tells the worker that we are gone
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # one kill reaches the worker's own children
            env=os.environ | _worker_environment(),
        )
        theirs.close()

    def await_start(self, deadline: float) -> None:
        if self._ready:
            return
        if not self.connection.poll(_left(deadline)):
            raise RuntimeError(f"a worker did not start in {START_SECONDS} s; {self.output()}")
        outcome = self.receive()
        if isinstance(outcome, Failed):
            raise RuntimeError(f"a worker could not start: {outcome.trace}")
        self._ready = True

    @property
    def crowded(self) -> bool:
        """Whether threads of groups that torch keeps alive have come to slow it down.

        Each gloo group has three, which wake a hundred times a second for as long as any cache
        of torch's refers to a mesh over it.
        """
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task")) > MOST_THREADS
        except OSError:  # no such folder on this system
            return False

    def begin(self, job: Job) -> None:
        self._log_start = os.fstat(self._log.fileno()).st_size
        self._released = False
        self.connection.send(job)

    def receive(self) -> Outcome:
        try:
            outcome: Outcome = self.connection.recv()
            return outcome
        except (EOFError, OSError):
            code = self.process.wait()
            return Failed("died", (), f"exit code {code}", f"exit code {code}; {self.output()}")

    def release(self) -> None:
        if not self._released and self.process.poll() is None:
            self._released = True
            self.connection.send("leave")

    def await_idle(self, deadline: float) -> str | None:
        """None, or what kept the worker from leaving its group."""
        if not self.connection.poll(_left(deadline)):
            return f"did not leave the group; {_stacks([self])[0]}"
        outcome = self.receive()
        return outcome.trace if isinstance(outcome, Failed) else None

    def output(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._log_start, size - LOG_BYTES)
        text = os.pread(self._log.fileno(), size - start, start).decode(errors="replace")
        return f"its output:\n{text}" if text.strip() else "no output"

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()

    def reap(self) -> None:
        self.process.wait()
        self.connection.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._log.close()


def _worker_environment() -> dict[str, str]:
    defaults = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # Compile in the worker itself: eight pools of compiler processes are seven too many.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Not by the host's name, which may resolve to nothing or to a slow route.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    return {key: os.environ.get(key, value) for key, value in defaults.items()}


# The worker's side.


def work(descriptor: int) -> None:
    """Serve jobs until the parent is gone."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what torch's import left is never garbage: later collections are short
    connection.send(Done(b""))
    while True:
        try:
            job = connection.recv()
            connection.send(_attempt(job))
            connection.recv()  # the parent has heard all ranks: nobody needs our connections
            connection.send(_clean_up())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            os._exit(0)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _attempt(job: Job) -> Outcome:
    try:
        fn, args, kwargs = _loads(job.payload)
        with warnings.catch_warnings():
            make_warnings_errors()
            _join_group(job)
            torch.manual_seed(job.seed)
            return Done(_dumps(fn(job.rank, job.world, *args, **kwargs)))
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        return _failed(error)


def _failed(error: BaseException) -> Failed:
    cls = type(error)
    bases = tuple(_name(base) for base in cls.__mro__)
    return Failed(_name(cls), bases, str(error), traceback.format_exc())


def _join_group(job: Job) -> None:
    timeout = timedelta(seconds=job.group_timeout)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.world),  # type: ignore[attr-defined]
        rank=job.rank,
        world_size=job.world,
        timeout=timeout,
    )


def _clean_up() -> Outcome:
    """Leave the group and forget all that a run left in torch's global state."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget(sys.modules)
        gc.collect()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
    except BaseException as error:
        return _failed(error)
    return Done(b"")


def _forget(loaded: Iterable[str]) -> None:
    if "torch._dynamo" in loaded:
        torch._dynamo.reset()
    if "torch.distributed.tensor" in loaded:
        # Its entries hold meshes of destroyed groups, and an equal mesh of the next run hits them.
        from torch.distributed.tensor import debug

        if hasattr(debug, "_clear_sharding_prop_cache"):
            debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        else:  # torch 2.9
            dispatcher = torch.distributed.tensor.DTensor._op_dispatcher
            dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
