from __future__ import annotations

import re

import pytest
import torch

from attnmux.abc.attention_type import AttentionType
from attnmux.kv_cache import KVCacheLayout
from attnmux.platform import DeviceCapability
from attnmux.request import FLAGS, AttentionRequest


def request(**changes: object) -> AttentionRequest:
    return AttentionRequest(**{"head_size": 64, "dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head_size": 0}, "head_size: got 0"),
        ({"head_size": 64.0}, "head_size: got 64.0"),
        ({"dtype": "bfloat16"}, "dtype: got 'bfloat16'; allowed: a floating-point torch.dtype"),
        ({"dtype": torch.int32}, "dtype: got torch.int32"),
        ({"kv_cache_dtype": torch.int8}, "kv_cache_dtype: got torch.int8; allowed: the name"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"block_size": -16}, "block_size: got -16"),
        ({"head_size_v": 0}, "head_size_v: got 0"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads: got 3; allowed: a multiple of num_kv"),
        ({"num_heads": 33, "num_kv_heads": 2}, "num_heads: got 33"),
        ({"num_heads": 0}, "num_heads: got 0"),
        ({"attn_type": "decode"}, "attn_type: got 'decode'; allowed: decoder | encoder"),
        ({"has_sliding_window": 128}, "has_sliding_window: got 128; allowed: True or False"),
        ({"has_sink": None}, "has_sink: got None; allowed: True or False"),
        ({"device": "gpu zero"}, "device: got 'gpu zero'; allowed: a device such as 'cpu'"),
        ({"device": 3}, "device: got 3"),
        ({"device_capability": 9}, "device_capability: got 9; allowed: (major, minor)"),
        ({"device_capability": (9, -1)}, "device_capability: got (9, -1)"),
        ({"kv_cache_layout": "NHD"}, "kv_cache_layout: got 'NHD'; allowed: LBHNC"),
        ({"use_mla": True, "attn_type": "encoder"}, "attn_type: got 'encoder'; allowed: 'decoder'"),
    ],
)
def test_each_bad_field_is_named_with_what_is_allowed(changes: dict, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        request(**changes)


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("device", torch.device("cuda", 1), "cuda:1"),
        ("device", "cpu", "cpu"),
        ("device", "madeup:0", "madeup:0"),  # a plugin may know it
        ("attn_type", AttentionType.ENCODER_ONLY, "encoder_only"),
        ("device_capability", (9, 0), DeviceCapability(9, 0)),
        ("kv_cache_layout", "LBNHC", KVCacheLayout.LBNHC),
    ],
)
def test_fields_are_brought_to_one_form(field: str, given: object, kept: object) -> None:
    assert getattr(request(**{field: given}), field) == kept


def test_equal_requests_are_one_key() -> None:
    assert hash(request(device="cpu")) == hash(request(device=torch.device("cpu")))
    assert request(has_sink=True) != request()


def test_the_square_root_form_is_alibi_too() -> None:
    assert request(use_alibi_sqrt=True).use_alibi


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_is_shown_when_it_is_asked(flag: str) -> None:
    assert FLAGS[flag] in str(request(**{flag: True}))
    assert flag in request(**{flag: True}).asked_features()
    assert request(**{flag: True}).to_dict()[flag] is True


def test_the_line_shows_sizes_and_places() -> None:
    line = str(request(num_heads=8, num_kv_heads=2, block_size=16, kv_cache_layout="LBNHC"))
    assert line == (
        "head_size 64, 8 query heads, 2 KV heads, bfloat16, cache auto, block size 16, "
        "layout LBNHC, device cpu"
    )
