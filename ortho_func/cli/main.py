"""The command line: ``python -m ortho_func plan`` and ``python -m ortho_func doctor``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from ortho_func.cli.doctor import diagnose
from ortho_func.cli.figures import Figures, Planned, figures_of, make_plan
from ortho_func.cli.hardware import Hardware, find_hardware
from ortho_func.cli.meshes import find_mesh
from ortho_func.cli.models import MODELS, find_model
from ortho_func.cli.plot import check_plot, draw
from ortho_func.cli.report import figure_table, shape_table, title
from ortho_func.cli.table import show
from ortho_func.primitives.orthogonalize import METHODS

__all__ = ["main"]

_ALGORITHMS = ("muon", "normuon", "dion2", "dion3")  # those that orthogonalize by `--method`
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        return diagnose()
    try:
        _plan(given)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ortho_func", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, and a self-test on two processes")
    plan = commands.add_parser(
        "plan",
        help="who does what on how many ranks, without processes or device memory",
        description="Plan a model's matrices on meshes of any size, and estimate what that means.",
    )
    plan.add_argument(
        "model",
        metavar="MODEL_OR_SHAPES",
        help=f"{', '.join(MODELS)}; a .json or text file of shapes; or shapes such as "
        "32*4096x4096,128x768x2048 (three extents: a stack of matrices)",
    )
    _add_mesh_options(plan)
    _add_algorithm_options(plan)
    plan.add_argument(
        "--hardware",
        default="",
        metavar="NAME=VALUE,...",
        help=f"what a rank sustains; default {_default_hardware()} "
        "(10^12 FLOP/s; 10^9 bytes/s each way; microseconds a peer)",
    )
    plan.add_argument("--plot", metavar="FILE", help="draw load and bytes of every rank")
    return parser


def _default_hardware() -> str:
    made = Hardware()
    return f"tflops={made.tflops:g},gbps={made.gbps:g},latency_us={made.latency_us:g}"


def _add_mesh_options(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--ranks", type=int, nargs="+", default=[8], help="one column each")
    plan.add_argument(
        "--mesh",
        nargs="+",
        default=["fsdp"],
        help="ddp, fsdp, hsdp:REPLICAS, fsdp-tp:EXTENT, ep:EXTENT; one column each",
    )
    plan.add_argument("--wire", default="auto", choices=("auto", "dense", "exact"))
    plan.add_argument(
        "--hops",
        default="auto",
        choices=("auto", "one", "two"),
        help="how results reach replicas: from their owner, or by way of the owner's replica",
    )
    plan.add_argument(
        "--team-size",
        type=_team_size,
        default=1,
        help="how many ranks may own a matrix together, a number or auto; of muon and normuon",
    )
    plan.add_argument("--wire-dtype", default="bfloat16", choices=_DTYPES)
    plan.add_argument("--bucket-mb", type=float, default=64.0, metavar="MIB")


def _team_size(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _add_algorithm_options(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--algorithm", default="muon", choices=_ALGORITHMS)
    plan.add_argument("--method", default="auto", choices=METHODS, help="the orthogonalizer")
    plan.add_argument("--steps", type=int, help="of the orthogonalizer's schedule")
    plan.add_argument("--fraction", type=float, default=0.25, help="of dion2 and dion3")
    plan.add_argument(
        "--selection", default="local", choices=("local", "global"), help="of dion2 and dion3"
    )


def _plan(given: argparse.Namespace) -> None:
    if given.plot:
        check_plot(given.plot)
    model, hardware = find_model(given.model), find_hardware(given.hardware)
    meshes = [find_mesh(name, ranks) for name in given.mesh for ranks in given.ranks]
    found: list[tuple[Planned, Figures]] = []
    for mesh in meshes:
        planned = make_plan(
            model,
            mesh,
            bucket_bytes=int(given.bucket_mb * 2**20),
            wire=given.wire,
            hops=given.hops,
            team_size=given.team_size,
            algorithm=given.algorithm,
            orthogonalizer=given.method,
            ns_steps=given.steps,
            fraction=given.fraction,
            selection=given.selection,
            wire_dtype=_DTYPES[given.wire_dtype],
        )
        found.append((planned, figures_of(planned, hardware)))
    show(shape_table(*found[0]))
    print()
    show(figure_table(found))
    if given.plot:
        draw(given.plot, {title(planned): figures for planned, figures in found})
        print(f"\nDrawn: {given.plot}")
