"""Everything behind docs/performance.md: ``python benchmarks/run.py [--dion PATH]``.

About ten minutes on two quiet cores; most of it is compilation, the peers' and ours.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import buckets
import compile as compilation
import growth
import measure
import one_process
import orthogonalizers
import overlap
import page
import peers
import sharded
import teams


def parts(seconds: float) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "one_process": lambda: one_process.run(seconds=1.5 * seconds),
        "sharded": lambda: sharded.run(sharded.cases(), seconds=seconds),
        "orthogonalizers": lambda: orthogonalizers.run(seconds=seconds),
        "buckets": buckets.run,
        "overlap": overlap.run,
        "teams": teams.run,
        "growth": lambda: growth.run(seconds=seconds / 2),
        "compile": lambda: compilation.run((1, 3)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dion", help="a checkout of microsoft/dion")
    parser.add_argument("--seconds", type=float, default=6.0, help="of measuring, a case")
    parser.add_argument("--only", nargs="*", choices=list(parts(0)), help="parts of it")
    args = parser.parse_args()
    peers.use_dion(args.dion)
    warnings.simplefilter("ignore")
    for name, part in parts(args.seconds).items():
        if args.only is None or name in args.only:
            start = time.perf_counter()
            measure.save(name, part())
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    page.main()


if __name__ == "__main__":
    main()
