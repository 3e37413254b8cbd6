"""Whole steps on one device: eager, compiled and as a captured CUDA graph, beside peers.

``python benchmarks/device.py [--dion PATH]`` on a CUDA device takes about 10^9 parameters;
elsewhere, or with ``--toy``, a few small matrices, and nothing is captured.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import measure
import peers
import torch
from one_process import Shapes, layers
from peers import Entry

BILLION = layers(20, 2048)  # 20 * 12 * 2048^2 = 1.007e9
TOY = layers(2, 32)


def step_of(
    entry: Entry, shapes: Shapes, device: str, grads: Sequence[torch.Tensor]
) -> tuple[Callable[[], Any], Any]:
    params = peers.parameters(shapes, device)
    peers.set_gradients(params, grads)
    return entry.make(params, None).step, params


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """A step as a CUDA graph that is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def synchronized(step: Callable[[], Any], device: str) -> Callable[[], Any]:
    def timed() -> None:
        step()
        if device == "cuda":
            torch.cuda.synchronize()

    return timed


def run(*, toy: bool, repeats: int = 20) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = TOY if toy or device == "cpu" else BILLION
    found, absent = peers.one_process()
    failed = {one.name: one.reason for one in absent}
    grads = peers.gradients(peers.parameters(shapes, device))
    steps: dict[str, Any] = {}
    params: dict[str, Any] = {}
    for entry in (*peers.ours(), *found):
        ways: dict[str, Callable[[Any], Any]] = {"": lambda step: step}
        if device == "cuda":
            ways[", captured"] = captured
        for suffix, way in ways.items():
            name = entry.name + suffix
            try:
                step, params[name] = step_of(entry, shapes, device, grads)
                step()
                peers.set_gradients(params[name], grads)
                steps[name] = synchronized(way(step), device)
            except Exception as error:  # of a peer, or of a capture: said, not raised
                if entry.ours and not suffix:
                    raise
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"

    def before(name: str) -> None:
        peers.set_gradients(params[name], grads)
        if device == "cuda":
            torch.cuda.synchronize()

    times = measure.alternate(steps, repeats=repeats, before=before, seconds=240)
    return {
        "parameters": sum(rows * cols for rows, cols in shapes),
        "times": times,
        "failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dion", help="a checkout of microsoft/dion")
    parser.add_argument("--toy", action="store_true", help="small matrices on any device")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    peers.use_dion(args.dion)
    warnings.simplefilter("ignore")
    found = run(toy=args.toy, repeats=args.repeats)
    print(measure.save("device", found))
    for name, seconds in measure.medians(found["times"]).items():
        print(f"{1e3 * seconds:10.3f} ms  {name}")
    for name, reason in found["failed"].items():
        print(f"{'absent':>13}  {name}: {reason}")


if __name__ == "__main__":
    main()
