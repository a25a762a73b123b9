"""Views into one layer's cache, and the plain write of a latent cache."""

from __future__ import annotations

import torch

from attnmux.checks import bad_argument, check_index_dtype, check_positive, check_tensor
from attnmux.kv_cache.dtypes import SCALE_BYTES, KVQuantMode, cache_dtype_handler, scale_offset


def split_kv(
    kv_cache: torch.Tensor, head_size: int, head_size_v: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value views of a layer's cache.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, content]`` with any strides.
        head_size: Size of a key head.
        head_size_v: Size of a value head; None: as a key head.

    Returns:
        ``[num_blocks, num_kv_heads, block_size, head_size]`` and the same with `head_size_v`.

    Raises:
        ValueError: The rows are shorter than the two.
    """
    end = _values_end(kv_cache, head_size, head_size_v)
    if kv_cache.shape[-1] < end:
        raise bad_argument("kv_cache.shape[-1]", kv_cache.shape[-1], f"at least {end}")
    return kv_cache[..., :head_size], kv_cache[..., head_size:end]


def _values_end(kv_cache: torch.Tensor, head_size: int, head_size_v: int | None) -> int:
    check_tensor("kv_cache", kv_cache)
    check_positive("head_size", head_size)
    if head_size_v is not None:
        check_positive("head_size_v", head_size_v)
    return head_size + (head_size if head_size_v is None else head_size_v)


def per_token_head_scales(
    kv_cache: torch.Tensor, head_size: int, head_size_v: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key and value scales that a cache with a scale for each token and head carries.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, content]`` of an 8-bit dtype, whose rows
            are as `CacheDTypeHandler.content_size` says.
        head_size: Size of a key head.
        head_size_v: Size of a value head; None: as a key head.

    Returns:
        Two float32 views ``[num_blocks, num_kv_heads, block_size]``; writing to them writes the
        cache.

    Raises:
        ValueError: The rows are too short, or not aligned to 4 bytes.
    """
    offset = scale_offset(_values_end(kv_cache, head_size, head_size_v))
    if kv_cache.dtype.itemsize != 1:
        raise bad_argument("kv_cache.dtype", kv_cache.dtype, "a dtype of 8 bits")
    end = offset + 2 * SCALE_BYTES
    if kv_cache.shape[-1] < end:
        raise bad_argument("kv_cache.shape[-1]", kv_cache.shape[-1], f"at least {end}")
    if kv_cache.storage_offset() % SCALE_BYTES or any(
        stride % SCALE_BYTES for stride in kv_cache.stride()[:-1]
    ):
        raise bad_argument(
            "kv_cache.stride()", list(kv_cache.stride()), "multiples of 4 but the last"
        )
    scales = kv_cache[..., offset:end].view(torch.float32)
    return scales[..., 0], scales[..., 1]


def write_mla_cache(
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
) -> None:
    """Write latent and rotated parts side by side into a latent cache, in plain torch.

    Args:
        kv_c_normed: ``[num_tokens, kv_lora_rank]``.
        k_pe: ``[num_tokens, qk_rope_head_dim]``.
        kv_cache: ``[num_blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim]``.
        slot_mapping: ``[n]`` int32 or int64, n at most num_tokens; a negative slot is not written.
        kv_cache_dtype: Name of the cache dtype; fp8 per tensor is stored as value / k_scale.
        k_scale: One float32 element.

    Raises:
        ValueError: An argument does not fit; nothing was written.
    """
    from attnmux.quant import saturating_cast

    check_tensor("kv_c_normed", kv_c_normed, shape=("num_tokens", "kv_lora_rank"))
    if not kv_c_normed.dtype.is_floating_point:
        raise bad_argument("kv_c_normed.dtype", kv_c_normed.dtype, "a floating-point dtype")
    check_tensor("k_pe", k_pe)
    check_tensor("slot_mapping", slot_mapping)
    latent, rope = kv_c_normed.shape[-1], k_pe.shape[-1]
    handler = cache_dtype_handler(kv_cache_dtype)
    if handler.row_size is not None or handler.quant_mode not in (
        KVQuantMode.NONE,
        KVQuantMode.FP8_PER_TENSOR,
    ):
        raise bad_argument(
            "kv_cache_dtype", repr(kv_cache_dtype), "a plain or fp8 per-tensor dtype"
        )
    check_tensor("kv_cache", kv_cache, shape=("num_blocks", 1, "block_size", latent + rope))
    storage = handler.resolve_storage_dtype(kv_c_normed.dtype)
    check_tensor("kv_cache", kv_cache, dtype=storage, device=kv_c_normed.device)
    check_tensor("k_pe", k_pe, shape=(kv_c_normed.shape[0], rope), dtype=kv_c_normed.dtype)
    if handler.quant_mode != KVQuantMode.NONE:
        check_tensor("k_scale", k_scale, dtype=torch.float32)
    check_index_dtype("slot_mapping", slot_mapping)
    if slot_mapping.ndim != 1 or slot_mapping.shape[0] > kv_c_normed.shape[0]:
        raise bad_argument(
            "slot_mapping.shape", list(slot_mapping.shape), f"[at most {kv_c_normed.shape[0]}]"
        )
    num_slots = kv_cache.shape[0] * kv_cache.shape[2]
    if slot_mapping.device.type == "cpu" and (slot_mapping >= num_slots).any():
        raise bad_argument("slot_mapping", int(slot_mapping.max()), f"below {num_slots}")
    rows = torch.cat([kv_c_normed, k_pe], dim=-1)[: slot_mapping.shape[0]]
    if handler.quant_mode == KVQuantMode.FP8_PER_TENSOR:
        rows = saturating_cast(rows.float() / k_scale, storage)
    rows = rows.to(storage)
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    block_size = kv_cache.shape[2]
    # Indexing is not there for float8 on every device; the bytes are.
    target = kv_cache.view(torch.uint8) if storage.itemsize == 1 else kv_cache
    source = rows.view(torch.uint8) if storage.itemsize == 1 else rows
    target[slots // block_size, 0, slots % block_size] = source[written]
