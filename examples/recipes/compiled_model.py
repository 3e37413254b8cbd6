"""A compiled model and a compiled step, each a graph of its own.

python examples/recipes/compiled_model.py
"""

from __future__ import annotations

import torch
from small import groups, small_model, train

from ortho_func import Muon


def main(backend: str = "inductor", steps: int = 15) -> None:
    model = small_model()
    optimizer = Muon(
        groups(model), lr=0.05, compute_dtype=torch.float32, compile={"backend": backend}
    )
    losses = train(torch.compile(model, backend=backend), optimizer, steps)

    plain = small_model()
    expected = train(plain, Muon(groups(plain), lr=0.05, compute_dtype=torch.float32), steps)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
