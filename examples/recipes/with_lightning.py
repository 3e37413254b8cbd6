"""Lightning: return the optimizer, and a scheduler, from ``configure_optimizers``.

python examples/recipes/with_lightning.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from small import batches, groups, loss_of, small_model, train
from torch import Tensor

from ortho_func import NorMuon


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = loss_of(self.model, *batch)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return NorMuon(groups(self.model), lr=0.05)


def main(steps: int = 15) -> None:
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(list(batches(steps)), batch_size=None)
    trainer.fit(module, data)

    plain = small_model()
    expected = train(plain, NorMuon(groups(plain), lr=0.05), steps)
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(expected))


if __name__ == "__main__":
    main()
