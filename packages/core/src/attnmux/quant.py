"""Names for quantised values, and what attention does when its output is quantised in the same
pass.

A `QuantKey` says how values are stored and at what granularity their scales are kept. Four keys are
those that a backend may fuse into its output; `quantize_output` is their definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import torch

from attnmux.checks import bad_argument, check_in, check_tensor

FP8_DTYPE: Final = torch.float8_e4m3fn
FP4_DTYPE: Final = torch.uint8
"""Two e2m1 values in a byte, the earlier one in the low four bits."""

FP8_MAX: Final = float(torch.finfo(FP8_DTYPE).max)
FP4_MAX: Final = 6.0
"""Largest e2m1 value (OCP Microscaling Formats 1.0, section 5.3.3)."""
NVFP4_GROUP: Final = 16
"""Values that share one block scale in nvfp4."""


class _Shape(NamedTuple):
    row: int
    col: int


class GroupShape(_Shape):
    """Rows and columns that share one scale; -1 stands for the whole extent."""

    __slots__ = ()
    PER_TENSOR: ClassVar[GroupShape]
    PER_TOKEN: ClassVar[GroupShape]
    PER_CHANNEL: ClassVar[GroupShape]

    def is_per_tensor(self) -> bool:
        """Whether one scale serves the whole tensor."""
        return self == (-1, -1)

    def is_per_token(self) -> bool:
        """Whether each row has one scale."""
        return self == (1, -1)

    def is_per_group(self) -> bool:
        """Whether each row has a scale for every `col` columns."""
        return self.row == 1 and self.col >= 1


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


@dataclass(frozen=True)
class ScaleDesc:
    """How one level of scales is kept: its dtype, whether known beforehand, and its granularity."""

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    """A quantisation: dtype of the values, their scales, and a second level of scales if any."""

    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


_STATIC_TENSOR_SCALE = ScaleDesc(torch.float32, static=True, group_shape=GroupShape.PER_TENSOR)

kFp8StaticTensorSym: Final = QuantKey(FP8_DTYPE, _STATIC_TENSOR_SCALE)
kFp8Dynamic128Sym: Final = QuantKey(
    FP8_DTYPE, ScaleDesc(torch.float32, static=False, group_shape=GroupShape(1, 128))
)
kFp8Dynamic64Sym: Final = QuantKey(
    FP8_DTYPE, ScaleDesc(torch.float32, static=False, group_shape=GroupShape(1, 64))
)
kNvfp4Dynamic: Final = QuantKey(
    FP4_DTYPE,
    ScaleDesc(FP8_DTYPE, static=False, group_shape=GroupShape(1, NVFP4_GROUP)),
    scale2=_STATIC_TENSOR_SCALE,
)

OUTPUT_QUANT_KEYS: Final = (
    kFp8StaticTensorSym,
    kFp8Dynamic128Sym,
    kFp8Dynamic64Sym,
    kNvfp4Dynamic,
)


def output_quant_key(
    output: torch.Tensor,
    output_scale: torch.Tensor | None,
    output_block_scale: torch.Tensor | None,
) -> QuantKey | None:
    """Return how `forward` is asked to quantise its output, None where it is not.

    Args:
        output: ``[num_tokens, num_heads, head_size]`` or ``[num_tokens, hidden]``; float16,
            bfloat16 or float32 for a plain output, float8_e4m3fn or uint8 (two values a byte)
            otherwise.
        output_scale: One float32 value: the scale of a static fp8 output (it divides), or the
            global scale of nvfp4 (it multiplies: 448 * 6 / amax of the tensor).
        output_block_scale: Written by `forward`: float32 ``[num_tokens, hidden / 128 or / 64]``, or
            for nvfp4 float8_e4m3fn ``[num_tokens, hidden / 16]``, row-major.

    Raises:
        ValueError: The three do not belong to any of the four keys.
    """
    check_tensor("output", output)
    for name, scale in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
        if scale is not None:
            check_tensor(name, scale, device=output.device)
    if output.dtype in (torch.float16, torch.bfloat16, torch.float32):
        if output_scale is not None or output_block_scale is not None:
            raise bad_argument(
                "output.dtype", output.dtype, f"{FP8_DTYPE} | {FP4_DTYPE} when a scale is given"
            )
        return None
    if output.dtype == FP4_DTYPE:
        return _nvfp4_key(output, output_scale, output_block_scale)
    if output.dtype != FP8_DTYPE:
        raise bad_argument(
            "output.dtype",
            output.dtype,
            f"torch.float16 | torch.bfloat16 | torch.float32 | {FP8_DTYPE} | {FP4_DTYPE}",
        )
    if output_block_scale is None:
        _check_scalar("output_scale", output_scale)
        return kFp8StaticTensorSym
    if output_scale is not None:
        raise bad_argument("output_scale", "a tensor", "None beside output_block_scale")
    return _fp8_group_key(output, output_block_scale)


def _check_scalar(name: str, scale: torch.Tensor | None) -> None:
    check_tensor(name, scale, dtype=torch.float32)
    if scale is not None and scale.numel() != 1:
        raise bad_argument(f"{name}.shape", list(scale.shape), "a single element")


def _fp8_group_key(output: torch.Tensor, block_scale: torch.Tensor) -> QuantKey:
    num_tokens, hidden = output.shape[0], _hidden(output)
    check_tensor("output_block_scale", block_scale, dtype=torch.float32)
    for key in (kFp8Dynamic128Sym, kFp8Dynamic64Sym):
        group = key.scale.group_shape.col
        if hidden % group == 0 and list(block_scale.shape) == [num_tokens, hidden // group]:
            return key
    raise bad_argument(
        "output_block_scale.shape",
        list(block_scale.shape),
        f"[{num_tokens}, {hidden} / 128] | [{num_tokens}, {hidden} / 64], with no remainder",
    )


def _nvfp4_key(
    output: torch.Tensor, scale: torch.Tensor | None, block_scale: torch.Tensor | None
) -> QuantKey:
    hidden = 2 * _hidden(output)
    _check_scalar("output_scale", scale)
    if hidden % NVFP4_GROUP:
        raise bad_argument("output.shape", list(output.shape), "a multiple of 16 values a token")
    check_tensor(
        "output_block_scale",
        block_scale,
        shape=(output.shape[0], hidden // NVFP4_GROUP),
        dtype=FP8_DTYPE,
    )
    return kNvfp4Dynamic


def _hidden(output: torch.Tensor) -> int:
    return output[0].numel() if output.shape[0] else output.shape[1:].numel()


def saturating_cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast to an 8-bit float: finite values beyond its range become its largest, NaN stays NaN.

    e5m2 has infinities; they are not produced, so that a cache holds nothing that a product turns
    into NaN.
    """
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def quantize_output(
    values: torch.Tensor,
    key: QuantKey,
    output: torch.Tensor,
    output_scale: torch.Tensor | None = None,
    output_block_scale: torch.Tensor | None = None,
) -> None:
    """Quantise attention's result into `output`, in plain torch: the definition of the four keys.

    Args:
        values: float32 ``[num_tokens, hidden]``; of any shape with one scale for the tensor.
        key: One of `OUTPUT_QUANT_KEYS`, as `output_quant_key` found it.
        output: Written. Shaped as `values` in fp8, or ``[num_tokens, hidden / 2]`` uint8.
        output_scale: As in `output_quant_key`.
        output_block_scale: Written for the three dynamic keys.

    A dynamic group of zeros gets the smallest positive scale, so that nothing divides by zero.

    Raises:
        ValueError: The key is none of the four, or what it needs is not there.
    """
    check_in("key", key, OUTPUT_QUANT_KEYS)
    _check_written(values, key, output, output_scale, output_block_scale)
    if key == kFp8StaticTensorSym:
        assert output_scale is not None
        output.copy_(saturating_cast(values / output_scale, FP8_DTYPE))
        return
    assert output_block_scale is not None
    group = key.scale.group_shape.col
    groups = values.reshape(values.shape[0], values.shape[1] // group, group)
    amax = groups.abs().amax(dim=-1)
    if key == kNvfp4Dynamic:
        assert output_scale is not None
        block_scale = saturating_cast(output_scale * amax / FP4_MAX, FP8_DTYPE)
        output_block_scale.copy_(block_scale)
        decoded = block_scale.float().unsqueeze(-1)
        scaled = torch.where(decoded > 0, groups * output_scale / decoded, 0.0)
        output.copy_(_pack_fp4(scaled.flatten(-2)))
        return
    scale = (amax / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    output_block_scale.copy_(scale)
    output.copy_(saturating_cast((groups / scale.unsqueeze(-1)).flatten(-2), FP8_DTYPE))


def _check_written(
    values: torch.Tensor,
    key: QuantKey,
    output: torch.Tensor,
    scale: torch.Tensor | None,
    block_scale: torch.Tensor | None,
) -> None:
    if key != kFp8StaticTensorSym:  # groups are counted over all heads of a token
        check_tensor("values", values, shape=("num_tokens", "hidden"))
    *rows, hidden = values.shape
    width = hidden // 2 if key == kNvfp4Dynamic else hidden
    check_tensor("output", output, shape=(*rows, width), dtype=key.dtype)
    if key in (kFp8StaticTensorSym, kNvfp4Dynamic):
        _check_scalar("output_scale", scale)
    if key != kFp8StaticTensorSym:
        groups = hidden // key.scale.group_shape.col
        shape, dtype = (*rows, groups), key.scale.dtype
        check_tensor("output_block_scale", block_scale, shape=shape, dtype=dtype)


# Halfway points between 0, 0.5, 1, 1.5, 2, 3, 4, 6. A tie goes to the even code, so three of the
# points belong to the code above them.
_FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_FP4_TIE_GOES_UP = (False, True, False, True, False, True, False)


def _pack_fp4(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for midpoint, tie_goes_up in zip(_FP4_MIDPOINTS, _FP4_TIE_GOES_UP, strict=True):
        code += magnitude >= midpoint if tie_goes_up else magnitude > midpoint
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)
