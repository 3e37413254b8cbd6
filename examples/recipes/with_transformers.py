"""Hugging Face Trainer: ``optimizers=(optimizer, scheduler)``; its checkpoints hold their state.

python examples/recipes/with_transformers.py
"""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ortho_func import NorMuon, param_groups


class Counting(Dataset):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(16)) % 32
        return {"input_ids": tokens, "labels": tokens}


def trainer(folder: str, steps: int, seed: int) -> Trainer:
    set_seed(seed)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = NorMuon(param_groups(model, lr=0.02, other_lr=3e-3))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=8, logging_steps=5, report_to=[],
        use_cpu=True, save_strategy="steps", save_steps=steps // 2, disable_tqdm=True,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Counting(), optimizers=(optimizer, scheduler))


def losses(one: Trainer) -> list[float]:
    return [float(entry["loss"]) for entry in one.state.log_history if "loss" in entry]


def main(steps: int = 40) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = trainer(folder, steps, seed=0)
        whole.train()
        assert losses(whole)[-1] < 0.8 * losses(whole)[0]

        resumed = trainer(folder, steps, seed=1)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{steps // 2}")
        assert losses(resumed)[-1] == losses(whole)[-1]


if __name__ == "__main__":
    main()
