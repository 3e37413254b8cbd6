"""What a machine can do, as one line of text."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from torch import Tensor

__all__ = ["Hardware", "find_hardware"]


@dataclass(frozen=True)
class Hardware:
    """One rank of a cluster: what it sustains, not what its data sheet promises.

    The defaults stand for a GPU that multiplies bfloat16 matrices at 400 TFLOP/s, with 50 GB/s
    of network of its own.
    """

    tflops: float = 400.0  # 1e12 floating-point operations a second, in matrix products
    gbps: float = 50.0  # 1e9 bytes a second that a rank sends, and gets at the same time
    latency_us: float = 1.0  # microseconds that each other rank adds to an exchange

    def arithmetic_seconds(self, flops: Tensor) -> Tensor:
        """How long this many floating-point operations take."""
        return flops / (self.tflops * 1e12)

    def wire_seconds(self, size: Tensor, peers: int) -> Tensor:
        """How long an exchange of this many bytes with so many ranks takes."""
        return size / (self.gbps * 1e9) + peers * self.latency_us * 1e-6


def find_hardware(text: str) -> Hardware:
    """Hardware from a line of ``name=value``; what is not named keeps its default.

    Raises:
        ValueError: for an unknown name, or a value that is no positive number.

    Examples:
        >>> find_hardware("tflops=800,gbps=25")
        Hardware(tflops=800.0, gbps=25.0, latency_us=1.0)
    """
    names = [field.name for field in fields(Hardware)]
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in names:
            raise ValueError(f"hardware: {name!r} is none of {', '.join(names)}.")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(f"hardware: {part!r} is no number, such as {name}=50.") from None
        lowest = 0.0 if name == "latency_us" else math.ulp(0.0)
        if not lowest <= found[name] < math.inf:
            raise ValueError(f"hardware: {part!r} must be positive.")
    return replace(Hardware(), **found)
