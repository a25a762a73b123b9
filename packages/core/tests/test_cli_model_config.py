"""From a model's configuration to the requests of its layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attnmux.model_config import layers_text, model_needs, read_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "torch_dtype": "bfloat16",
}


def config(**changes: object) -> dict[str, object]:
    return {**LLAMA, **changes}


def kinds(**changes: object) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Name of each kind -> its layers and the features it asks for."""
    needs = model_needs(config(**changes))
    return {kind.name: (kind.layers, kind.request.asked_features()) for kind in needs.kinds}


def test_a_plain_decoder() -> None:
    (kind,) = model_needs(config(), kv_cache_dtype="fp8", block_size=32).kinds
    request = kind.request
    assert (request.head_size, request.num_heads, request.num_kv_heads) == (128, 32, 8)
    assert (request.dtype, request.kv_cache_dtype, request.block_size) == (
        torch.bfloat16,
        "fp8",
        32,
    )
    assert request.asked_features() == ()


WINDOW = ("has_sliding_window",)
CASES = {
    "window in every layer": (
        {"sliding_window": 64, "model_type": "mistral"},
        {"sliding window of 64 tokens": ((0, 1, 2, 3), WINDOW)},
    ),
    "window given and not used": (
        {"sliding_window": 64, "use_sliding_window": False},
        {"full attention": ((0, 1, 2, 3), ())},
    ),
    "window from a layer on": (
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
        {"full attention": ((0, 1, 2), ()), "sliding window of 64 tokens": ((3,), WINDOW)},
    ),
    "every other layer, with a cap": (
        {"model_type": "gemma2", "sliding_window": 64, "attn_logit_softcapping": 50.0},
        {
            "sliding window of 64 tokens": ((0, 2), (*WINDOW, "has_logits_soft_cap")),
            "full attention": ((1, 3), ("has_logits_soft_cap",)),
        },
    ),
    "one full layer in three": (
        {"sliding_window": 64, "sliding_window_pattern": 3},
        {"sliding window of 64 tokens": ((0, 1, 3), WINDOW), "full attention": ((2,), ())},
    ),
    "types given for each layer, with sinks": (
        {
            "model_type": "gpt_oss",
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {
            "sliding window of 8 tokens": ((0, 2), ("has_sink", *WINDOW)),
            "full attention": ((1, 3), ("has_sink",)),
        },
    ),
    "layers that are no attention": (
        {"layer_types": ["linear_attention", "linear_attention", "full_attention", "conv"]},
        {"full attention": ((2,), ())},
    ),
    "latent": (
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
        {"latent attention, 512 latent + 64 rope elements": ((0, 1, 2, 3), ("use_mla",))},
    ),
    "latent and sparse": (
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048},
        {
            "latent attention, 512 latent + 64 rope elements, top 2048 positions": (
                (0, 1, 2, 3),
                ("use_mla", "use_sparse"),
            )
        },
    ),
    "alibi by model": ({"model_type": "bloom"}, {"full attention": ((0, 1, 2, 3), ("use_alibi",))}),
    "alibi by field": ({"alibi": True}, {"full attention": ((0, 1, 2, 3), ("use_alibi",))}),
    "alibi switched off": (
        {"model_type": "mpt", "attn_config": {"alibi": False}},
        {"full attention": ((0, 1, 2, 3), ())},
    ),
    "shared cache": (
        {"num_kv_shared_layers": 1},
        {
            "full attention": ((0, 1, 2), ()),
            "full attention, on an earlier layer's cache": ((3,), ("use_kv_sharing",)),
        },
    ),
    "images seen both ways": (
        {"model_type": "gemma3", "vision_config": {}, "text_config": {**LLAMA}},
        {"full attention": ((0, 1, 2, 3), ("use_mm_prefix",))},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_layers(case: str) -> None:
    changes, expected = CASES[case]
    assert kinds(**changes) == expected


def test_an_encoder_has_no_cache_and_sees_both_ways() -> None:
    needs = model_needs(config(model_type="bert", torch_dtype=None))
    (kind,) = needs.kinds
    assert kind.request.attn_type == "encoder_only"
    assert kind.request.kv_cache_dtype is None
    assert kind.request.block_size is None
    assert kind.request.dtype == torch.float32
    assert "names no dtype; float32 is assumed" in needs.notes[0]


def test_an_encoder_with_local_layers() -> None:
    found = kinds(model_type="modernbert", global_attn_every_n_layers=3, local_attention=128)
    assert found == {
        "full attention, both ways": ((0, 3), ()),
        "sliding window of 128 tokens": ((1, 2), WINDOW),
    }


def test_an_encoder_with_a_decoder_asks_three_kinds() -> None:
    needs = model_needs(
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "is_encoder_decoder": True,
            "d_model": 384,
            "encoder_layers": 4,
            "decoder_layers": 2,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
        }
    )
    assert [(k.request.attn_type, len(k.layers), k.request.head_size) for k in needs.kinds] == [
        ("encoder", 4, 64),
        ("decoder", 2, 64),
        ("encoder_decoder", 2, 64),
    ]
    assert needs.kinds[0].request.kv_cache_dtype is None
    assert needs.kinds[2].request.kv_cache_dtype == "auto"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "t5"}, "model_type: got 't5'; allowed: a model whose scores"),
        ({"num_hidden_layers": None}, "num_hidden_layers: got None; allowed: an integer"),
        ({"hidden_size": None}, "hidden_size: got None; allowed: an integer"),
        ({"hidden_size": 100}, "hidden_size: got 100; allowed: a multiple of the 32 heads"),
        ({"num_key_value_heads": 5}, "num_heads: got 32; allowed: a multiple of num_kv_heads"),
        ({"torch_dtype": "bf17"}, "torch_dtype: got 'bf17'; allowed: the name of a torch dtype"),
        ({"layer_types": ["full_attention"]}, "layer_types: got 1 entries; allowed: one for each"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "sliding_window: got None; allowed: an integer of at least 1",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read_names_the_field(changes, text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        model_needs(config(**changes))


@pytest.mark.parametrize("content", ["{", "[1]", '"text"'])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config: got .*; allowed: a JSON"):
        read_model_config(tmp_path)


def test_a_folder_stands_for_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model_config(tmp_path) == LLAMA


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((), "none"),
        ((3,), "3"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 2, 4, 6, 8), "0, 2, 4, ... 8"),
        ((0, 1, 3), "0, 1, 3"),
        (tuple(i for i in range(30) if i % 3), "20 of 1-29"),
    ],
)
def test_layers_are_written_short(layers: tuple[int, ...], text: str) -> None:
    assert layers_text(layers) == text
