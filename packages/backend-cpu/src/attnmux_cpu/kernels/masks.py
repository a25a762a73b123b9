"""Who sees whom: the rule of every mask, once as a tensor and once as ranges of keys.

`visible` gives the mask of a tile. `key_ranges` gives the keys that at least one query of a tile
sees, so that other keys are neither read nor multiplied. `sees_all` says that a tile needs no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Range: TypeAlias = tuple[int, int]
"""Positions from the first up to, not including, the second."""


@dataclass(frozen=True)
class MaskRule:
    """What limits the keys that a query sees, for all requests of a layer.

    Attributes:
        window: Keys nearer than this many positions are seen; None: all.
        symmetric: The window reaches to later keys too (encoders).
        rswa_window: Window of keys past the request's prefix; None: all.
    """

    window: int | None = None
    symmetric: bool = False
    rswa_window: int | None = None


def visible(
    rule: MaskRule,
    query_pos: torch.Tensor,
    key_pos: torch.Tensor,
    causal: bool | torch.Tensor,
    prefix_len: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Return the bool mask of the broadcast shape of `query_pos` and `key_pos`, without mm ranges.

    Args:
        rule: The layer's rule.
        query_pos: Positions of queries, such as ``[..., queries, 1]``.
        key_pos: Positions of keys, such as ``[..., 1, keys]``.
        causal: For all, or broadcastable to the mask.
        prefix_len: Tokens of the prefix of reference sliding-window attention; as `causal`.
    """
    distance = query_pos - key_pos
    if isinstance(causal, torch.Tensor):
        mask = (distance >= 0) | ~causal
    elif causal:
        mask = distance >= 0
    else:
        mask = torch.ones_like(distance, dtype=torch.bool)
    if rule.window is not None:
        mask &= distance < rule.window
        if rule.symmetric:
            mask &= distance > -rule.window
    if rule.rswa_window is not None:
        mask &= (distance < rule.rswa_window) | (key_pos < prefix_len)
    return mask


def same_range(
    query_pos: torch.Tensor, key_pos: torch.Tensor, ranges: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return where query and key lie in the same inclusive range; ranges do not overlap."""
    starts, ends = (
        torch.tensor(bounds, device="cpu") for bounds in zip(*sorted(ranges), strict=True)
    )
    query_range, key_range = (_range_index(pos, starts, ends) for pos in (query_pos, key_pos))
    return (query_range == key_range) & (query_range >= 0)


def _range_index(pos: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    index = torch.searchsorted(starts, pos, right=True) - 1
    inside = (index >= 0) & (pos <= ends[index.clamp_min(0)])
    return torch.where(inside, index, -1)


def key_ranges(
    rule: MaskRule,
    queries: Range,
    seq_len: int,
    causal: bool,
    prefix_len: int = 0,
    mm_ranges: Sequence[tuple[int, int]] = (),
) -> list[Range]:
    """Return which keys some query at positions `queries` sees: ascending, disjoint ranges."""
    first, last = queries[0], queries[1] - 1
    high = min(last + 1, seq_len) if causal else seq_len
    if rule.window is not None and rule.symmetric:
        high = min(high, last + rule.window)
    low = 0 if rule.window is None else max(0, first - rule.window + 1)
    ranges = [(low, high)]
    if rule.rswa_window is not None:
        recent = max(low, first - rule.rswa_window + 1)
        ranges = [(low, min(prefix_len, high)), (recent, high)]
    ranges += [
        (start, min(end + 1, seq_len)) for start, end in mm_ranges if start <= last and end >= first
    ]
    return _merged(ranges)


def _merged(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if low >= high:
            continue
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def sees_all(
    rule: MaskRule, queries: Range, keys: Range, causal: bool, prefix_len: int = 0
) -> bool:
    """Whether every query of `queries` sees every key of `keys`, mm ranges aside."""
    first, last = queries[0], queries[1] - 1
    nearest, farthest = first - (keys[1] - 1), last - keys[0]
    if causal and nearest < 0:
        return False
    if rule.window is not None and (
        farthest >= rule.window or (rule.symmetric and nearest <= -rule.window)
    ):
        return False
    return rule.rswa_window is None or farthest < rule.rswa_window or keys[1] <= prefix_len
