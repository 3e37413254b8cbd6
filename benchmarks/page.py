"""Write docs/performance.md and its plot from runs/bench: ``python benchmarks/page.py``."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import compile as compilation
import growth
import measure
import orthogonalizers
import overlap
import peers

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PLOT, GROWTH = (DOCS / name for name in ("performance.md", "performance.svg", "growth.svg"))
PARTS = ("one_process", "sharded", "orthogonalizers", "buckets", "overlap", "teams", "growth",
         "compile", "device")  # fmt: skip
MIB = 2**20

# What the library aims at: peer's time over ours, at least.
OVER_BEST = {"12 layers, D=64": 1.5, "12 layers, D=256": 1.4, "12 layers, D=768": 1.2,
             "200 matrices of 32×64": 1.5}  # fmt: skip
OVER_TORCH = {"200 matrices of 32×64": 5.0}
OVER_DION = {"W=2": 1.5, "W=4": 2.0, "W=8": 3.0}
EAGER_TO_COMPILED = 1 / 1.1
EQUAL_ERROR, RATE = 1.2, 0.85

Target = tuple[str, float, float]  # what, aim, measured


def main() -> None:
    found = {name: measure.load(name) for name in PARTS}
    targets: list[Target] = []
    sections = [
        one_process(found["one_process"], targets),
        sharded(found["sharded"], targets),
        orthogonalizer(found["orthogonalizers"], targets),
        buckets(found["buckets"]),
        overlapped(found["overlap"]),
        teamed(found["teams"]),
        grown(found["growth"], found["buckets"]),
        compiling(found["compile"]),
        device(found["device"]),
    ]
    some = next(one for one in found.values() if one is not None)
    page = HEAD.format(**some["machine"]) + summary(targets) + "\n".join(filter(None, sections))
    PAGE.write_text(page)
    draw(targets)
    print(page)


HEAD = """# Performance

Made by `make bench`; don't edit. `make bench ARGS="--dion PATH"` takes a checkout of
microsoft/dion along. Peers and this library run in alternation in one process (or the same ranks),
warm, with gradients presented before each step, and whole `step()` calls are timed. A ratio is
the median over rounds of the peer's time over this library's; above one, this library is faster.
Absolute times depend on the machine and are given for proportion only.

Measured on {processor}, {cores} cores, with Python {python} and torch {torch}. This machine
multiplies bfloat16 matrices so fast that passes over memory weigh as much as the products, and
its two cores are shared: expect other ratios elsewhere, above all on GPUs, where none of
this has been run.

"""


def summary(targets: Iterable[Target]) -> str:
    rows = [
        [what, f"{aim:.2f}", f"{got:.2f}", "yes" if got >= aim else "**no**"]
        for what, aim, got in targets
    ]
    text = "## Against what was aimed at\n\n![ratios](performance.svg)\n\n"
    return text + measure.table(("peer's time over ours", "aim", "measured", "met"), rows) + "\n"


def fastest(ours: Iterable[str], times: measure.Times) -> str:
    medians = measure.medians(times)
    return min(ours, key=lambda name: medians[name])


# --- one process -------------------------------------------------------------------------------


def one_process(found: dict[str, Any] | None, targets: list[Target]) -> str:
    if found is None:
        return ""
    errors = found["errors"]
    rows = [
        [name, found["schedules"][name], *(f"{e:.3f}" for e in errors[name])]
        for name in found["schedules"]
        if "compiled" not in name
    ]
    text = f"## One process, {found['threads']} threads\n\n{ONE_PROCESS}"
    head = ("optimizer", "schedule", "256×1024", "256×256", "log, 256×512")
    text += measure.table(head, rows)
    text += "".join(f"\nAbsent: {name} ({why})." for name, why in found["absent"].items()) + "\n\n"
    table = []
    for case, one in found["cases"].items():
        times, ratios = one["times"], {}
        mine = [name for name in times if name.startswith("ortho_func")]
        for peer in (name for name in times if name not in mine):
            able = [name for name in mine if peers.no_worse(errors[name], errors[peer])]
            best = fastest(able, times)
            ratios[peer] = measure.median_ratio(times, peer, best)
            default = measure.median_ratio(times, peer, "ortho_func")
            table.append([case, peer, f"{default:.2f}", f"{ratios[peer]:.2f}", best])
        if ratios:
            least = min(ratios, key=lambda peer: ratios[peer])
            targets.append(
                (f"{case}: over the best peer ({least})", OVER_BEST[case], ratios[least])
            )
        if case in OVER_TORCH and "torch.optim.Muon" in ratios:
            what = f"{case}: over torch.optim.Muon"
            targets.append((what, OVER_TORCH[case], ratios["torch.optim.Muon"]))
    text += measure.table(
        ("matrices", "peer", "over the default, eager", "over the fastest of ours", "which is"),
        table,
    )
    return text


ONE_PROCESS = """\
Relative error of one step to the polar factor of the gradient by SVD, as the optimizers make it,
in bfloat16. Ratios are between a peer and those of this library's entries that are no worse on any
of the three. A layer is four D×D matrices, one 4D×D and one D×4D.

"""


# --- sharded -----------------------------------------------------------------------------------


def sharded(found: dict[str, Any] | None, targets: list[Target]) -> str:
    if found is None:
        return ""
    rows = []
    for name, case in found["cases"].items():
        times = case["times"]
        mine = [key for key in times if key.startswith("ortho_func")]
        for peer in (key for key in times if key not in mine):
            best = fastest(mine, times)
            eager = measure.median_ratio(times, peer, "ortho_func")
            ratio = measure.median_ratio(times, peer, best)
            rows.append([name, peer, f"{eager:.2f}", f"{ratio:.2f}", best])
            if peer == "microsoft/dion":
                targets.append((f"{name}: over {peer}", OVER_DION[name[:3]], ratio))
                targets.append((f"{name}: eager over {peer} compiled", EAGER_TO_COMPILED, eager))
        failed = case["failed"].items()
        rows += [[name, peer, "—", "—", why.partition(":")[0]] for peer, why in failed]
    head = ("case", "peer", "over ours, eager", "over the fastest of ours", "which is")
    return SHARDED + measure.table(head, rows)


SHARDED = """
## FSDP2 on gloo, one thread a rank

A step's time is its slowest rank's. Every layer has an 18×D gate besides, as of 18 heads: on eight
ranks six hold three rows and two hold none. microsoft/dion compiles its steps. More ranks than
cores take turns, so that these times are the sums of the ranks' work more than its longest part.

"""


# --- the rest ----------------------------------------------------------------------------------


def orthogonalizer(found: dict[str, Any] | None, targets: list[Target]) -> str:
    if found is None:
        return ""
    rows = []
    for shape, times in found["cases"].items():
        least: dict[str, float] = {}
        for name, steps in orthogonalizers.PUBLISHED:
            for style in ("", ", fused"):
                theirs = f"{name}, {steps} steps{style}"
                ours = orthogonalizers.equal_error(found["errors"], theirs)
                assert ours is not None
                ratio = measure.median_ratio(times, theirs, ours)
                rows.append([shape, theirs, ours, f"{ratio:.2f}"])
                least[style] = min(ratio, least.get(style, ratio))
        what = f"orthogonalizer, {shape}: over plain products at equal error"
        targets.append((what, EQUAL_ERROR, least[""]))
    for shape, rate in found["rates"].items():
        targets.append((f"orthogonalizer, {shape}: share of a plain product's rate", RATE, rate))
    head = ("matrices", "published schedule", "ours at equal error", "ratio")
    text = f"\n## The orthogonalizer alone\n\n{ALONE}{measure.table(head, rows)}"
    curve = []
    for shape, times in found["cache"].items():
        medians = measure.medians(times)
        curve.append([shape, *(f"{seconds / medians['2048']:.2f}" for seconds in medians.values())])
    sizes = [f"{n} KiB" for n in ("512", "1024", "2048", "4096")]
    return text + CURVE + measure.table(("matrices", *sizes, "all at once"), curve)


ALONE = """\
bfloat16, 2 threads. A published schedule's three products a step, written plainly or with
additions fused into the products (`baddbmm`). Ours takes the fewest steps whose errors are no worse
on the three spectra.

"""


CURVE = """
How much of a batch a CPU takes at a time, counted in matrices of the short side; time over that of
the default, 2048 KiB:

"""


def buckets(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = [
        [f"{int(size) // MIB} MiB", found["buckets"][size], f"{1e3 * seconds:.1f} ms",
         f"{found['extra'][size] / MIB:.0f} MiB"]
        for size, seconds in measure.medians(found["times"]).items()
    ]  # fmt: skip
    text = (
        f"\n## Bucket size\n\n{found['layers']} layers, D={found['width']}, {found['world']} ranks "
        f"under FSDP2: {found['wire_bytes'] / MIB:.0f} MiB on the wire, one way. Extra memory is "
        "the process's largest resident size during a step over that before it, the "
        "orthogonalizer's work space included.\n\n"
    )
    return text + measure.table(("`bucket_bytes`", "buckets", "step", "extra memory"), rows)


def overlapped(found: dict[str, Any] | None) -> str:
    return "" if found is None else OVERLAP.format(**found) + overlap.table(found)


OVERLAP = """
## Overlap

Two ranks, {buckets} buckets, and a simulated link that carries one exchange after the other. The
bound is 1.1 times the longer of arithmetic and link, and one bucket's edge: its arithmetic and its
two exchanges, which nothing can hide. (Ranks that share cores with anything else wait longer.)

"""


def teamed(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = [[name, f"{ratio:.2f}"] for name, ratio in found["ratios"].items()]
    return TEAMS.format(**found) + measure.table(("matrix", "one owner's time over a team's"), rows)


TEAMS = """
## Teams

A model of one matrix on {world} ranks: the step with one owner over that with a team of all
(`team_size={world}`). Each of the four steps of the iteration sums Gram matrices over the team.

"""


def grown(found: dict[str, Any] | None, memory: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    growth.draw(found, memory, GROWTH)
    return growth.tables(found)


def compiling(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = [
        [count, found["matrices"][count], f"{one['cold']:.0f} s", f"{one['warm']:.0f} s"]
        for count, one in found["seconds"].items()
    ]
    full = str(compilation.FULL)
    if full not in found["seconds"]:
        cold, warm = (compilation.extrapolated(found, which) for which in ("cold", "warm"))
        rows.append([f"{full}, extrapolated", found["matrices"][full], f"{cold:.0f} s",
                     f"{warm:.0f} s"])  # fmt: skip
    world = ", ".join(f"{n} on {w} ranks" for w, n in found["nodes by world"].items())
    counts = ", ".join(f"{n} with {c} layers" for c, n in found["nodes by layers"].items())
    imports = found["import"]
    return (
        "\n## Compilation\n\nFirst step with `compile=True`, one thread, with an empty cache and "
        "with the one that it leaves. A layer has seven matrices of seven shapes and two "
        "vectors, which AdamW takes.\n\n"
        + measure.table(("layers", "matrices", "cold", "warm"), rows)
        + f"\nOperations in the traced graph of four layers: {world}; on eight ranks: {counts}.\n\n"
        f"Guards and Python around the graph: {1e3 * found['outside the graph']:.1f} ms a step "
        "with 500 parameters.\n\n"
        f"`import ortho_func` takes {1e3 * imports['ortho_func']:.0f} ms after `import torch`, "
        f"which takes {1e3 * imports['torch']:.0f} ms.\n"
    )


def device(found: dict[str, Any] | None) -> str:
    text = (
        "\n## One device, 10^9 parameters\n\n`python benchmarks/device.py` times whole steps, "
        "eager, compiled and captured as CUDA graphs, beside the peers. "
    )
    if found is None or found["machine"]["device"] == "cpu":
        return text + "It has run at toy size on a CPU only; there are no figures from a GPU.\n"
    rows = [[name, f"{1e3 * t:.2f} ms"] for name, t in measure.medians(found["times"]).items()]
    rows += [[name, why] for name, why in found["failed"].items()]
    head = (found["machine"]["device"], f"{found['parameters']:.2e} parameters")
    return text + "\n\n" + measure.table(head, rows)


def draw(targets: list[Target]) -> None:
    """The ratios and what was aimed at, as an SVG of little size."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "performance"})
    from matplotlib import pyplot

    shown = [one for one in targets if one[1] > 1]
    figure, axis = pyplot.subplots(figsize=(9, 0.32 * len(shown) + 1), layout="constrained")
    at = range(len(shown))
    axis.barh(at, [got for _, _, got in shown], color="tab:blue", height=0.6)
    axis.plot([aim for _, aim, _ in shown], at, "k|", markersize=12, label="aim")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(at, [what for what, _, _ in shown], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("peer's time over ours")
    axis.legend(loc="lower right")
    figure.savefig(PLOT, metadata={"Date": None})


if __name__ == "__main__":
    main()
