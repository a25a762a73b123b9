"""The porting surface: every name of the contract, from one place.

A backend written against the interface this contract grew from changes its import line to
``from attnmux.backend import …`` and nothing else.
"""

from __future__ import annotations

from attnmux.abc.attention_type import AttentionType
from attnmux.abc.backend import (
    AttentionBackend,
    MultipleOf,
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
)
from attnmux.abc.builder import AttentionCGSupport, AttentionMetadataBuilder, M
from attnmux.abc.impl import (
    AttentionImpl,
    AttentionImplBase,
    AttentionLayer,
)
from attnmux.abc.metadata import AttentionMetadata, CommonAttentionMetadata, T
from attnmux.abc.mla_impl import MLAAttentionImpl
from attnmux.kv_cache import (
    AttentionSpec,
    CacheDType,
    KVCacheLayout,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from attnmux.platform import DeviceCapability
from attnmux.quant import (
    GroupShape,
    QuantKey,
    ScaleDesc,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)

__all__ = [
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionImplBase",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionSpec",
    "AttentionType",
    "CacheDType",
    "CommonAttentionMetadata",
    "DeviceCapability",
    "GroupShape",
    "KVCacheLayout",
    "KVCacheSpec",
    "KVQuantMode",
    "M",
    "MLAAttentionImpl",
    "MLAAttentionSpec",
    "MultipleOf",
    "QuantKey",
    "ScaleDesc",
    "SlidingWindowSpec",
    "T",
    "get_kv_quant_mode",
    "kFp8Dynamic64Sym",
    "kFp8Dynamic128Sym",
    "kFp8StaticTensorSym",
    "kNvfp4Dynamic",
    "subclass_attention_backend",
    "subclass_attention_backend_with_overrides",
]
