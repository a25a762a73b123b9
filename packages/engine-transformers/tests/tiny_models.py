"""Tiny decoders with random weights, one for each feature of attention that models ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    StableLmConfig,
)

VOCAB = 97
MAX_LEN = 128
WINDOW = 5

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    # Weights large enough for attention to decide which token comes next.
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OWN_NAMES = {"vocab_size": VOCAB, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}

CONFIGS: dict[str, PreTrainedConfig] = {
    # grouped queries
    "llama": LlamaConfig(**_SIZES),
    # soft cap, a window in every other layer, a scale of its own, heads wider than hidden / heads
    "gemma2": Gemma2Config(
        **_SIZES, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=2.0,
        final_logit_softcapping=None, query_pre_attn_scalar=20,
    ),
    # a window in every layer
    "mistral": MistralConfig(**_SIZES, sliding_window=WINDOW),
    # normalised queries and keys
    "qwen3": Qwen3Config(**_SIZES, head_dim=16),
    # sinks, a window in every other layer, experts
    "gpt_oss": GptOssConfig(
        **_SIZES, head_dim=8, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    # learned positions, queries scaled by the model
    "opt": OPTConfig(
        **_OWN_NAMES, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=MAX_LEN, word_embed_proj_dim=32, init_std=0.3,
    ),
    # learned positions, queries, keys and values as slices of one tensor
    "gpt2": GPT2Config(
        **_OWN_NAMES, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_LEN, initializer_range=0.3
    ),
    # layers that reuse the keys and values of others, heads of two sizes
    "gemma4": Gemma4TextConfig(
        **{**_SIZES, "num_hidden_layers": 4}, head_dim=8, global_head_dim=16,
        sliding_window=WINDOW, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
    ),
    # layers that do not pass keywords on
    "stablelm": StableLmConfig(**_SIZES),
    # value heads of another size than key heads
    "deepseek_v3": DeepseekV3Config(
        **{**_SIZES, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, n_routed_experts=4, n_group=1,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
    ),
}  # fmt: skip

OPT_USES_THE_MASK_INTERFACE = Version("5.24")
"""OPT was refused, with its reason, under 5.0 and 5.17, and runs under this one."""


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Return the model in float32 and evaluation mode, with transformers' own eager attention."""
    if name == "opt" and Version(transformers.__version__) < OPT_USES_THE_MASK_INTERFACE:
        pytest.skip("this transformers builds OPT's mask itself, so the engine refuses OPT")
    return make_from(CONFIGS[name], seed)


def make_from(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter.data, mean=1.0)  # made without values
    return model.eval()


def make_prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def eager_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return the logits of one sequence alone, ``[num_tokens, vocabulary]``."""
    assert model.config._attn_implementation == "eager"
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def eager_greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(int(eager_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
