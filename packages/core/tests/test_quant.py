"""Quantisation keys, and the plain definition of a quantised output."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.quant import (
    FP4_DTYPE,
    FP8_DTYPE,
    OUTPUT_QUANT_KEYS,
    GroupShape,
    QuantKey,
    ScaleDesc,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
    output_quant_key,
    quantize_output,
    saturating_cast,
)

# The sixteen e2m1 values by code (OCP Microscaling Formats 1.0, section 5.3.3).
FP4_VALUES = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
ONE = torch.ones(1)


def test_the_four_named_keys() -> None:
    tensor = ScaleDesc(torch.float32, True, GroupShape(-1, -1))
    assert kFp8StaticTensorSym == QuantKey(torch.float8_e4m3fn, tensor, None, True)
    for key, group in ((kFp8Dynamic128Sym, 128), (kFp8Dynamic64Sym, 64)):
        scale = ScaleDesc(torch.float32, False, GroupShape(1, group))
        assert key == QuantKey(torch.float8_e4m3fn, scale, None, True)
    block = ScaleDesc(torch.float8_e4m3fn, False, GroupShape(1, 16))
    assert kNvfp4Dynamic == QuantKey(torch.uint8, block, tensor, True)
    assert len(set(OUTPUT_QUANT_KEYS)) == 4


def test_keys_are_values() -> None:
    with pytest.raises(AttributeError):
        kNvfp4Dynamic.symmetric = False  # type: ignore[misc]
    assert QuantKey(torch.int8, kFp8StaticTensorSym.scale) != kFp8StaticTensorSym


@pytest.mark.parametrize(
    ("shape", "answers"),
    [
        (GroupShape.PER_TENSOR, (True, False, False)),
        (GroupShape.PER_TOKEN, (False, True, False)),
        (GroupShape.PER_CHANNEL, (False, False, False)),
        (GroupShape(1, 64), (False, False, True)),
    ],
    ids=str,
)
def test_group_shapes(shape: GroupShape, answers: tuple[bool, ...]) -> None:
    assert (shape.is_per_tensor(), shape.is_per_token(), shape.is_per_group()) == answers


def out(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(*(shape or (3, 2, 64)), dtype=dtype)


ASKED = {
    "float16": (out(torch.float16), None, None, None),
    "bfloat16": (out(torch.bfloat16), None, None, None),
    "float32, flattened": (out(torch.float32, 3, 128), None, None, None),
    "fp8 static": (out(FP8_DTYPE), ONE, None, kFp8StaticTensorSym),
    "fp8 static, scale without a dimension": (
        out(FP8_DTYPE),
        torch.tensor(1.0),
        None,
        kFp8StaticTensorSym,
    ),
    "fp8 groups of 128": (out(FP8_DTYPE), None, torch.zeros(3, 1), kFp8Dynamic128Sym),
    "fp8 groups of 64": (out(FP8_DTYPE), None, torch.zeros(3, 2), kFp8Dynamic64Sym),
    "nvfp4": (out(FP4_DTYPE, 3, 64), ONE, out(FP8_DTYPE, 3, 8), kNvfp4Dynamic),
    "nvfp4, heads apart": (out(FP4_DTYPE, 3, 2, 32), ONE, out(FP8_DTYPE, 3, 8), kNvfp4Dynamic),
    "no token": (out(FP8_DTYPE, 0, 2, 64), None, torch.zeros(0, 2), kFp8Dynamic64Sym),
}


@pytest.mark.parametrize("case", ASKED)
def test_the_arguments_say_how_the_output_is_quantised(case: str) -> None:
    output, scale, block_scale, key = ASKED[case]
    assert output_quant_key(output, scale, block_scale) == key


REFUSED = {
    "plain output with a scale": (out(torch.float16), ONE, None, "output.dtype"),
    "plain output with block scales": (out(torch.float16), None, torch.zeros(3, 2), "output.dtype"),
    "another dtype": (out(torch.int8), ONE, None, "output.dtype"),
    "fp8 without a scale": (out(FP8_DTYPE), None, None, "output_scale"),
    "fp8 with both": (out(FP8_DTYPE), ONE, torch.zeros(3, 2), "output_scale"),
    "fp8 with several scales": (out(FP8_DTYPE), torch.ones(2), None, "output_scale.shape"),
    "fp8 scale of another dtype": (out(FP8_DTYPE), ONE.half(), None, "output_scale.dtype"),
    "group of 32": (out(FP8_DTYPE), None, torch.zeros(3, 4), "output_block_scale.shape"),
    "tokens differ": (out(FP8_DTYPE), None, torch.zeros(2, 2), "output_block_scale.shape"),
    "half block scales": (out(FP8_DTYPE), None, out(torch.float16, 3, 2), "output_block_scale.dty"),
    "groups with a remainder": (
        out(FP8_DTYPE, 3, 96),
        None,
        torch.zeros(3, 1),
        "output_block_scale.shape",
    ),
    "nvfp4 without global": (out(FP4_DTYPE, 3, 64), None, out(FP8_DTYPE, 3, 8), "output_scale"),
    "nvfp4 without blocks": (out(FP4_DTYPE, 3, 64), ONE, None, "output_block_scale"),
    "nvfp4 block dtype": (
        out(FP4_DTYPE, 3, 64),
        ONE,
        torch.zeros(3, 8),
        "output_block_scale.dtype",
    ),
    "output of no tensor": (None, None, None, "output"),
    "scale on another device": (out(FP8_DTYPE), ONE.to("meta"), None, "output_scale.device"),
    "blocks on another device": (
        out(FP4_DTYPE, 3, 64),
        ONE,
        out(FP8_DTYPE, 3, 8).to("meta"),
        "output_block_scale.device",
    ),
    "nvfp4 remainder": (out(FP4_DTYPE, 3, 4), ONE, out(FP8_DTYPE, 3, 1), "output.shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_of_no_key_are_refused(case: str) -> None:
    output, scale, block_scale, name = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{name}.*: got .*; allowed: "):
        output_quant_key(output, scale, block_scale)


@pytest.mark.parametrize(
    ("key", "output", "scale", "block_scale", "name"),
    [
        (None, out(FP8_DTYPE, 3, 128), ONE, None, "key"),
        (kFp8StaticTensorSym, out(FP8_DTYPE, 3, 128), None, None, "output_scale"),
        (kFp8StaticTensorSym, out(FP8_DTYPE, 3, 64), ONE, None, "output.shape"),
        (kFp8StaticTensorSym, out(torch.float16, 3, 128), ONE, None, "output.dtype"),
        (kFp8Dynamic128Sym, out(FP8_DTYPE, 3, 128), None, None, "output_block_scale"),
        (
            kFp8Dynamic64Sym,
            out(FP8_DTYPE, 3, 128),
            None,
            torch.zeros(3, 1),
            "output_block_scale.shape",
        ),
        (kNvfp4Dynamic, out(FP4_DTYPE, 3, 64), None, out(FP8_DTYPE, 3, 8), "output_scale"),
    ],
)
def test_a_result_is_quantised_into_what_its_key_asks_for(
    key: Any, output: Any, scale: Any, block_scale: Any, name: str
) -> None:
    before = output.clone()
    with pytest.raises(ValueError, match=f"^{name}: got .*; allowed: "):
        quantize_output(torch.ones(3, 128), key, output, scale, block_scale)
    assert torch.equal(output.view(torch.uint8), before.view(torch.uint8))


def nearest(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The code whose value is nearest, the even code of two that are equally near."""
    distance = (values.double().unsqueeze(-1) - codes.double()).abs()
    odd = torch.arange(codes.numel()) % 2
    ranked = torch.where(distance == distance.amin(-1, keepdim=True), odd + 1.0, math.inf)
    return ranked.argmin(-1)


def rows(seed: int, hidden: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(5, hidden, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("scale", [0.02, 1.0, 3.5])
def test_static_fp8_divides_and_saturates(scale: float) -> None:
    values = rows(1, 64, 100.0)
    values[0, :3] = torch.tensor([1e9, -1e9, 0.0])
    output = out(FP8_DTYPE, 5, 64)
    quantize_output(values, kFp8StaticTensorSym, output, output_scale=torch.tensor([scale]))
    expected = (values / scale).clamp(-448, 448).to(FP8_DTYPE)
    assert torch.equal(output.float(), expected.float())
    assert output.float()[0, :2].tolist() == [448.0, -448.0]


@pytest.mark.parametrize("key", [kFp8Dynamic128Sym, kFp8Dynamic64Sym])
def test_each_group_of_fp8_reaches_the_largest_value(key: QuantKey) -> None:
    values, group = rows(2, 256), key.scale.group_shape.col
    values[1, :group] = 0.0
    output, scales = out(FP8_DTYPE, 5, 256), torch.full((5, 256 // group), torch.nan)
    quantize_output(values, key, output, output_block_scale=scales)
    grouped = values.view(5, -1, group)
    codes = output.float().view(5, -1, group)
    assert torch.isfinite(scales).all()
    assert scales.gt(0).all()
    filled = torch.ones(5, 256 // group, dtype=torch.bool)
    filled[1, 0] = False
    torch.testing.assert_close(scales[filled], grouped.abs().amax(-1)[filled] / 448)
    assert codes.abs().amax(-1)[filled].eq(448).all()
    assert codes[1, 0].eq(0).all()
    # e4m3 has three stored bits: half a step is 1/16 of the value; below 2^-6 steps are 2^-9.
    error = (codes * scales.unsqueeze(-1) - grouped).abs()
    assert (error <= grouped.abs() / 16 + scales.unsqueeze(-1) * 2**-10 + 1e-6).all()


def test_nvfp4_is_the_nearest_code_under_its_two_scales() -> None:
    values = rows(3, 64)
    values[0, :16] = 0.0
    values[1, 0] = values.abs().max() * 2
    global_scale = 448 * 6 / values.abs().max().reshape(1)
    output, scales = out(FP4_DTYPE, 5, 32), out(FP8_DTYPE, 5, 4)
    quantize_output(values, kNvfp4Dynamic, output, global_scale, scales)
    groups = values.view(5, 4, 16)
    expected_scales = (global_scale * groups.abs().amax(-1) / 6).to(FP8_DTYPE)
    assert torch.equal(scales.float(), expected_scales.float())
    assert scales.float().max() == 448
    decoded = expected_scales.float().unsqueeze(-1)
    scaled = torch.where(decoded > 0, groups * global_scale / decoded, 0.0).view(5, 64)
    low, high = output & 15, output >> 4
    codes = torch.stack([low, high], dim=-1).view(5, 64).long()
    assert torch.equal(codes & 7, nearest(scaled.abs(), FP4_VALUES[:8]))
    assert torch.equal(codes >> 3, torch.signbit(scaled).long())
    # Read back: a code is within half the widest gap (4 to 6) of its value, and block scales round
    # by 1/16 of themselves.
    read = FP4_VALUES[codes].view(5, 4, 16) * decoded / global_scale
    assert ((read - groups).abs() <= groups.abs().amax(-1, keepdim=True) * (1 / 6 + 1 / 16)).all()


@given(st.lists(st.floats(-8, 8, width=32), min_size=16, max_size=16))
@settings(max_examples=100, deadline=None)
def test_any_value_takes_its_nearest_fp4_code(values: list[float]) -> None:
    # One value of 6 and a global scale of 448 make the block scale 448, so that values are codes.
    row = torch.tensor([values])
    row[0, 0] = 6.0
    row.clamp_(-6, 6)
    output, scales = out(FP4_DTYPE, 1, 8), out(FP8_DTYPE, 1, 1)
    quantize_output(row, kNvfp4Dynamic, output, torch.tensor([448.0]), scales)
    assert scales.item() == 448.0
    codes = torch.stack([output & 15, output >> 4], dim=-1).view(1, 16).long()
    assert torch.equal(codes & 7, nearest(row.abs(), FP4_VALUES[:8]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_halfway_values_go_to_the_even_fp4_code(value: float, expected: float, sign: float) -> None:
    row = torch.zeros(1, 16)
    row[0, 0], row[0, 5] = 6.0, sign * value
    output, scales = out(FP4_DTYPE, 1, 8), out(FP8_DTYPE, 1, 1)
    quantize_output(row, kNvfp4Dynamic, output, torch.tensor([448.0]), scales)
    assert FP4_VALUES[int(output[0, 2] >> 4)] == sign * expected


@pytest.mark.parametrize("key", OUTPUT_QUANT_KEYS)
def test_no_token_is_no_work(key: QuantKey) -> None:
    hidden = 128
    output = out(key.dtype, 0, hidden if key.dtype == FP8_DTYPE else hidden // 2)
    block_scale: Any = None
    if key.scale.group_shape.is_per_group():
        block_scale = torch.zeros(0, hidden // key.scale.group_shape.col, dtype=key.scale.dtype)
    quantize_output(torch.zeros(0, hidden), key, output, ONE, block_scale)
    assert output.shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_casts_saturate_and_keep_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([1e30, -1e30, math.inf, -math.inf, math.nan, 1.0, largest])
    cast = saturating_cast(values, dtype).float()
    assert cast[:4].tolist() == [largest, -largest, largest, -largest]
    assert torch.isnan(cast[4])
    assert cast[5:].tolist() == [1.0, largest]
