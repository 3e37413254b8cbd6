"""An ensemble: models with stacked parameters, trained as one by `vmap`.

python examples/functional/ensemble.py
"""

from __future__ import annotations

from student import STUDENT, batch, is_matrix, loss, network
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from ortho_func import adamw, apply_updates, normuon, partition


def main(count: int = 4, steps: int = 60) -> tuple[Tensor, Tensor]:
    """Each model's loss on a fresh batch, and the loss of their mean prediction."""
    stacked, _ = stack_module_state([network(seed=seed) for seed in range(count)])
    params = {name: p.detach() for name, p in stacked.items()}
    tx = partition({"matrix": normuon(lr=0.05), "rest": adamw(lr=3e-3)}, is_matrix)
    state = vmap(tx.init)(params)
    for number in range(steps):
        grads = vmap(grad(loss), in_dims=(0, None, None))(params, *batch(number))
        updates, state = vmap(tx.update)(grads, state, params)
        params = apply_updates(params, updates)
    x, y = batch(10**6, 512)
    outputs = vmap(lambda p: functional_call(STUDENT, p, (x,)))(params)
    return (outputs - y).square().mean(dim=(1, 2)), (outputs.mean(dim=0) - y).square().mean()


if __name__ == "__main__":
    each, together = main()
    print("each", [round(float(value), 4) for value in each], "together", round(float(together), 4))
