"""Rows of the cache: from keys and values to stored rows, and from gathered rows back to float32.

A row is the content of one (block, head, token): keys first, then values, then, where each token
and head has a scale of its own, two float32 scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.kv_cache import KVQuantMode
from attnmux.kv_cache.dtypes import scale_offset
from attnmux.quant import saturating_cast
from attnmux_cpu.kernels.float8 import copy_float8
from attnmux_cpu.kernels.paging import as_bytes
from attnmux_cpu.kernels.workspace import Workspace

INT8_MAX = 127.0


@dataclass(frozen=True)
class RowFormat:
    """How one layer's rows are stored.

    Attributes:
        head_size: Size of a key head.
        value_size: Size of a value head.
        content: Elements of a row.
        dtype: Of the cache tensor.
        quant_mode: Any `KVQuantMode` of 8 bits or none.
    """

    head_size: int
    value_size: int
    content: int
    dtype: torch.dtype
    quant_mode: KVQuantMode

    @property
    def num_values(self) -> int:
        """Elements of key and value together."""
        return self.head_size + self.value_size

    @property
    def has_own_scales(self) -> bool:
        """Whether each row carries its scales."""
        return self.quant_mode.is_per_token_head


def encode_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    row: RowFormat,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return stored rows ``[tokens, num_kv_heads, content]`` in the cache's dtype.

    Args:
        key: ``[tokens, num_kv_heads, head_size]``.
        value: ``[tokens, num_kv_heads, value_size]``.
        row: The format.
        key_scale: float32, one element or ``[num_kv_heads]``: fp8 per tensor stores key / scale.
            None for other dtypes.
        value_scale: As `key_scale`.
    """
    if row.has_own_scales:
        return _encode_with_scales(key, value, row)
    if key_scale is not None and value_scale is not None:
        key, value = (
            saturating_cast(part.float() / scale.view(-1, 1), row.dtype)
            for part, scale in ((key, key_scale), (value, value_scale))
        )
        return torch.cat((as_bytes(key), as_bytes(value)), dim=-1).view(row.dtype)
    return torch.cat((key, value), dim=-1).to(row.dtype)


def _encode_with_scales(key: torch.Tensor, value: torch.Tensor, row: RowFormat) -> torch.Tensor:
    rows = torch.zeros((*key.shape[:2], row.content), dtype=torch.int8, device="cpu")
    first = scale_offset(row.num_values)
    scales = rows[..., first : first + 8].view(torch.float32)
    largest = INT8_MAX if row.dtype == torch.int8 else torch.finfo(row.dtype).max
    for index, (part, start) in enumerate(((key.float(), 0), (value.float(), row.head_size))):
        scale = part.abs().amax(dim=-1) / largest
        scale.masked_fill_(scale == 0.0, 1.0)
        scales[..., index] = scale
        scaled = part / scale.unsqueeze(-1)
        stored = scaled.round_() if row.dtype == torch.int8 else saturating_cast(scaled, row.dtype)
        rows[..., start : start + part.shape[-1]] = _signed_bytes(stored)
    return rows.view(row.dtype)


def _signed_bytes(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.int8) if stored.dtype.itemsize == 1 else stored.to(torch.int8)


def decode_rows(rows: torch.Tensor, row: RowFormat, workspace: Workspace) -> torch.Tensor:
    """Return gathered rows in float32; fp8 per-tensor scales are left to the caller.

    Args:
        rows: ``[..., content]`` contiguous, in the cache's dtype.
        row: The format.
        workspace: Gives the memory.

    Returns:
        ``[..., head_size + value_size]`` contiguous; `rows` itself where it is that already.
    """
    if rows.dtype == torch.float32:
        return rows
    values = workspace.take("rows", (*rows.shape[:-1], row.num_values))
    stored = rows[..., : row.num_values]
    if rows.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        copy_float8(stored, values, workspace)
    else:
        values.copy_(stored)
    if row.has_own_scales:
        first = scale_offset(row.num_values) // 4
        scales = rows.view(torch.float32)[..., first : first + 2]
        values[..., : row.head_size].mul_(scales[..., :1])
        values[..., row.head_size :].mul_(scales[..., 1:])
    return values


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Store rows.

    Args:
        cache: ``[num_blocks, num_kv_heads, block_size, content]``, any strides.
        rows: ``[tokens, num_kv_heads, content]`` in the cache's dtype.
        slots: int64 ``[tokens]``, all within the cache.
    """
    block_size = cache.shape[2]
    blocks = slots // block_size
    by_token = as_bytes(cache).permute(0, 2, 1, 3)
    by_token[blocks, slots - blocks * block_size] = as_bytes(rows)
