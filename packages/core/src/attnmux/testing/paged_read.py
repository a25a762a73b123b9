"""Read keys and values out of a paged cache, in float64.

The conformance kit's own reader, written apart from `attnmux.kv_cache` on purpose: when a backend
or the core computes a wrong place or a wrong scale, the two disagree. A layer's cache is logically
``[num_blocks, num_kv_heads, block_size, content]`` with any strides; a row of ``content`` holds the
key, then the value, then whatever the cache dtype appends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attnmux.checks import bad_argument

SCALED_CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Stored value times the layer's scale is the value."""

PLAIN_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")
"""Stored value is the value."""

PER_TOKEN_HEAD_CACHE_DTYPES = ("int8_per_token_head", "fp8_per_token_head")
"""Each row carries a float32 scale for its key and one for its value, behind both."""


KNOWN_CACHE_DTYPES = PLAIN_CACHE_DTYPES + SCALED_CACHE_DTYPES + PER_TOKEN_HEAD_CACHE_DTYPES
"""Cache dtypes that the kit can judge."""


class CacheContent(NamedTuple):
    """How to read one layer's cache."""

    head_size: int
    head_size_v: int
    kv_cache_dtype: str = "auto"
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0


def read_rows(
    kv_cache: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    content: CacheContent,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of cache rows, as float64.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, content]``, any strides.
        blocks: ``[n]`` block of each row.
        offsets: ``[n]`` place of each row inside its block.
        content: sizes, cache dtype and scales.

    Returns:
        keys ``[n, num_kv_heads, head_size]`` and values ``[n, num_kv_heads, head_size_v]``.

    Raises:
        ValueError: the cache dtype is not one that this reader knows.
    """
    rows = kv_cache[blocks.long(), :, offsets.long()]  # [n, num_kv_heads, content]
    end_of_key = content.head_size
    end_of_value = content.head_size + content.head_size_v
    keys = rows[..., :end_of_key].double()
    values = rows[..., end_of_key:end_of_value].double()
    if content.kv_cache_dtype in PLAIN_CACHE_DTYPES:
        return keys, values
    if content.kv_cache_dtype in SCALED_CACHE_DTYPES:
        k_scale, v_scale = (_per_head(x, rows) for x in (content.k_scale, content.v_scale))
        return keys * k_scale, values * v_scale
    if content.kv_cache_dtype in PER_TOKEN_HEAD_CACHE_DTYPES:
        first_scale = -(-end_of_value // 4) * 4  # scales start on a multiple of four bytes
        scale_bytes = rows[..., first_scale : first_scale + 8].contiguous()
        scales = scale_bytes.view(torch.float32).double()  # [n, num_kv_heads, 2]
        return keys * scales[..., :1], values * scales[..., 1:]
    known = " | ".join(KNOWN_CACHE_DTYPES)
    raise bad_argument("kv_cache_dtype", repr(content.kv_cache_dtype), known)


def read_sequence(
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    num_keys: int,
    content: CacheContent,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `num_keys` keys and values of one request, as float64.

    Only the first ``ceil(num_keys / block_size)`` entries of `block_table_row` are looked at.
    """
    block_size = kv_cache.shape[2]
    positions = torch.arange(num_keys, device=kv_cache.device)
    num_blocks = -(-num_keys // block_size)
    blocks = block_table_row[:num_blocks].to(kv_cache.device)[positions // block_size]
    return read_rows(kv_cache, blocks, positions % block_size, content)


def _per_head(scale: float | torch.Tensor, rows: torch.Tensor) -> float | torch.Tensor:
    """Shape a scale so that it multiplies `rows`, ``[n, num_kv_heads, size]``."""
    if not isinstance(scale, torch.Tensor):
        return float(scale)
    scale = scale.to(rows.device)
    return scale.double().reshape(-1, 1) if scale.numel() > 1 else scale.double().reshape(())
