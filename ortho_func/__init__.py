"""Distributed orthonormalized optimizers as a torch.compile-friendly functional library."""

from ortho_func.algorithms import schedules
from ortho_func.algorithms.combine import chain, inject, partition
from ortho_func.algorithms.functional import dion, dion2, dion3, muon, normuon
from ortho_func.algorithms.gradients import (
    add_decayed_weights,
    clip_by_global_norm,
    momentum,
    scale,
    scale_by_schedule,
    stateless,
)
from ortho_func.algorithms.matrixwise import on_whole_matrices
from ortho_func.algorithms.pointwise import adamw, lion
from ortho_func.algorithms.transform import Transform, apply_compensated, apply_updates, elementwise
from ortho_func.geometry import Reading
from ortho_func.optim.memory import state_bytes
from ortho_func.optim.optimizers import Dion, Dion2, Dion3, Muon, NorMuon
from ortho_func.param_groups import ParamGroups, Rule, param_groups
from ortho_func.plan import Plan, plan
from ortho_func.primitives.collectives import all_to_all
from ortho_func.primitives.orthogonalize import gram_newton_schulz, newton_schulz, orthogonalize
from ortho_func.primitives.packing import pack, unpack
from ortho_func.primitives.padding import narrow, pad_to_max
from ortho_func.primitives.qk_clip import qk_clip, qk_clip_
from ortho_func.primitives.rounding import compensated_add, random_bits, stochastic_round
from ortho_func.primitives.spectrum import extreme_singular_values

__version__ = "0.1.0"
__all__ = [
    "Dion",
    "Dion2",
    "Dion3",
    "Muon",
    "NorMuon",
    "ParamGroups",
    "Plan",
    "Reading",
    "Rule",
    "Transform",
    "adamw",
    "add_decayed_weights",
    "all_to_all",
    "apply_compensated",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "compensated_add",
    "dion",
    "dion2",
    "dion3",
    "elementwise",
    "extreme_singular_values",
    "gram_newton_schulz",
    "inject",
    "lion",
    "momentum",
    "muon",
    "narrow",
    "newton_schulz",
    "normuon",
    "on_whole_matrices",
    "orthogonalize",
    "pack",
    "pad_to_max",
    "param_groups",
    "partition",
    "plan",
    "qk_clip",
    "qk_clip_",
    "random_bits",
    "scale",
    "scale_by_schedule",
    "schedules",
    "state_bytes",
    "stateless",
    "stochastic_round",
    "unpack",
]
