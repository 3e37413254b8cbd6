"""Lightning: return the optimizer, and a scheduler, from ``configure_optimizers``.

python examples/recipes/with_lightning.py
"""

from __future__ import annotations

import tempfile
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
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = NorMuon(groups(self.model), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def fit(epochs: int, path: str | None = None) -> tuple[Module, lightning.Trainer]:
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=100.0,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(list(batches(8)), batch_size=None)
    trainer.fit(module, data, ckpt_path=path)
    return module, trainer


def main() -> None:
    whole, _ = fit(epochs=2)

    plain = small_model()
    optimizer = NorMuon(groups(plain), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    expected = [*train(plain, optimizer, 8), *train(plain, optimizer, 8)]
    torch.testing.assert_close(torch.tensor(whole.losses), torch.tensor(expected))

    with tempfile.TemporaryDirectory() as folder:
        _, trainer = fit(epochs=1)
        trainer.save_checkpoint(f"{folder}/half.ckpt")
        rest, _ = fit(epochs=2, path=f"{folder}/half.ckpt")
    assert rest.losses == whole.losses[8:]


if __name__ == "__main__":
    main()
