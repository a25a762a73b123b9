"""What ``CPU_ATTN`` can do."""

from __future__ import annotations

from typing import ClassVar

import torch

from attnmux.backend import (
    AttentionBackend,
    AttentionType,
    CacheDType,
    KVCacheLayout,
    MultipleOf,
)
from attnmux_cpu.arguments import FLOAT_DTYPES
from attnmux_cpu.builder import CPUAttentionMetadataBuilder
from attnmux_cpu.impl import KV_CACHE_DTYPES, CPUAttentionImpl


class CPUAttentionBackend(AttentionBackend):
    """Paged attention in plain PyTorch: every feature, any head size, block size and layout."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(FLOAT_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(KV_CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Any."""
        return [MultipleOf(1)]

    @staticmethod
    def get_name() -> str:
        """``CPU_ATTN``."""
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionImpl]:
        """`CPUAttentionImpl`."""
        return CPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """`CPUAttentionMetadataBuilder`."""
        return CPUAttentionMetadataBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """All types."""
        return attn_type in list(AttentionType)

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_alibi(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_logits_soft_cap(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_per_request_causal(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_lse(cls) -> bool:
        """Yes, natural."""
        return True

    @classmethod
    def supports_kv_sharing(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No: requests of a group share tiles, whose widths depend on the others' lengths."""
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Any: strides are honoured."""
        return None
