"""Which parameter gets which algorithm, on models with the names that people's models have."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import by_fully_shard  # noqa: F401 - the pool's workers import this module
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ortho_func
from ortho_func import ParamGroups, Rule, param_groups

D, HEADS, KEYS, WIDTH = 32, 4, 2, 8


def linear(out: int, into: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(into, out, bias=bias)


class Tree(nn.Module):
    """Modules by name, as a model has them."""

    def __init__(self, **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            if isinstance(child, list):
                child = nn.ModuleList(child)
            setattr(self, name, child)


class Conv1D(nn.Module):
    """GPT-2's projection: stored as (in, out)."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(into, out)), nn.Parameter(torch.ones(out))


class Experts(nn.Module):
    """A mixture's stacks, without modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(6, 2 * D, D))
        self.down_proj = nn.Parameter(torch.ones(6, D, D))


def attention(**more: Any) -> Tree:
    return Tree(
        q_proj=linear(HEADS * WIDTH, D), k_proj=linear(KEYS * WIDTH, D),
        v_proj=linear(KEYS * WIDTH, D), o_proj=linear(D, HEADS * WIDTH), **more,
    )  # fmt: skip


def config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=KEYS, head_dim=WIDTH, **more
    )


def llama() -> nn.Module:
    block = Tree(
        self_attn=attention(),
        mlp=Tree(gate_proj=linear(64, D), up_proj=linear(64, D), down_proj=linear(D, 64)),
        input_layernorm=nn.RMSNorm(D),
        post_attention_layernorm=nn.RMSNorm(D),
    )
    inner = Tree(embed_tokens=nn.Embedding(50, D), layers=[block], norm=nn.RMSNorm(D))
    model = Tree(model=inner, lm_head=linear(50, D))
    model.config = config()
    return model


def qwen_moe() -> nn.Module:
    block = Tree(
        self_attn=attention(q_norm=nn.RMSNorm(WIDTH)),
        mlp=Tree(gate=linear(6, D), experts=Experts(), shared_expert_gate=linear(1, D)),
    )
    model = Tree(
        model=Tree(embed_tokens=nn.Embedding(50, D), layers=[block]), lm_head=linear(50, D)
    )
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config = config()
    return model


def gpt2() -> nn.Module:
    block = Tree(
        ln_1=nn.LayerNorm(D),
        attn=Tree(c_attn=Conv1D(3 * D, D), c_proj=Conv1D(D, D)),
        mlp=Tree(c_fc=Conv1D(4 * D, D), c_proj=Conv1D(D, 4 * D)),
    )
    inner = Tree(wte=nn.Embedding(50, D), wpe=nn.Embedding(16, D), h=[block], ln_f=nn.LayerNorm(D))
    model = Tree(transformer=inner, lm_head=linear(50, D))
    model.lm_head.weight = inner.wte.weight
    model.config = SimpleNamespace(n_embd=D, n_head=HEADS)
    return model


def vit() -> nn.Module:
    block = Tree(attn=Tree(qkv=linear(3 * D, D, True), proj=linear(D, D)), norm1=nn.LayerNorm(D))
    model = Tree(patch_embed=Tree(proj=nn.Conv2d(3, D, 4)), blocks=[block], head=linear(10, D))
    model.cls_token = nn.Parameter(torch.ones(1, 1, D))
    model.pos_embed = nn.Parameter(torch.ones(1, 17, D))
    return model


def resnet() -> nn.Module:
    block = Tree(
        conv1=nn.Conv2d(8, 8, 3), bn1=nn.BatchNorm2d(8),
        conv2=nn.Conv2d(8, 8, 3, groups=8), downsample=nn.Sequential(nn.Conv2d(8, 8, 1)),
    )  # fmt: skip
    return Tree(conv1=nn.Conv2d(3, 8, 7), layer1=nn.Sequential(block), fc=linear(10, 8, True))


def rules(groups: ParamGroups) -> dict[str, str]:
    return {choice.name: choice.rule for choice in groups.choices}


def options(groups: ParamGroups, name: str) -> Any:
    (found,) = [choice.options for choice in groups.choices if choice.name == name]
    return found


def test_llama() -> None:
    groups = param_groups(llama())
    found = rules(groups)
    assert found["model.embed_tokens.weight"] == "embedding"
    assert found["lm_head.weight"] == "output head"
    assert found["model.layers.0.input_layernorm.weight"] == "norm"
    block = [n for n in found if ".layers." in n and "norm" not in n]
    assert len(block) == 7
    assert all(found[name] == "matrix" for name in block)
    assert {group["algorithm"] for group in groups} == {"normuon", "adamw"}


def test_llama_by_head() -> None:
    groups = param_groups(llama(), by_head=True, algorithm="muon")
    prefix = "model.layers.0.self_attn."
    assert options(groups, prefix + "q_proj.weight")["num_heads"] == HEADS
    assert options(groups, prefix + "k_proj.weight")["num_heads"] == KEYS
    assert "num_heads" not in options(groups, prefix + "o_proj.weight")


def test_qwen_moe_and_a_tied_head() -> None:
    groups = param_groups(qwen_moe())
    found = rules(groups)
    mlp = "model.layers.0.mlp."
    assert found[mlp + "gate.weight"] == "router"
    assert found[mlp + "shared_expert_gate.weight"] in ("router", "gate of one row or column")
    assert options(groups, mlp + "experts.down_proj")["flatten"] is False
    assert "lm_head.weight" not in found
    (tied,) = [c for c in groups.choices if c.name == "model.embed_tokens.weight"]
    assert tied.rule == "embedding"
    assert "tied to lm_head.weight" in tied.note
    assert [c.matrices for c in groups.choices if c.name.endswith("experts.gate_up_proj")] == [
        f"6 x {2 * D} x {D}"
    ]


def test_gpt2_is_stored_the_other_way() -> None:
    groups = param_groups(gpt2())
    (fused,) = [c for c in groups.choices if c.name.endswith("c_attn.weight")]
    assert fused.options is not None
    assert "split_sizes" not in fused.options
    assert "(in, out)" in fused.note
    assert rules(groups)["transformer.wpe.weight"] == "embedding"


def test_vit() -> None:
    groups = param_groups(vit())
    found = rules(groups)
    assert options(groups, "blocks.0.attn.qkv.weight")["split_sizes"] == (D, D, D)
    assert found["blocks.0.attn.qkv.bias"] == "vector"
    assert found["cls_token"] == found["pos_embed"] == "positional table or token" or (
        found["pos_embed"] == "embedding"
    )
    assert options(groups, "cls_token")["algorithm"] == "adamw"
    assert options(groups, "pos_embed")["algorithm"] == "adamw"
    assert found["patch_embed.proj.weight"] == "embedding"
    assert found["head.weight"] == "output head"


def test_resnet() -> None:
    groups = param_groups(resnet())
    found = rules(groups)
    assert options(groups, "layer1.0.conv1.weight")["flatten"] is True
    assert found["layer1.0.conv2.weight"] == "depthwise convolution"
    assert found["layer1.0.bn1.weight"] == "norm"
    assert found["fc.weight"] == "output head"
    assert [c.matrices for c in groups.choices if c.name == "layer1.0.conv1.weight"] == [
        "1 x 8 x 72"
    ]


def test_grouped_queries_are_split_as_the_config_says() -> None:
    rows = (HEADS + 2 * KEYS) * WIDTH
    model = Tree(layers=[Tree(qkv_proj=linear(rows, D), query_key_value=linear(rows, D))])
    groups = param_groups(model, config=config())
    sizes = (HEADS * WIDTH, KEYS * WIDTH, KEYS * WIDTH)
    assert options(groups, "layers.0.qkv_proj.weight")["split_sizes"] == sizes
    assert "split_sizes" not in options(groups, "layers.0.query_key_value.weight")
    unknown = param_groups(model, config=SimpleNamespace())
    assert "split_sizes" not in options(unknown, "layers.0.qkv_proj.weight")
    attention = nn.ModuleDict({"a": nn.MultiheadAttention(D, HEADS)})
    assert options(param_groups(attention), "a.in_proj_weight")["split_sizes"] == (D, D, D)


def test_first_match_wins_and_rules_may_be_of_three_kinds() -> None:
    mine = [
        Rule("frozen head", "lm_head.*", None, "on purpose"),
        Rule("slow", nn.Embedding, {"algorithm": "lion", "lr": 1e-4}),
        Rule("down", lambda one: one.owner == "down_proj", {"algorithm": "dion", "lr": 0.01}),
        Rule("never", "*.down_proj.*", {"algorithm": "muon"}),
    ]
    groups = param_groups(llama(), rules=mine)
    found = rules(groups)
    assert found["lm_head.weight"] == "frozen head"
    assert options(groups, "lm_head.weight") is None
    assert options(groups, "model.embed_tokens.weight")["algorithm"] == "lion"
    assert found["model.layers.0.mlp.down_proj.weight"] == "down"
    assert "never" not in found.values()
    names = {name for group in groups for name, _ in group["params"]}
    assert "lm_head.weight" not in names
    assert len(names) == len(found) - 1


def test_what_is_frozen_is_said() -> None:
    model = llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    groups = param_groups(model)
    assert rules(groups)["model.embed_tokens.weight"] == "frozen"
    out = io.StringIO()
    groups.explain(out)
    assert "frozen" in out.getvalue()
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + len(groups.choices)
    for line, choice in zip(lines[1:], groups.choices, strict=True):
        assert line.startswith(choice.name + " ")
        assert choice.rule in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_table() -> None:
    pytest.importorskip("rich")
    out = Terminal()
    param_groups(resnet()).explain(out)
    assert "┃" in out.getvalue()


def test_wrappers_change_no_name() -> None:
    plain = {choice.name for choice in param_groups(llama()).choices}
    compiled = param_groups(torch.compile(llama()))
    assert {choice.name for choice in compiled.choices} == plain
    model = llama()
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert {choice.name for choice in param_groups(model).choices} == plain
    by_head = param_groups(torch.compile(llama()), by_head=True)  # the config is found inside
    assert any("num_heads" in group for group in by_head)


def test_the_meta_device() -> None:
    with torch.device("meta"):
        groups = param_groups(llama())
    assert rules(groups) == rules(param_groups(llama()))


@pytest.mark.parametrize("make", [llama, qwen_moe, gpt2, vit, resnet])
def test_the_groups_train(make: Any) -> None:
    model = make()
    groups = param_groups(model, algorithm="muon", lr=0.02, momentum=0.9)
    optimizer = ortho_func.Muon(groups)
    named = {name for group in optimizer.param_groups for name in group["param_names"]}
    assert named == {choice.name for choice in groups.choices}
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def sharded(rank: int, world: int) -> tuple[dict[str, str], bool]:
    model = llama()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = param_groups(model)
    optimizer = ortho_func.NorMuon(groups)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    finite = all(bool(torch.isfinite(_local(p)).all()) for p in model.parameters())
    return rules(groups), finite


def _local(p: Tensor) -> Tensor:
    return p.to_local()  # type: ignore[attr-defined]


def test_after_fully_shard(pool: Any) -> None:
    for found, finite in pool.run(sharded, world=2):
        assert found == rules(param_groups(llama()))
        assert finite


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"algorithm": "adamw"}, ValueError, "algorithm must be one of"),
        ({"other": "muon"}, ValueError, "algorithm must be one of"),
        ({"rules": [Rule("x", "*", {"algorithm": "sgd"})]}, ValueError, "rule 'x'"),
        (
            {"rules": [Rule("x", "*q_proj*", {"algorithm": "muon", "num_heads": 5})]},
            ValueError, "num_heads=5",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        param_groups(llama(), **arguments)


def test_a_model_is_asked_for() -> None:
    with pytest.raises(TypeError, match="takes a module"):
        param_groups(list(llama().parameters()))  # type: ignore[arg-type]
