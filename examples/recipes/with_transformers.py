"""Hugging Face Trainer: ``optimizers=(optimizer, scheduler)``.

python examples/recipes/with_transformers.py
"""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ortho_func import NorMuon


class Counting(Dataset):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(16)) % 32
        return {"input_ids": tokens, "labels": tokens}


def main(steps: int = 30) -> None:
    set_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    model = GPT2LMHeadModel(config)
    # GPT-2's Conv1D stores weights as (in, out); the polar factor does not mind.
    matrices = [p for p in model.transformer.h.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is q for q in matrices)]
    optimizer = NorMuon(
        [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 3e-3}], lr=0.02
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, logging_steps=10,
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=Counting(), optimizers=(optimizer, scheduler)
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert float(losses[-1]) < 0.6 * float(losses[0]), losses


if __name__ == "__main__":
    main()
