"""Which parameter gets which algorithm in models that people train, built without weights."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ortho_func import param_groups

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
         "num_attention_heads": 4}  # fmt: skip
LANGUAGE = {**SMALL, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}

# name -> (model, config, its settings, what must not be under the matrix algorithm, and options
# of what is, both as expressions over names)
MODELS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**LANGUAGE, "num_key_value_heads": 2},
              r"embed_tokens|lm_head|norm", {}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**LANGUAGE, **EXPERTS, "num_experts": 4, "num_key_value_heads": 2, "head_dim": 16},
        r"embed_tokens|lm_head|norm|mlp\.gate\.", {"experts": {"flatten": False}},
    ),
    "gpt-2": ("GPT2LMHeadModel", "GPT2Config",
              {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 100, "bos_token_id": 1,
               "eos_token_id": 2},
              r"wte|wpe|ln_|bias", {}),
    "phi-3": ("Phi3ForCausalLM", "Phi3Config", {**LANGUAGE, "num_key_value_heads": 2},
              r"embed_tokens|lm_head|norm", {"qkv_proj": {"split_sizes": (64, 32, 32)}}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", LANGUAGE,
                 r"embed_in|lm_head|norm|bias", {}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**LANGUAGE, **EXPERTS, "num_hidden_layers": 2, "first_k_dense_replace": 1,
         "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
         "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
         "v_head_dim": 16},
        r"embed_tokens|lm_head|norm|mlp\.gate\.", {r"mlp\.experts": {"flatten": False}},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", SMALL,
            r"embeddings|norm|bias|^classifier", {}),
    "bert": ("BertForMaskedLM", "BertConfig", {**SMALL, "vocab_size": 100},
             r"embeddings|Norm|bias", {}),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "vocab_size": 100,
            "d_kv": 16},
           r"shared|relative_attention_bias|norm", {}),
    "resnet": ("ResNetForImageClassification", "ResNetConfig",
               {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 64, 64], "embedding_size": 32},
               r"embedder|normalization|bias|^classifier",
               {r"encoder.*convolution": {"flatten": True}}),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig",
                 {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 32]},
                 r"embeddings|norm|bias|layer_scale|dwconv|^classifier|downsampling_layer\.0",
                 {r"downsampling_layer\.1": {"flatten": True}}),
}  # fmt: skip


def built(name: str) -> nn.Module:
    model, config, settings, _, _ = MODELS[name]
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what other packages import
        found: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_right_by_default(name: str) -> None:
    _, _, _, others, options = MODELS[name]
    model = built(name)
    groups = param_groups(model)
    chosen = {choice.name: choice for choice in groups.choices}
    assert set(chosen) == {n for n, _ in model.named_parameters()}  # nothing is dropped
    for parameter, choice in chosen.items():
        assert choice.options is not None
        matrix = choice.options["algorithm"] == "normuon"
        assert matrix != bool(re.search(others, parameter)), (parameter, choice.rule)
        for pattern, wanted in options.items():
            if re.search(pattern, parameter) and matrix:
                given = {key: choice.options.get(key) for key in wanted}
                assert given == wanted, parameter
    listed = {id(p) for group in groups for _, p in group["params"]}
    assert listed == {id(p) for p in model.parameters()}


def test_frozen_ones_are_said_and_left_out() -> None:
    model = built("llama")
    frozen = model.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad_(False)
    groups = param_groups(model)
    assert all(p is not frozen for group in groups for _, p in group["params"])
    (choice,) = [c for c in groups.choices if c.name == "model.layers.0.mlp.up_proj.weight"]
    assert choice.options is None
