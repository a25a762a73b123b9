"""What is written to the cache, where, and what is read back, for every cache dtype."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnmux
from attnmux.kv_cache import FullAttentionSpec, KVCacheLayout, allocate, per_token_head_scales
from attnmux_cpu.backend import CPUAttentionBackend

MIXED = ([1, 1, 3, 12, 20], [1, 50, 40, 45, 20])

SCALES = ([0.25], [0.5])
PER_HEAD = ([0.25, 0.6], [0.5, 1.7])
QUANTISED: dict[str, dict[str, Any]] = {
    "fp8": {"cache_dtype": "fp8", "scales": SCALES},
    "fp8_e4m3": {"cache_dtype": "fp8_e4m3", "scales": PER_HEAD},
    "fp8_e5m2": {"cache_dtype": "fp8_e5m2", "scales": SCALES},
    "fp8_e5m2 per head": {"cache_dtype": "fp8_e5m2", "scales": PER_HEAD},
    "int8 per token": {"cache_dtype": "int8_per_token_head"},
    "fp8 per token": {"cache_dtype": "fp8_per_token_head"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", QUANTISED)
@pytest.mark.parametrize("lens", [([40], [40]), ([20], [45]), ([1, 4], [50, 30]), MIXED], ids=str)
def test_quantised_caches_in_every_phase(built, fields, lens, dtype):
    # Prefill without context, with context, decodes, and all together apply the same scales.
    built(*lens, dtype=dtype, **QUANTISED[fields]).check()


@pytest.mark.parametrize("fields", QUANTISED)
@pytest.mark.parametrize("feature", [{"window": 7}, {"soft_cap": 1.5, "sinks": True}], ids=str)
def test_quantised_caches_with_features(built, fields, feature):
    built(*MIXED, **QUANTISED[fields], **feature).check()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, "float32"),
        (torch.float32, "float16"),
        (torch.float32, "bfloat16"),
        (torch.bfloat16, "float16"),
        (torch.bfloat16, "float32"),
        (torch.float16, "bfloat16"),
    ],
    ids=str,
)
def test_caches_of_another_float_dtype(built, dtype, cache_dtype):
    built(*MIXED, dtype=dtype, cache_dtype=cache_dtype).check()


@pytest.mark.parametrize("sizes", [(3, 5), (40, 40), (33, 31)], ids=str)
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("cache_dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_rows_with_scales_of_odd_sizes_in_every_layout(built, sizes, layout, cache_dtype):
    built(
        *MIXED,
        head_size=sizes[0],
        head_size_v=sizes[1],
        cache_dtype=cache_dtype,
        layout=layout,
    ).check()


def _cached(
    cache_dtype: str, block_size: int = 16, num_blocks: int = 3, size: int = 4
) -> tuple[Any, torch.Tensor]:
    impl = attnmux.create_impl(
        CPUAttentionBackend,
        num_heads=2,
        head_size=size,
        scale=1.0,
        num_kv_heads=2,
        kv_cache_dtype=cache_dtype,
    )
    spec = FullAttentionSpec.for_layer(
        block_size=block_size,
        num_kv_heads=2,
        head_size=size,
        dtype=torch.float32,
        kv_cache_dtype=cache_dtype,
    )
    return impl, allocate({"layer": spec}, num_blocks, KVCacheLayout.LBNHC).views["layer"]


ONE = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    "cache_dtype", ["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
)
def test_exact_values_come_back(cache_dtype, block_size):
    impl, cache = _cached(cache_dtype, block_size)
    values = torch.tensor([1.0, 2.0, 3.5, 0.25])
    key = values.expand(1, 2, 4)
    impl.do_kv_cache_update(ONE, key, -key, cache, torch.tensor([block_size + 5]))
    assert torch.equal(cache[1, :, 5].float(), torch.cat([values, -values]).expand(2, -1))


@pytest.mark.parametrize(("cache_dtype", "largest"), [("fp8", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_saturates_and_keeps_nan_and_signed_zero(cache_dtype, largest):
    impl, cache = _cached(cache_dtype, size=6)
    values = torch.tensor([1e5, -1e5, float("nan"), 1e-9, -1e-9, float("inf")])
    key = values.expand(1, 2, 6)
    impl.do_kv_cache_update(ONE, key, key, cache, torch.tensor([0]))
    stored = cache[0, 0, 0, :6].float()
    assert stored[:2].tolist() == [largest, -largest]
    assert stored[5] == largest
    assert stored[2].isnan()
    assert stored[3:5].tolist() == [0.0, 0.0]
    assert torch.signbit(stored[3:5]).tolist() == [False, True]


def test_fp8_is_stored_divided_by_the_scale_of_its_head():
    impl, cache = _cached("fp8")
    layer = SimpleNamespace(_k_scale=torch.tensor([0.5, 2.0]), _v_scale=torch.tensor([4.0]))
    key = torch.full((1, 2, 4), 8.0)
    impl.do_kv_cache_update(layer, key, key, cache, torch.tensor([17]))
    assert cache[1, :, 1].float().tolist() == [[16.0] * 4 + [2.0] * 4, [4.0] * 4 + [2.0] * 4]


def test_int8_rows_carry_their_scales():
    impl, cache = _cached("int8_per_token_head")
    key = torch.tensor([[[127.0, -63.5, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]])
    impl.do_kv_cache_update(None, key, key * 2, cache, torch.tensor([2]))
    k_scale, v_scale = per_token_head_scales(cache, 4)
    assert k_scale[0, :, 2].tolist() == [1.0, 1.0]
    assert v_scale[0, :, 2].tolist() == [2.0, 1.0]
    assert cache[0, 0, 2, :8].tolist() == [127, -64, 0, 1, 127, -64, 0, 1]


def test_fp8_rows_carry_their_scales():
    impl, cache = _cached("fp8_per_token_head")
    key = torch.tensor([[[448.0, -224.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]])
    impl.do_kv_cache_update(None, key, key / 2, cache, torch.tensor([2]))
    k_scale, v_scale = per_token_head_scales(cache, 4)
    assert k_scale[0, :, 2].tolist() == [1.0, 1.0]
    assert v_scale[0, :, 2].tolist() == [0.5, 1.0]
    assert cache[0, 0, 2, :8].float().tolist() == [448.0, -224.0, 0.0, 1.0] * 2


def test_slots_of_minus_one_write_nowhere():
    impl, cache = _cached("auto", block_size=4)
    cache.fill_(7.0)
    key = torch.ones(4, 2, 4)
    impl.do_kv_cache_update(None, key, key, cache, torch.tensor([0, 1, -1, -1]))
    assert (cache[0, :, :2] == 1.0).all()
    assert (cache[0, :, 2:] == 7.0).all()
    assert (cache[1:] == 7.0).all()


@pytest.mark.parametrize("slots", [[3, 7, 2, 0, 9], [3, 7, 2, 0, 9, -1, -1, -1, -1, -1]], ids=str)
def test_rows_without_a_slot_are_ignored(slots):
    impl, cache = _cached("auto", block_size=4)
    cache.fill_(7.0)
    key = torch.arange(8.0).view(8, 1, 1).expand(8, 2, 4)
    impl.do_kv_cache_update(None, key, key, cache, torch.tensor(slots, dtype=torch.int32))
    stored = cache[:, 0, :, 0].flatten()
    assert stored[[3, 7, 2, 0, 9]].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert (stored == 7.0).sum() == 7


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_a_write_touches_only_its_own_layer(built, layout):
    step = built([6], [20], layout=layout)
    storage = torch.empty(0, dtype=torch.uint8).set_(step.cache.untyped_storage())
    before = storage.clone()
    step.update()
    changed = int((storage != before).view(-1, 4).any(dim=1).sum())
    assert 0 < changed <= 6 * 2 * 64


def test_a_layer_that_shares_a_cache_reads_and_never_writes(built):
    step = built(*MIXED)
    step.update()
    own, lse = step.check()
    sharing = attnmux.create_impl(
        CPUAttentionBackend,
        num_heads=4,
        head_size=32,
        scale=step.impl.scale,
        num_kv_heads=2,
        kv_sharing_target_layer_name="layers.0",
    )
    before = step.cache.clone()
    sharing.do_kv_cache_update(None, None, None, step.cache, step.batch.slot_mapping)
    sharing.do_kv_cache_update(None, step.key, step.value, step.cache, step.batch.slot_mapping)
    assert torch.equal(step.cache.view(torch.int32), before.view(torch.int32))
    step.impl, step.key, step.value = sharing, None, None
    output, other_lse = step.attend()
    assert torch.equal(output, own)
    assert torch.equal(lse, other_lse)


def test_cross_attention_without_new_encoder_tokens_writes_nothing(built):
    step = built([1], [9], attn_type="encoder_decoder", encoder_lens=[20])
    before = step.cache.clone()
    step.impl.do_kv_cache_update(None, None, None, step.cache, torch.tensor([-1]))
    assert torch.equal(step.cache.view(torch.int32), before.view(torch.int32))


def test_far_blocks_are_addressed_beyond_32_bits():
    # A view whose block stride is 2**31 elements wide, over memory that is never touched.
    size, block_size, step = 8, 4, 2**31
    base = torch.empty(3 * step, dtype=torch.int8)
    cache = base.view(torch.float8_e4m3fn).as_strided((3, 1, block_size, 16), (step, 64, 16, 1))
    impl = attnmux.create_impl(
        CPUAttentionBackend, num_heads=1, head_size=size, scale=1.0, kv_cache_dtype="fp8"
    )
    key = torch.full((1, 1, size), 2.0)
    impl.do_kv_cache_update(ONE, key, key, cache, torch.tensor([2 * block_size + 1]))
    assert (base[2 * step + 16 : 2 * step + 32].view(torch.float8_e4m3fn).float() == 2.0).all()
