"""What layers ask for is found by watching them, and what cannot be honoured is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import MAX_LEN, VOCAB, WINDOW, make_from
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from attnmux_transformers import Engine, UnsupportedModelError, probe_model
from attnmux_transformers.attention import attention_forward
from attnmux_transformers.model_limits import longest_request

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "head_dim": 8,
}  # fmt: skip


def test_each_feature_of_the_configuration_arrives(model: Callable[[str], PreTrainedModel]) -> None:
    first, second = probe_model(model("gemma2"))
    assert first.name == "model.layers.0.self_attn"
    assert (first.num_heads, first.num_kv_heads) == (4, 2)
    assert (first.head_size, first.head_size_v) == (16, 16)
    assert (first.sliding_window, second.sliding_window) == (WINDOW, None)
    assert first.logits_soft_cap == second.logits_soft_cap == 2.0
    assert first.scale == 20**-0.5
    assert first.sinks is None


def test_sinks_arrive_with_their_values(model: Callable[[str], PreTrainedModel]) -> None:
    gpt_oss = model("gpt_oss")
    for features, layer in zip(probe_model(gpt_oss), gpt_oss.model.layers, strict=True):
        assert features.sinks is not None
        assert features.sinks.dtype == torch.float32
        assert torch.equal(features.sinks, layer.self_attn.sinks)


@pytest.mark.parametrize(
    ("name", "sizes", "scale", "window"),
    [
        ("mistral", (4, 2, 8, 8), 8**-0.5, WINDOW),
        ("qwen3", (4, 2, 16, 16), 16**-0.5, None),
        ("opt", (4, 4, 8, 8), 1.0, None),  # its queries come scaled
        ("gpt2", (4, 4, 8, 8), 8**-0.5, None),
        ("deepseek_v3", (4, 4, 16, 12), 16**-0.5, None),
    ],
)
def test_head_counts_sizes_scales_and_windows(
    name: str,
    sizes: tuple[int, int, int, int],
    scale: float,
    window: int | None,
    model: Callable[[str], PreTrainedModel],
) -> None:
    layers = probe_model(model(name))
    assert len(layers) == 2
    for each in layers:
        assert (each.num_heads, each.num_kv_heads, each.head_size, each.head_size_v) == sizes
        assert each.scale == pytest.approx(scale)
        assert each.sliding_window == window


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4),
         "whose attention is written into the model"),
        (Llama4TextConfig(**SIZES, attention_chunk_size=8, num_local_experts=2),
         "neither causal nor bidirectional"),
        (LlamaConfig(**SIZES, is_causal=False), "its mask is both ways, where causal is needed"),
    ],
)  # fmt: skip
def test_models_that_cannot_run_are_refused_with_the_reason(
    config: PreTrainedConfig, reason: str
) -> None:
    model = make_from(config)
    with pytest.raises(UnsupportedModelError, match=reason):
        Engine(model)  # the reason comes before advice about a length that it lacks
    assert model.config._attn_implementation == "eager", "the model is left as it was"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1),
         "no layer asked transformers' attention interface"),
        (Qwen3NextConfig(**SIZES, num_experts=2, num_experts_per_tok=1,
                         linear_num_key_heads=2, linear_num_value_heads=2,
                         linear_key_head_dim=8, linear_value_head_dim=8),
         "1 of 4 layers asked transformers' attention interface"),
    ],
)  # fmt: skip
def test_layers_with_another_state_are_refused(config: PreTrainedConfig, reason: str) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=reason):
        probe_model(model)


def test_a_keyword_that_is_not_known_is_refused_and_not_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_from(LlamaConfig(**SIZES))
    attention = model.model.layers[2].self_attn
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *a, **k: forward(*a, position_bias=1.0, **k))
    with pytest.raises(UnsupportedModelError, match=r"layers\.2\.self_attn: passes position_bias"):
        probe_model(model)


def test_a_model_in_training_mode_is_refused(model: Callable[[str], PreTrainedModel]) -> None:
    trained = make_from(LlamaConfig(**SIZES)).train()
    with pytest.raises(ValueError, match=r"model\.training: got True; allowed: False"):
        probe_model(trained)


def test_no_backend_for_a_layer_gives_the_report(
    naive: str, model: Callable[[str], PreTrainedModel]
) -> None:
    double = make_from(LlamaConfig(**SIZES)).to(torch.float64)
    with pytest.raises(
        UnsupportedModelError, match=r"4 layers: model\.layers\.0\.self_attn … "
    ) as got:
        Engine(double, backend=naive)
    assert "dtype not supported" in str(got.value)
    assert naive in str(got.value)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4,
          "original_max_position_embeddings": 32}, 32),
        ({"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
          "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 64),
    ],
)  # fmt: skip
def test_positions_that_depend_on_the_batch_are_refused(rope: dict[str, Any], limit: int) -> None:
    model = make_from(LlamaConfig(**SIZES, rope_parameters=rope))
    longest_request(model, limit)
    refused = f"max_model_len: got {limit + 1}; allowed: at most {limit}"
    with pytest.raises(ValueError, match=refused):
        longest_request(model, limit + 1)


def test_a_call_outside_of_the_engine_says_what_is_missing() -> None:
    model = make_from(LlamaConfig(**SIZES))
    Engine(model)  # registers the implementation
    model.set_attn_implementation("attnmux")
    with pytest.raises(ValueError, match="attnmux_step: got no step in the model's call"):
        model(input_ids=torch.tensor([[3, 4]]))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"query": torch.zeros(2, 4, 3, 8)}, r"query.shape\[0\]: got 2; allowed: 1"),
        ({"dropout": 0.1}, "dropout: got 0.1; allowed: 0"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention_mask: got a tensor of shape"),
    ],
)
def test_calls_that_would_lose_something_are_refused(change: dict[str, Any], text: str) -> None:
    tensor = torch.zeros(1, 4, 3, 8)
    call = {"module": torch.nn.Identity(), "query": tensor, "key": tensor, "value": tensor,
            "attention_mask": None, "attnmux_step": object()}  # fmt: skip
    with pytest.raises(ValueError, match=text):
        attention_forward(**{**call, **change})
