"""Distributed orthonormalized optimizers as a torch.compile-friendly functional library."""

from ortho_func.optim.optimizers import Dion2, Dion3, Muon, NorMuon
from ortho_func.plan import Plan, plan
from ortho_func.primitives.collectives import all_to_all
from ortho_func.primitives.orthogonalize import gram_newton_schulz, newton_schulz, orthogonalize
from ortho_func.primitives.packing import pack, unpack
from ortho_func.primitives.padding import narrow, pad_to_max

__version__ = "0.1.0"
__all__ = [
    "Dion2",
    "Dion3",
    "Muon",
    "NorMuon",
    "Plan",
    "all_to_all",
    "gram_newton_schulz",
    "narrow",
    "newton_schulz",
    "orthogonalize",
    "pack",
    "pad_to_max",
    "plan",
    "unpack",
]
