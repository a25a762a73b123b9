"""Write keys and values into a paged cache by the plainest road, and judge how a backend did it.

The twin of `attnmux.testing.paged_read`: the kit fills a scenario's history with it, and knows from
it what a backend's own cache write should leave behind.
"""

from __future__ import annotations

import torch

from attnmux.checks import bad_argument
from attnmux.testing.paged_read import (
    KNOWN_CACHE_DTYPES,
    PER_TOKEN_HEAD_CACHE_DTYPES,
    PLAIN_CACHE_DTYPES,
    SCALED_CACHE_DTYPES,
    CacheContent,
    read_rows,
)

_INT8_MAX = 127.0
_SLACK = 1.02  # dividing and multiplying by the reciprocal may fall on either side of a tie


def write_rows(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    content: CacheContent,
) -> None:
    """Write row ``i`` of `key` and `value` to ``slots[i]``, in place; negative slots are skipped.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, content]``, any strides.
        slots: ``[n]`` block times block size plus offset.
        key, value: ``[n, num_kv_heads, head_size]`` and ``[n, num_kv_heads, head_size_v]``.
        content: sizes, cache dtype and scales.

    Raises:
        ValueError: the cache dtype is not one that this writer knows.
    """
    block_size = kv_cache.shape[2]
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        target = kv_cache[slot // block_size, :, slot % block_size]  # [num_kv_heads, content]
        _write_row(target, key[row], value[row], content)


def _write_row(
    target: torch.Tensor, key: torch.Tensor, value: torch.Tensor, content: CacheContent
) -> None:
    end_of_key = content.head_size
    end_of_value = end_of_key + content.head_size_v
    if content.kv_cache_dtype in PLAIN_CACHE_DTYPES:
        target[:, :end_of_key] = key.to(target.dtype)
        target[:, end_of_key:end_of_value] = value.to(target.dtype)
    elif content.kv_cache_dtype in SCALED_CACHE_DTYPES:
        target[:, :end_of_key] = _saturate(key, content.k_scale, target.dtype)
        target[:, end_of_key:end_of_value] = _saturate(value, content.v_scale, target.dtype)
    elif content.kv_cache_dtype in PER_TOKEN_HEAD_CACHE_DTYPES:
        quantised_key, key_scale = _per_token_head(key, target.dtype)
        quantised_value, value_scale = _per_token_head(value, target.dtype)
        target[:, :end_of_key] = quantised_key
        target[:, end_of_key:end_of_value] = quantised_value
        first_scale = -(-end_of_value // 4) * 4
        scales = torch.stack([key_scale, value_scale], dim=-1).view(target.dtype)
        target[:, first_scale : first_scale + 8] = scales
    else:
        known = " | ".join(KNOWN_CACHE_DTYPES)
        raise bad_argument("kv_cache_dtype", repr(content.kv_cache_dtype), known)


def _saturate(x: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Divide by the scale and round to `dtype`, its largest value at most."""
    divisor = torch.as_tensor(scale, dtype=torch.float32, device=x.device).reshape(-1, 1)
    limit = torch.finfo(dtype).max
    return (x.float() / divisor).clamp(-limit, limit).to(dtype)


def _per_token_head(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[num_kv_heads, size]`` of an 8-bit dtype, and a float32 scale for each head."""
    largest = _INT8_MAX if dtype == torch.int8 else torch.finfo(dtype).max
    amax = x.float().abs().amax(dim=-1)
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / largest)
    scaled = x.float() / scale.unsqueeze(-1)
    if dtype == torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype), scale


def write_complaint(
    written: torch.Tensor,
    expected: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    content: CacheContent,
) -> str | None:
    """Say how a backend's write differs from the right one by more than the fall of a tie.

    Args:
        written, expected: the cache after the backend's write, and after `write_rows`.
        slots, key, value, content: as in `write_rows`.

    Returns:
        One sentence with the first bad row, or None.
    """
    rows = (slots >= 0).nonzero().flatten()
    if rows.numel() == 0:
        return None
    block_size = expected.shape[2]
    blocks, offsets = slots[rows] // block_size, slots[rows] % block_size
    got = read_rows(written, blocks, offsets, content)
    best = read_rows(expected, blocks, offsets, content)
    for name, source, got_part, best_part in zip(
        ("key", "value"), (key, value), got, best, strict=True
    ):
        exact = source[rows].double()
        allowed = (best_part - exact).abs() * _SLACK + exact.abs() * 1e-6
        bad = ~((got_part - exact).abs() <= allowed) & ~(got_part.isnan() & exact.isnan())
        if bool(bad.any()):
            row, head, dim = bad.nonzero()[0].tolist()
            return (
                f"cache write: {name} of row {int(rows[row])}, KV head {head}, element {dim} reads "
                f"back as {got_part[row, head, dim]:.6g}; expected {best_part[row, head, dim]:.6g} "
                f"(stored from {exact[row, head, dim]:.6g} as {content.kv_cache_dtype})"
            )
    return None
