"""Rotary embedding and norm fused with the cache write, against the same done step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

HEADS, KV_HEADS, SIZE = 4, 2, 16
EPS = 1e-6


def _angles(rotary_dim: int) -> torch.Tensor:
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.outer(torch.arange(64.0), inverse)


def _table(rotary_dim: int) -> torch.Tensor:
    angles = _angles(rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _turn(heads: torch.Tensor, pos: torch.Tensor, rotary_dim: int, is_neox: bool) -> torch.Tensor:
    """Multiply pairs, as complex numbers in float64, by the unit number of their angle."""
    half = rotary_dim // 2
    part = heads[..., :rotary_dim].double()
    if is_neox:
        pairs = torch.complex(part[..., :half], part[..., half:])
    else:
        pairs = torch.complex(part[..., 0::2].contiguous(), part[..., 1::2].contiguous())
    angles = _angles(rotary_dim).double()[pos].unsqueeze(1)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    both = (turned.real, turned.imag)
    joined = torch.cat(both, dim=-1) if is_neox else torch.stack(both, dim=-1).flatten(-2)
    return torch.cat([joined, heads[..., rotary_dim:].double()], dim=-1)


def _norm(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values = heads.double()
    return values / (values.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _step(built: Any, **fields: Any) -> tuple[Any, torch.Tensor]:
    step = built([1, 6], [9, 20], heads=(HEADS, KV_HEADS), head_size=SIZE, **fields)
    return step, torch.cat([torch.arange(8, 9), torch.arange(14, 20)])


def _assert_written(step: Any, key: torch.Tensor, value: torch.Tensor) -> None:
    """The cache holds what a plain update of these rows writes."""
    want = step.cache.clone()
    step.impl.do_kv_cache_update(step.layer, key, value, want, step.batch.slot_mapping)
    assert torch.equal(step.cache.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("is_neox", [True, False], ids=["halves", "neighbours"])
@pytest.mark.parametrize("rotary_dim", [SIZE, 6])
@pytest.mark.parametrize("flat", [False, True], ids=["heads", "flat"])
@pytest.mark.parametrize("fields", [{}, {"cache_dtype": "fp8", "scales": ([0.3], [1.5])}], ids=str)
def test_rope_in_place_then_write(built, is_neox, rotary_dim, flat, fields):
    step, pos = _step(built, **fields)
    query, key = step.query.clone(), step.key.clone()
    views = [tensor.flatten(1) if flat else tensor for tensor in (query, key, step.value)]
    table = _table(rotary_dim)
    step.impl.do_rope_and_kv_cache_update(
        step.layer, *views, pos, table, is_neox, step.cache, step.batch.slot_mapping
    )
    for got, plain in ((query, step.query), (key, step.key)):
        want = _turn(plain, pos, rotary_dim, is_neox)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    _assert_written(step, key, step.value)


@pytest.mark.parametrize("is_neox", [True, False], ids=["halves", "neighbours"])
@pytest.mark.parametrize("rotary_dim", [SIZE, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_and_rope_then_write(built, is_neox, rotary_dim, dtype):
    step, pos = _step(built, dtype=dtype)
    rows = [tensor.flatten(1) for tensor in (step.query, step.key, step.value)]
    qkv = torch.cat(rows, dim=-1)
    q_out, k_out = torch.full_like(rows[0], 9.0), torch.full_like(step.key, 9.0)
    q_weight, k_weight = torch.rand(SIZE) + 0.5, torch.rand(SIZE) + 0.5
    step.impl.do_qk_norm_rope_kvcache_update(
        step.layer, qkv, q_out, k_out, pos, q_weight, k_weight, EPS,
        _table(rotary_dim), is_neox, step.cache, step.batch.slot_mapping,
    )  # fmt: skip
    # One rounding of the result, which is at most about 4 times its size here.
    atol = 1e-5 if dtype == torch.float32 else 4 * 2.0**-8
    for got, plain, weight in (
        (q_out.view_as(step.query), step.query, q_weight),
        (k_out, step.key, k_weight),
    ):
        want = _turn(_norm(plain, weight), pos, rotary_dim, is_neox)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)
    _assert_written(step, k_out, step.value)


def test_a_layer_that_shares_a_cache_rotates_its_queries_only(built):
    step, pos = _step(built)
    step.impl.kv_sharing_target_layer_name = "layers.0"
    before, query = step.cache.clone(), step.query.clone()
    step.impl.do_rope_and_kv_cache_update(
        None, query, None, None, pos, _table(SIZE), True, step.cache, step.batch.slot_mapping
    )
    want = _turn(step.query, pos, SIZE, True)
    torch.testing.assert_close(query.double(), want, rtol=0, atol=1e-5)
    assert torch.equal(step.cache.view(torch.int32), before.view(torch.int32))


def test_the_fused_forms_are_declared(built):
    step, _ = _step(built)
    assert step.impl.fused_rope_kvcache_supported()
    assert step.impl.fused_qk_norm_rope_kvcache_supported()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_cache": None}, "kv_cache"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"q_weight": torch.ones(3)}, "q_weight"),
        ({"k_out": None}, "k_out"),
    ],
    ids=str,
)
def test_nothing_is_normalised_or_written_when_an_argument_is_bad(built, changes, named):
    step, pos = _step(built)
    before = step.cache.clone()
    q_out, k_out = torch.zeros_like(step.query), torch.zeros_like(step.key)
    arguments = {
        "qkv": torch.cat([t.flatten(1) for t in (step.query, step.key, step.value)], dim=-1),
        "q_out": q_out,
        "k_out": k_out,
        "positions": pos,
        "q_weight": torch.ones(SIZE),
        "k_weight": torch.ones(SIZE),
        "rms_norm_eps": EPS,
        "cos_sin_cache": _table(SIZE),
        "is_neox": True,
        "kv_cache": step.cache,
        "layer_slot_mapping": step.batch.slot_mapping,
    } | changes
    with pytest.raises(ValueError, match=f"^{named}.*: got .*; allowed: "):
        step.impl.do_qk_norm_rope_kvcache_update(step.layer, **arguments)
    assert not q_out.any()
    assert not k_out.any()
    assert torch.equal(step.cache.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"positions": torch.zeros(6, dtype=torch.int64)}, "positions.shape"),
        ({"positions": torch.zeros(7)}, "positions.dtype"),
        ({"positions": torch.full((7,), 64)}, "positions"),
        ({"positions": torch.full((7,), -1)}, "positions"),
        ({"cos_sin_cache": torch.zeros(64, 5)}, "cos_sin_cache.shape"),
        ({"cos_sin_cache": torch.zeros(64, 18)}, "cos_sin_cache.shape"),
        ({"slots": torch.full((7,), 10**6)}, "slot_mapping"),
        ({"slots": torch.full((7,), -2)}, "slot_mapping"),
    ],
    ids=str,
)
def test_nothing_is_rotated_or_written_when_an_argument_is_bad(built, changes, named):
    step, pos = _step(built)
    query, key, cache = (t.clone() for t in (step.query, step.key, step.cache))
    arguments = {
        "positions": pos,
        "cos_sin_cache": _table(SIZE),
        "slots": step.batch.slot_mapping,
    } | changes
    with pytest.raises(ValueError, match=f"^{named}"):
        step.impl.do_rope_and_kv_cache_update(
            step.layer, query, key, step.value, arguments["positions"],
            arguments["cos_sin_cache"], True, cache, arguments["slots"],
        )  # fmt: skip
    assert torch.equal(query, step.query)
    assert torch.equal(key, step.key)
    assert torch.equal(cache.view(torch.int32), step.cache.view(torch.int32))
