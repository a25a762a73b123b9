"""Specs of one layer's cache, and names of cache dtypes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from attnmux.kv_cache import (
    AttentionSpec,
    CacheDTypeHandler,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    cache_dtype_handler,
    dtypes,
    get_kv_quant_mode,
    register_cache_dtype,
    registered_cache_dtypes,
)


def spec_of(name: str = "auto", **sizes: Any) -> FullAttentionSpec:
    defaults = {"block_size": 4, "num_kv_heads": 3, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec.for_layer(kv_cache_dtype=name, **defaults | sizes)


# Specs.

SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}

# Bytes of one block of 16 tokens and 2 heads of 64 (a latent row: 576).
PAGES: dict[str, tuple[AttentionSpec, int]] = {
    "two bytes": (spec_of("auto", **SIZES), 16 * 2 * 128 * 2),
    "four bytes": (spec_of("float32", **SIZES), 16 * 2 * 128 * 4),
    "one byte": (spec_of("fp8", **SIZES), 16 * 2 * 128),
    "int8 with scales": (spec_of("int8_per_token_head", **SIZES), 16 * 2 * 144),
    "fp8 with scales": (spec_of("fp8_per_token_head", **SIZES), 16 * 2 * 144),
    "int4 with scales": (spec_of("int4_per_token_head", **SIZES), 16 * 2 * 80),
    "values of another size": (spec_of("auto", **SIZES, head_size_v=32), 16 * 2 * 96 * 2),
    "padded": (spec_of("auto", **SIZES, page_size_padded=10_000), 10_000),
    "window": (SlidingWindowSpec(**SIZES, sliding_window=128), 16 * 2 * 128 * 2),
    "chunks": (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=128), 16 * 2 * 128 * 2),
    "cross": (CrossAttentionSpec(**SIZES), 16 * 2 * 128 * 2),
    "encoder": (EncoderOnlyAttentionSpec(**SIZES), 0),
    "latent": (MLAAttentionSpec(block_size=16, head_size=576, dtype=torch.bfloat16), 16 * 576 * 2),
    "latent, fixed form": (
        MLAAttentionSpec.for_layer(
            block_size=16,
            num_kv_heads=1,
            head_size=576,
            dtype=torch.bfloat16,
            kv_cache_dtype="fp8_ds_mla",
        ),
        16 * 656,
    ),
}


@pytest.mark.parametrize("case", PAGES)
def test_bytes_of_a_page(case: str) -> None:
    spec, expected = PAGES[case]
    assert spec.page_size_bytes == expected


@pytest.mark.parametrize("case", [c for c in PAGES if c not in ("encoder", "padded")])
@pytest.mark.parametrize("block_size", [1, 32])
def test_a_page_grows_with_its_block(case: str, block_size: int) -> None:
    spec, expected = PAGES[case]
    assert spec.copy_with_new_block_size(block_size).page_size_bytes == expected // 16 * block_size


def test_padding_grows_with_its_block() -> None:
    larger = PAGES["padded"][0].copy_with_new_block_size(32)
    assert (larger.block_size, larger.page_size_padded) == (32, 20_000)


@pytest.mark.parametrize("model_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "dtype", "mode"),
    [
        ("auto", None, KVQuantMode.NONE),
        ("float32", torch.float32, KVQuantMode.NONE),
        ("float16", torch.float16, KVQuantMode.NONE),
        ("bfloat16", torch.bfloat16, KVQuantMode.NONE),
        ("fp8", torch.float8_e4m3fn, KVQuantMode.FP8_PER_TENSOR),
        ("fp8_e4m3", torch.float8_e4m3fn, KVQuantMode.FP8_PER_TENSOR),
        ("fp8_e5m2", torch.float8_e5m2, KVQuantMode.FP8_PER_TENSOR),
        ("int8_per_token_head", torch.int8, KVQuantMode.INT8_PER_TOKEN_HEAD),
        ("fp8_per_token_head", torch.float8_e4m3fn, KVQuantMode.FP8_PER_TOKEN_HEAD),
    ],
)
def test_a_layers_spec_takes_storage_and_mode_from_the_cache_dtype(
    name: str, dtype: torch.dtype | None, mode: KVQuantMode, model_dtype: torch.dtype
) -> None:
    spec = spec_of(name, dtype=model_dtype)
    assert spec.dtype == (dtype or model_dtype)
    assert spec.kv_quant_mode is mode is get_kv_quant_mode(name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spec_of(block_size=0), "block_size: got 0"),
        (lambda: spec_of(num_kv_heads=0), "num_kv_heads: got 0"),
        (lambda: spec_of(head_size=-8), "head_size: got -8"),
        (lambda: spec_of(head_size_v=0), "head_size_v: got 0"),
        (lambda: spec_of(page_size_padded=383), "page_size_padded: got 383; .* least 384"),
        (lambda: spec_of(sliding_window=0), "sliding_window: got 0"),
        (lambda: spec_of(sliding_window=4, attention_chunk_size=4), "attention_chunk_size: got 4"),
        (lambda: SlidingWindowSpec(**SIZES, sliding_window=0), "sliding_window: got 0"),
        (
            lambda: ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=0),
            "attention_chunk_size: got 0",
        ),
        (lambda: spec_of(attention_chunk_size=0), "attention_chunk_size: got 0"),
        (lambda: spec_of("fp8_ds_mla"), "kv_cache_dtype: got 'fp8_ds_mla'"),
        (lambda: FullAttentionSpec(**SIZES | {"dtype": "float32"}), "dtype: got 'float32'"),
        (lambda: spec_of("fp8_e4m4"), r"kv_cache_dtype: got 'fp8_e4m4' \(did you mean 'fp8_e4m3'"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_equal_specs_are_one() -> None:
    assert FullAttentionSpec.merge([spec_of(), spec_of()]) == spec_of()
    for specs in ([], [spec_of(), spec_of(block_size=8)]):
        with pytest.raises(ValueError, match="specs: got"):
            FullAttentionSpec.merge(specs)


def test_a_spec_that_is_only_a_block_size_knows_no_page() -> None:
    spec = KVCacheSpec(16)
    assert spec.copy_with_new_block_size(8) == KVCacheSpec(8)
    with pytest.raises(NotImplementedError):
        _ = spec.page_size_bytes


# Names of cache dtypes.


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "_handlers", dict(dtypes._handlers))


@pytest.mark.usefixtures("own_names")
def test_a_new_name_serves_specs_and_modes() -> None:
    handler = CacheDTypeHandler("two_in_one", torch.uint8, KVQuantMode.NONE, values_per_element=2)
    register_cache_dtype(handler)
    register_cache_dtype(CacheDTypeHandler("two_in_one", torch.uint8, values_per_element=2))
    assert cache_dtype_handler("two_in_one") is handler
    assert "two_in_one" in registered_cache_dtypes()
    assert spec_of("two_in_one", head_size=9, head_size_v=8).content_size == 9


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("name", ["auto", "fp8", "int8_per_token_head"])
def test_a_name_that_is_taken_stays_as_it_is(name: str) -> None:
    before = cache_dtype_handler(name)
    with pytest.raises(ValueError, match="handler: got"):
        register_cache_dtype(CacheDTypeHandler(name, torch.int16))
    assert cache_dtype_handler(name) is before


def test_names_of_quantised_modes() -> None:
    per_token_head = {mode for mode in KVQuantMode if mode.is_per_token_head}
    assert {mode.name for mode in per_token_head} == {
        "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD",
    }  # fmt: skip
    assert [mode for mode in KVQuantMode if mode.is_nvfp4] == [KVQuantMode.NVFP4]
    assert [mode.value for mode in KVQuantMode] == list(range(6))
    assert get_kv_quant_mode("nvfp4") is KVQuantMode.NVFP4
    assert get_kv_quant_mode("a name of another engine") is KVQuantMode.NONE


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype: got 'int7'") as caught:
        cache_dtype_handler("int7")
    for name, other in itertools.pairwise(registered_cache_dtypes()):
        assert f"{name} | {other}" in str(caught.value)


def test_a_latent_layer_has_one_head_unless_said_otherwise() -> None:
    spec = MLAAttentionSpec.for_layer(block_size=16, head_size=576, dtype=torch.bfloat16)
    assert spec.layer_shape == (1, 16, 576)
