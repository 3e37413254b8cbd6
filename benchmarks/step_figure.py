"""Draw docs/step.svg, a step of four matrices: ``python benchmarks/step_figure.py``."""

from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "step.svg"
RANKS = 4
# Name, rows and columns in pixels of what a rank holds evenly, and which rank owns it. Of the last
# one only three ranks hold rows.
MATRICES = (("a", 12, 44, 0), ("b", 18, 26, 1), ("c", 9, 60, 2), ("d", 8, 34, 3))
HEIGHT, TOP = 96, 56  # of a rank's lane, and above the first
SHARDS, WIRE, WHOLE, HOME, BACK = 84, 300, 372, 520, 590  # left edges

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #222; }
  .small { font-size: 11px; fill: #555; }
  .lane { fill: #f3f3f3; } path.wire { fill: none; stroke-width: 1.5; opacity: 0.7; }
  .a { fill: #4477aa; } .b { fill: #ee8866; } .c { fill: #44aa88; } .d { fill: #aa4499; }
  .wire.a { stroke: #4477aa; } .wire.b { stroke: #ee8866; }
  .wire.c { stroke: #44aa88; } .wire.d { stroke: #aa4499; }
  @media (prefers-color-scheme: dark) {
    text { fill: #eee; } .small { fill: #bbb; } .lane { fill: #2a2a2e; }
  }
"""


def held(name: str, rank: int) -> bool:
    """Whether a rank has rows of a matrix."""
    return name != "d" or rank < RANKS - 1


def lane(rank: int) -> float:
    return TOP + rank * (HEIGHT + 10)


def strips(left: int, rank: int) -> list[str]:
    """A rank's shards, side by side."""
    found, at = [], float(left)
    for name, rows, cols, _ in MATRICES:
        if held(name, rank):
            y = lane(rank) + HEIGHT / 2 - rows / 2
            found.append(rect(at, y, cols, rows, name))
        at += cols + 8
    return found


def rect(x: float, y: float, width: float, height: float, name: str) -> str:
    return f'<rect class="{name}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def whole(rank: int) -> list[str]:
    """The matrix that a rank owns, all of its rows together."""
    name, rows, cols, _ = next(one for one in MATRICES if one[3] == rank)
    count = sum(held(name, other) for other in range(RANKS))
    y = lane(rank) + HEIGHT / 2 - count * rows / 2
    return [rect(WHOLE, y + part * rows, cols, rows - 1, name) for part in range(count)]


def wires(start: int, stop: int, *, out: bool) -> list[str]:
    """From every holder to every owner, or back."""
    found = []
    for name, _, _, owner in MATRICES:
        for rank in range(RANKS):
            if held(name, rank):
                ends = (lane(rank), lane(owner)) if out else (lane(owner), lane(rank))
                one, two = (y + HEIGHT / 2 for y in ends)
                middle = (start + stop) / 2
                path = f"M{start} {one:g} C{middle:g} {one:g} {middle:g} {two:g} {stop} {two:g}"
                found.append(f'<path class="wire {name}" d="{path}"/>')
    return found


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def svg() -> str:
    """The drawing."""
    height = lane(RANKS) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height:g}" role="img"'
        ' aria-label="Shards go to the owners of their matrices, and updates come home">',
        f"<style>{STYLE}</style>",
    ]
    for rank in range(RANKS):
        y = lane(rank)
        parts.append(f'<rect class="lane" x="8" y="{y:g}" width="784" height="{HEIGHT}" rx="6"/>')
        parts += [text(18, y + HEIGHT / 2 + 4, f"rank {rank}"), *strips(SHARDS, rank)]
        parts += [*whole(rank), *strips(BACK, rank)]
    parts += wires(WIRE - 14, WHOLE - 6, out=True) + wires(HOME - 76, BACK - 6, out=False)
    heads = (
        (SHARDS, "shards: momentum"),
        (WIRE - 14, "all-to-all"),
        (WHOLE, "whole matrices"),
        (BACK - 60, "all-to-all"),
        (BACK + 30, "decay, update"),
    )
    parts += [text(x, 24 if n % 2 == 0 else 44, words) for n, (x, words) in enumerate(heads)]
    parts.append(text(18, height - 12, "Every rank owns a matrix; rank 3 has no rows of the last "
                      "one and sends none. Sizes follow from the plan.", "small"))  # fmt: skip
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    FILE.write_text(svg())
