"""Rotation (and normalisation) of queries and keys fused with the cache write.

Rotation pairs elements ``(x1, x2)`` by an angle: ``x1 cos - x2 sin, x2 cos + x1 sin`` (RoFormer,
arXiv 2104.09864, section 3.4); pairs are the two halves ("neox") or neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnmux.testing.behaviours.behaviour import PROVED, Behaviour, Tried, draw, prepare
from attnmux.testing.case import Case
from attnmux.testing.declared import Declared
from attnmux.testing.kit import Target, impl_for
from attnmux.testing.outcome import NonConformanceError, State
from attnmux.testing.paged_read import read_rows
from attnmux.testing.tolerances import unit_roundoff
from attnmux.testing.watching import watch_cache

_EPSILON = 1e-6
_MAX_POSITION = 128
_ROUNDINGS = 4.0  # norm, weight, product and sum, each in the dtype of the query at worst


@dataclass(frozen=True)
class _Rotation:
    """Positions and the table of cosines and sines."""

    positions: torch.Tensor  # [num_tokens]
    table: torch.Tensor  # [max_position, rotary_dim]: cosines, then sines
    is_neox: bool

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate ``[num_tokens, heads, head_size]`` in float64; the rest stays."""
        cos, sin = self.table[self.positions].double().unsqueeze(1).chunk(2, dim=-1)
        width = self.table.shape[1]
        rotated, rest = x[..., :width].double(), x[..., width:].double()
        if self.is_neox:
            first, second = rotated.chunk(2, dim=-1)
        else:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        parts = first * cos - second * sin, second * cos + first * sin
        joined = torch.cat(parts, dim=-1) if self.is_neox else torch.stack(parts, -1).flatten(-2)
        return torch.cat([joined, rest], dim=-1)


def _prepare(
    target: Target, declared: Declared, seed: int, is_neox: bool
) -> tuple[Case, _Rotation]:
    scenario = draw(declared, "mixed", seed, "fused_writes")
    scenario = replace(scenario, pad_tokens=0)
    case, _ = prepare(target, scenario)
    generator = torch.Generator().manual_seed(seed)
    rows = case.query.shape[0]
    positions = torch.randint(0, _MAX_POSITION, (rows,), generator=generator)
    width = max(2, case.scenario.head_size // 4 * 2)  # half of the head is rotated
    angles = torch.rand(_MAX_POSITION, width // 2, generator=generator) * 6.0
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(case.query.dtype)
    return case, _Rotation(positions.to(target.device), table.to(target.device), is_neox)


def _rope(target: Target, declared: Declared, seed: int) -> Tried:
    for is_neox in (True, False):
        case, rotation = _prepare(target, declared, seed, is_neox)
        impl = impl_for(target, case)
        if not impl.fused_rope_kvcache_supported():
            return State.DECLINED, ("fused_rope_kvcache_supported says no",)
        assert case.key is not None
        assert case.value is not None
        right = rotation.apply(case.query), rotation.apply(case.key)
        query, key = case.query.clone(), case.key.clone()
        watch = watch_cache(case, may_write=True)
        impl.do_rope_and_kv_cache_update(
            case.layer,
            query,
            key,
            case.value,
            rotation.positions,
            rotation.table,
            rotation.is_neox,
            case.kv_cache,
            case.metadata.slot_mapping,
        )
        _check(case, (query, key), right, watch.complaint())
    return PROVED


def _qk_norm_rope(target: Target, declared: Declared, seed: int) -> Tried:
    for is_neox in (True, False):
        case, rotation = _prepare(target, declared, seed, is_neox)
        impl = impl_for(target, case)
        if not impl.fused_qk_norm_rope_kvcache_supported():
            return State.DECLINED, ("fused_qk_norm_rope_kvcache_supported says no",)
        assert case.key is not None
        assert case.value is not None
        generator = torch.Generator().manual_seed(seed + 1)
        weights = torch.rand(2, case.scenario.head_size, generator=generator) + 0.5
        q_weight, k_weight = weights.to(target.device, case.query.dtype)
        right = (
            rotation.apply(_normalise(case.query, q_weight)),
            rotation.apply(_normalise(case.key, k_weight)),
        )
        parts = (case.query, case.key, case.value)
        qkv = torch.cat([part.flatten(1) for part in parts], dim=1)
        query, key = torch.empty_like(case.query), torch.empty_like(case.key)
        watch = watch_cache(case, may_write=True)
        impl.do_qk_norm_rope_kvcache_update(
            case.layer,
            qkv,
            query,
            key,
            rotation.positions,
            q_weight,
            k_weight,
            _EPSILON,
            rotation.table,
            rotation.is_neox,
            case.kv_cache,
            case.metadata.slot_mapping,
        )
        _check(case, (query, key), right, watch.complaint())
    return PROVED


def _normalise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Divide each head by its root mean square, in float64."""
    wide = x.double()
    return wide * (wide.square().mean(dim=-1, keepdim=True) + _EPSILON).rsqrt() * weight.double()


def _check(
    case: Case,
    got: tuple[torch.Tensor, torch.Tensor],
    right: tuple[torch.Tensor, torch.Tensor],
    complaint: str | None,
) -> None:
    if complaint:
        raise NonConformanceError(f"wrote outside its slots: {complaint}")
    rows = case.scenario.num_tokens
    for name, x, exact in zip(("query", "key"), got, right, strict=True):
        _check_close(name, x[:rows], exact[:rows], case.query.dtype)
    slots = case.slots[:rows]
    block = case.scenario.block_size
    written = slots >= 0
    blocks, offsets = slots[written] // block, slots[written] % block
    keys, values = read_rows(case.kv_cache, blocks, offsets, case.content)
    assert case.value is not None
    _check_close("cached key", keys, right[1][:rows][written], case.query.dtype)
    _check_close("cached value", values, case.value[:rows][written].double(), case.query.dtype)


def _check_close(name: str, got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    largest = exact.abs().amax(dim=-1, keepdim=True)
    allowed = _ROUNDINGS * unit_roundoff(dtype) * largest
    bad = ~((got.double() - exact).abs() <= allowed)
    if bool(bad.any()):
        row, head, dim = bad.nonzero()[0].tolist()
        raise NonConformanceError(
            f"{name}: {int(bad.sum())} elements are wrong, the first at row {row}, head {head}, "
            f"element {dim}: got {float(got[row, head, dim]):.6g}, "
            f"expected {float(exact[row, head, dim]):.6g}"
        )


BEHAVIOURS = (
    Behaviour("fused.rope_cache", "fused rotation and cache write", _rope),
    Behaviour("fused.qk_norm_rope_cache", "fused norm, rotation, cache write", _qk_norm_rope),
)
