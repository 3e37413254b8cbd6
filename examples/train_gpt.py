"""Train a small byte-level GPT on real English text, its parameters sharded by ``fully_shard``.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

Two gloo ranks on a CPU, or one rank per GPU over NCCL. Each hidden matrix is orthogonalized as a
whole by one rank, wherever its shards lie; all the rest is under AdamW, in the same optimizer.
"""

import argparse
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import english
import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from tiny_gpt import TinyGPT
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR

# Learning rates of the hidden matrices. The best of the sweeps in examples/README.md (normuon,
# adamw) and docs/choosing.md (the others, on a smaller model).
LEARNING_RATES = {
    "normuon": 0.02,
    "muon": 0.02,
    "dion2": 0.02,
    "dion3": 0.02,
    "dion": 0.02,
    "lion": 0.001,
    "adamw": 0.001,
}

PROMPT = "The statement "  # of the sampled line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--optimizer", choices=LEARNING_RATES, default="normuon", help="for hidden matrices")
    option("--lr", type=float, help="of the hidden matrices (default: the best of the sweep)")
    option("--adjust-lr-fn", help="how it depends on a matrix's shape (default: as published)")
    option("--orthogonalizer", default="auto", help="see docs/choosing.md")
    option("--rest-lr", type=float, default=0.01, help="of embedding, head and norms (AdamW)")
    option("--weight-decay", type=float, default=0.1, help="of the hidden matrices")
    option("--steps", type=int, default=300, help="length of the whole schedule")
    option("--time-budget", type=float, default=float("inf"), help="seconds; --resume goes on")
    option("--batch", type=int, default=8, help="windows per step, over all ranks together")
    option("--time", type=int, default=256, help="bytes per window")
    option("--width", type=int, default=288, help="of the model: a multiple of twice --heads")
    option("--heads", type=int, default=18, help="attention heads, each with a gate")
    option("--layers", type=int, default=3, help="transformer blocks")
    option("--seed", type=int, default=0, help="of the weights, the batches and the sample")
    option("--no-compile", action="store_true", help="run the optimizer's step eagerly")
    option("--sample", type=int, default=160, help="length of the text to write at the end")
    option("--log-every", type=int, default=5, help="steps between two looks at the loss")
    option("--validate-every", type=int, default=50, help="steps between two validations")
    option("--save-every", type=int, default=100, help="steps between two checkpoints")
    option("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    option("--out", type=Path, help="folder for the results (default: runs/OPTIMIZER)")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 0))
    if not ranks:
        parser.error("start me with: torchrun --standalone --nproc-per-node 2 " + parser.prog)
    if args.batch % ranks:
        parser.error(f"--batch {args.batch} is not a multiple of the number of ranks, {ranks}")
    args.lr = LEARNING_RATES[args.optimizer] if args.lr is None else args.lr
    args.out = args.out or Path("runs") / args.optimizer
    return args


def start_ranks() -> DeviceMesh:
    """Join the other ranks: NCCL where there are GPUs, else gloo."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return init_device_mesh("cpu", (dist.get_world_size(),))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return init_device_mesh("cuda", (dist.get_world_size(),))


# ── Model, optimizer, schedule ───────────────────────────────────────────────────────────────────


def build_model(args: argparse.Namespace, mesh: DeviceMesh) -> TinyGPT:
    """The same weights on every rank, of which each rank then keeps its shards."""
    torch.manual_seed(args.seed)
    model = TinyGPT(args.width, args.heads, args.layers).to(mesh.device_type)
    bf16 = mesh.device_type == "cuda"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def build_optimizer(args: argparse.Namespace, model: TinyGPT) -> torch.optim.Optimizer:
    """Matrices inside the blocks under --optimizer; embedding, head and norms under AdamW."""
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
    taken = set(hidden)
    rest = [p for p in model.parameters() if p not in taken]
    adamw = {"lr": args.rest_lr, "betas": (0.9, 0.95), "weight_decay": 0.0}
    settings: dict[str, Any] = {"lr": args.lr, "weight_decay": args.weight_decay}

    if args.optimizer == "adamw":
        groups = [{"params": hidden}, {"params": rest, **adamw}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), **settings)

    from ortho_func import Dion, Dion2, Dion3, Muon, NorMuon

    kinds = {"normuon": NorMuon, "muon": Muon, "dion2": Dion2, "dion3": Dion3, "dion": Dion}
    groups = [{"params": hidden}, {"params": rest, "algorithm": "adamw", **adamw}]
    if args.optimizer == "lion":  # any of them takes a group of another algorithm
        groups[0] |= {"algorithm": "lion", "betas": (0.9, 0.99)}
        return Muon(groups, compile=not args.no_compile, **settings)
    settings |= {"adjust_lr_fn": args.adjust_lr_fn, "orthogonalizer": args.orthogonalizer}
    return kinds[args.optimizer](groups, momentum=0.95, compile=not args.no_compile, **settings)


def build_schedule(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """A short warm-up, a plateau, and a linear decay to zero over the last 60 %."""
    warm_up, decay = max(1, steps // 30), max(1, steps * 6 // 10)
    return LambdaLR(optimizer, lambda step: min((step + 1) / warm_up, 1, (steps - step) / decay))


# ── Checkpoints ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class History:
    """What the plot shows: pairs of a step and a loss in nats per byte.

    `seconds` are pairs of a step and this rank's processor time in all training steps so far.
    """

    training: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class Trainer(Stateful):
    """All that a checkpoint holds. Batches need no state: they follow from seed and step."""

    model: TinyGPT
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    step: int = 0
    history: History = field(default_factory=History)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "history": json.dumps(asdict(self.history)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]
        self.history = History(**json.loads(state["history"]))


def save(trainer: Trainer, out: Path) -> None:
    dcp.save({"trainer": trainer}, checkpoint_id=out / f"checkpoint-{trainer.step:06d}")


def resume(trainer: Trainer, out: Path) -> None:
    """Load the newest complete checkpoint: its metadata is what ``dcp.save`` writes last."""
    complete = sorted(metadata.parent for metadata in out.glob("checkpoint-*/.metadata"))
    if not complete:
        raise FileNotFoundError(f"--resume: there is no checkpoint in {out}")
    dcp.load({"trainer": trainer}, checkpoint_id=complete[-1])


class Interrupt:
    """Ctrl-C and SIGTERM ask for an orderly stop: the step ends and a checkpoint is written."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, *_: object) -> None:
        self.asked = True


# ── Losses ───────────────────────────────────────────────────────────────────────────────────────


def own_rows(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's share of a batch that every rank knows."""
    return batch.tensor_split(mesh.size())[mesh.get_local_rank()].to(mesh.device_type)


def loss_on(model: TinyGPT, windows_BT: Tensor) -> Tensor:
    """Mean nats per byte of predicting each byte of the windows after the first."""
    logits_BTV = model(windows_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), windows_BT[:, 1:].flatten())


def average(values: list[float], mesh: DeviceMesh) -> list[float]:
    """Mean over the ranks, the same on each of them, so that all decide alike."""
    total = torch.tensor(values, device=mesh.device_type)
    dist.all_reduce(total)
    return (total / mesh.size()).tolist()


@torch.no_grad()
def validate(model: TinyGPT, windows: Tensor, batch: int, mesh: DeviceMesh) -> float:
    """Mean nats per byte over the held-out text, less the windows that fill no batch."""
    batches = windows[: len(windows) // batch * batch].split(batch)
    losses = [loss_on(model, own_rows(rows, mesh)).item() for rows in batches]
    return average([sum(losses) / len(losses)], mesh)[0]


@torch.no_grad()
def sample(model: TinyGPT, prompt: str, *, length: int, time: int, mesh: DeviceMesh) -> str:
    """Continue the prompt. All ranks take part in each forward; rank 0's draw counts."""
    text = english.as_bytes(prompt).long().to(mesh.device_type)
    for _ in range(length):
        probability = model(text[None, -time:])[0, -1].div(0.6).softmax(-1)
        drawn = torch.multinomial(probability, 1)
        dist.broadcast(drawn, src=0)
        text = torch.cat([text, drawn])
    return english.as_text(text)


# ── The loop ─────────────────────────────────────────────────────────────────────────────────────


def train(trainer: Trainer, args: argparse.Namespace, mesh: DeviceMesh, bar: report.Bar) -> None:
    """Step, look, validate and save, until the last step, Ctrl-C or the end of the time budget."""
    text, held_out = english.load()
    windows = english.windows(held_out, time=args.time)
    interrupt, deadline = Interrupt(), time.monotonic() + args.time_budget
    stop, spent = 0.0, trainer.history.seconds[-1][1] if trainer.history.seconds else 0.0
    while trainer.step < args.steps and not stop:
        seed = args.seed << 32 | trainer.step
        batch = english.random_windows(text, size=args.batch, time=args.time, seed=seed)
        began = time.process_time()
        loss = train_step(trainer, own_rows(batch, mesh))
        spent += time.process_time() - began

        last = trainer.step == args.steps
        if last or trainer.step % args.log_every == 0:
            late = time.monotonic() > deadline
            mean, stop = average([loss.item(), float(interrupt.asked or late)], mesh)
            trainer.history.training.append((trainer.step, mean))
            bar.training(trainer.step, mean)
        if last or trainer.step % args.validate_every == 0:
            mean = validate(trainer.model, windows, args.batch, mesh)
            trainer.history.validation.append((trainer.step, mean))
            trainer.history.seconds.append((trainer.step, spent))
            bar.validation(trainer.step, mean)
        if last or stop or trainer.step % args.save_every == 0:
            save(trainer, args.out)
            bar.restart(trainer.step)


def train_step(trainer: Trainer, windows: Tensor) -> Tensor:
    loss = loss_on(trainer.model, windows)
    loss.backward()
    trainer.optimizer.step()
    trainer.schedule.step()
    trainer.optimizer.zero_grad()
    trainer.step += 1
    return loss.detach()


def main() -> None:
    args = parse_arguments()
    mesh = start_ranks()
    first = mesh.get_local_rank() == 0
    model = build_model(args, mesh)
    optimizer = build_optimizer(args, model)
    trainer = Trainer(model, optimizer, build_schedule(optimizer, args.steps))
    if args.resume:
        resume(trainer, args.out)
    if first and getattr(optimizer, "plan", None) is not None:
        print(optimizer.plan.describe(), flush=True)

    entropy = english.unigram_entropy(english.load()[1])
    tokens = args.batch * args.time
    bar = report.Bar(
        steps=args.steps, step=trainer.step, tokens=tokens, entropy=entropy, show=first
    )
    train(trainer, args, mesh, bar)
    bar.close()
    line = sample(model, PROMPT, length=args.sample, time=args.time, mesh=mesh)
    if first:
        print("sample: " + repr(line))
        curves = asdict(trainer.history)
        report.write(args.out, settings=vars(args), entropy=entropy, curves=curves)
        print(f"wrote {args.out / 'loss.png'} and {args.out / 'curve.json'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
