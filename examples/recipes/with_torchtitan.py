"""torchtitan: the optimizer by name, in the container that its trainer steps and saves.

    python examples/recipes/with_torchtitan.py

Where a trainer builds the container from its configuration, `Container` is what to configure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from small import groups, small_model, train
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from ortho_func import NorMuon


class Container(OptimizersContainer):
    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name == "NorMuon":
            return NorMuon
        return OptimizersContainer._resolve_optimizer_factory(name)


def build(model: torch.nn.Module) -> tuple[Any, Any]:
    rest = {"algorithm": "adamw", "lr": 3e-3}
    config = Container.Config(
        implementation="for-loop",
        param_groups=[
            ParamGroupConfig(pattern=r"bias|^4", optimizer_name="NorMuon", optimizer_kwargs=rest),
            ParamGroupConfig(
                pattern=r".*", optimizer_name="NorMuon", optimizer_kwargs={"lr": 0.05}
            ),
        ],
    )
    optimizers = Container(config, model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=4, total_steps=100)
    schedulers = schedule.build(optimizers=optimizers, training_steps=100)
    optimizers.register_step_post_hook(lambda *_: schedulers.step())
    return optimizers, schedulers


def main(steps: int = 10) -> None:
    model = small_model()
    optimizers, schedulers = build(model)
    losses = train(model, optimizers, steps)

    plain = small_model()
    optimizer = NorMuon(groups(plain), lr=0.05)
    factor = schedulers.schedulers[0].lr_lambdas[0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    expected = train(plain, optimizer, steps)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))

    parts = (model, optimizers, schedulers)
    saved = copy.deepcopy([part.state_dict() for part in parts])
    expected = train(model, optimizers, steps)
    model = small_model(seed=1)
    optimizers, schedulers = build(model)
    for part, state in zip((model, optimizers, schedulers), saved, strict=True):
        part.load_state_dict(state)
    assert train(model, optimizers, steps) == expected


if __name__ == "__main__":
    main()
