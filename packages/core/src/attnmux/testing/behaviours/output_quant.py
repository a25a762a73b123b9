"""Fused quantisation of the output, judged in float64 code by code.

Rounding is monotone. An output that may be anywhere in ``exact ± budget`` may be rounded to any
code between those of the two ends, and to no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnmux.quant import (
    QuantKey,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from attnmux.testing.behaviours.behaviour import PROVED, Behaviour, Tried, draw, prepare
from attnmux.testing.declared import Declared
from attnmux.testing.kit import Answered, Target, answer, build, impl_for
from attnmux.testing.outcome import NonConformanceError, State
from attnmux.testing.poison import guarded
from attnmux.testing.watching import watch_output

_FP8_MAX, _FP4_MAX = 448.0, 6.0
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1: OCP Microscaling Formats, 5.3.3
_RELATIVE = 1e-5  # of a float32 scale: a few roundings


@dataclass(frozen=True)
class _Tensors:
    """What a quantised forward writes."""

    output: torch.Tensor
    scale: torch.Tensor | None
    block_scale: torch.Tensor | None


def _attempt(key: QuantKey, group: int) -> Callable[[Target, Declared, int], Tried]:
    def attempt(target: Target, declared: Declared, seed: int) -> Tried:
        scenario = draw(declared, "mixed", seed, "output_quant")
        heads = next((h for h in (4, 8, 16, 32) if h * scenario.head_size % 128 == 0), 4)
        scenario = replace(scenario, num_heads=heads, num_kv_heads=2, flat=True)
        case, builder = prepare(target, scenario)
        impl = impl_for(target, case)
        answered = answer(case)
        supported = impl.fused_output_quant_supported(key)
        tensors = _tensors_for(answered, key, group)
        watch = watch_output(case, tensors.output)
        metadata = build(builder, case)

        def forward() -> None:
            impl.forward(
                case.layer,
                case.query,
                case.key,
                case.value,
                case.full_cache,
                metadata,
                tensors.output,
                tensors.scale,
                tensors.block_scale,
            )

        if not supported:
            return _expect_refusal(forward)
        forward()
        if found := watch.complaint():
            raise NonConformanceError(f"forward wrote outside its output rows: {found}")
        _judge(answered, key, group, tensors)
        return PROVED

    return attempt


def _expect_refusal(forward: Callable[[], None]) -> Tried:
    try:
        forward()
    except ValueError as error:
        return State.DECLINED, (str(error),)
    raise NonConformanceError(
        "fused_output_quant_supported says no, yet forward takes the output without an error"
    )


def _tensors_for(answered: Answered, key: QuantKey, group: int) -> _Tensors:
    case = answered.case
    rows = case.query.shape[0]
    hidden = case.scenario.num_heads * case.scenario.head_size
    device = case.query.device
    amax = float(answered.exact.output.abs().max())
    if key == kNvfp4Dynamic:
        output = guarded((rows, hidden // 2), torch.uint8, device)
        scale = torch.tensor([_FP8_MAX * _FP4_MAX / amax], device=device)
        block = guarded((rows, hidden // group), torch.float8_e4m3fn, device)
        return _Tensors(output, scale, block)
    output = guarded((rows, hidden), torch.float8_e4m3fn, device)
    if key == kFp8StaticTensorSym:
        # Some values saturate: the scale is of a smaller tensor, as a calibrated one may be.
        return _Tensors(output, torch.tensor([0.8 * amax / _FP8_MAX], device=device), None)
    return _Tensors(output, None, guarded((rows, hidden // group), torch.float32, device))


def _judge(answered: Answered, key: QuantKey, group: int, tensors: _Tensors) -> None:
    case = answered.case
    rows = case.num_actual_tokens
    exact = answered.exact.output[:rows].flatten(1)
    size = case.scenario.head_size
    allowed = answered.budget.output[:rows].repeat_interleave(size, dim=1)
    output = tensors.output[:rows]
    if key == kFp8StaticTensorSym:
        assert tensors.scale is not None
        scale = tensors.scale.double()
        _check_between(output.double(), *_ends(exact / scale, allowed / scale, _to_fp8))
        return
    assert tensors.block_scale is not None
    block = tensors.block_scale[:rows].double()
    grouped, room = (x.view(rows, -1, group) for x in (exact, allowed))
    amax, amax_room = grouped.abs().amax(dim=-1), room.amax(dim=-1)
    if key == kNvfp4Dynamic:
        assert tensors.scale is not None
        factor = tensors.scale.double()
        _check_between(
            block, *_ends(factor * amax / _FP4_MAX, factor * amax_room / _FP4_MAX, _to_fp8)
        )
        per_value = torch.where(block > 0, factor / block, torch.zeros_like(block)).unsqueeze(-1)
        got = _unpack_fp4(output)
        _check_between(got, *_ends(grouped * per_value, room * per_value, _to_fp4, flat=True))
        return
    error = (block - amax / _FP8_MAX).abs()
    bad = ~((error <= amax_room / _FP8_MAX + amax * _RELATIVE) | ((amax == 0) & (block >= 0)))
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise NonConformanceError(
            f"block scale of row {row}, group {column} is {float(block[row, column]):.6g}; "
            f"right: amax / 448 = {float(amax[row, column]) / _FP8_MAX:.6g}"
        )
    per_value = block.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    ends = _ends(grouped / per_value, room / per_value, _to_fp8, flat=True)
    _check_between(output.double(), *ends)


def _ends(
    exact: torch.Tensor, room: torch.Tensor, to_code: Any, *, flat: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    slack = room + exact.abs() * _RELATIVE
    low, high = to_code(exact - slack), to_code(exact + slack)
    return (low.flatten(1), high.flatten(1)) if flat else (low, high)


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_FP8_MAX, _FP8_MAX).float().to(torch.float8_e4m3fn).double()


def _to_fp4(x: torch.Tensor) -> torch.Tensor:
    grid = torch.tensor(_FP4_VALUES, dtype=torch.float64, device=x.device)
    nearest = (x.abs().unsqueeze(-1) - grid).abs().argmin(dim=-1)
    return grid[nearest] * x.sign()


def _unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return two values a byte, the earlier one from the low four bits."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(1).long()
    grid = torch.tensor(_FP4_VALUES, dtype=torch.float64, device=packed.device)
    return grid[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)


def _check_between(got: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    bad = ~((got >= low) & (got <= high))
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise NonConformanceError(
            f"{int(bad.sum())} quantised values are wrong, the first in row {row}, column {column}:"
            f" got {float(got[row, column]):.6g}, right is {float(low[row, column]):.6g} to "
            f"{float(high[row, column]):.6g} (before the scale)"
        )


BEHAVIOURS = tuple(
    Behaviour(f"output_quant.{name}", "fused output quantisation", _attempt(key, group))
    for name, key, group in (
        ("fp8_static", kFp8StaticTensorSym, 0),
        ("fp8_dynamic_128", kFp8Dynamic128Sym, 128),
        ("fp8_dynamic_64", kFp8Dynamic64Sym, 64),
        ("nvfp4", kNvfp4Dynamic, 16),
    )
)
