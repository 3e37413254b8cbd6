"""What a type checker must refuse; each such line says so. Checked by tests/test_packaging.py."""

import torch

from ortho_func import Muon, muon, newton_schulz, plan

layer = torch.nn.Linear(8, 4)
Muon(layer.parameters(), lr="0.02")  # wrong
Muon(layer.parameters(), wire="thick")  # wrong
Muon(layer.parameters(), hops=2)  # wrong
Muon(layer.parameters(), nesterow=True)  # wrong
Muon(layer.parameters(), 0.02, 0.1, 0.95)  # wrong
newton_schulz([[1.0]])  # wrong
muon(lr=[0.1])  # wrong
plan({"w": layer.weight}, balance="fair")  # wrong
number: int = newton_schulz(torch.ones(2, 2))  # wrong
