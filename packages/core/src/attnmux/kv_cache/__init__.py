"""The paged KV cache: how values are stored, in which order in memory, and how it is allocated."""

from __future__ import annotations

from attnmux.kv_cache.allocation import KVCacheAllocation, allocate, resolve_layout
from attnmux.kv_cache.dtypes import (
    CacheDType,
    CacheDTypeHandler,
    KVQuantMode,
    cache_dtype_handler,
    get_kv_quant_mode,
    register_cache_dtype,
    registered_cache_dtypes,
)
from attnmux.kv_cache.layout import KVCacheLayout
from attnmux.kv_cache.rows import per_token_head_scales, split_kv, write_mla_cache
from attnmux.kv_cache.spec import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

__all__ = [
    "AttentionSpec",
    "CacheDType",
    "CacheDTypeHandler",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "KVCacheAllocation",
    "KVCacheLayout",
    "KVCacheSpec",
    "KVQuantMode",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "allocate",
    "cache_dtype_handler",
    "get_kv_quant_mode",
    "per_token_head_scales",
    "register_cache_dtype",
    "registered_cache_dtypes",
    "resolve_layout",
    "split_kv",
    "write_mla_cache",
]
