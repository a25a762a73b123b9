"""What one layer's cache must hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from attnmux.checks import bad_argument, check_positive, check_sliding_window
from attnmux.kv_cache.dtypes import (
    CacheDType,
    CacheDTypeHandler,
    KVQuantMode,
    cache_dtype_handler,
)


@dataclass(frozen=True)
class KVCacheSpec:
    """The cache format of one layer; `block_size` is in tokens."""

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return the same format in blocks of another size."""
        return replace(self, block_size=block_size)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Return the one format that all `specs` are.

        Raises:
            ValueError: They differ, or there is none.
        """
        if not specs or any(spec != specs[0] for spec in specs):
            raise bad_argument("specs", specs, "one or more equal specs")
        return specs[0]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """The cache of a layer with keys and values.

    Attributes:
        num_kv_heads: Key and value heads of this rank.
        head_size: Size of a key head.
        dtype: Dtype of the cache tensor.
        kv_quant_mode: How values are quantised.
        head_size_v: Size of a value head; None: as a key head.
        page_size_padded: Bytes of a block where they are more than the values need.
        cache_dtype_str: Name of the cache dtype; None: as `dtype` and `kv_quant_mode` say.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    head_size_v: int | None = None
    page_size_padded: int | None = None
    cache_dtype_str: str | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive, and padding that cuts into the values."""
        check_positive("block_size", self.block_size)
        check_positive("num_kv_heads", self.num_kv_heads)
        check_positive("head_size", self.head_size)
        if self.head_size_v is not None:
            check_positive("head_size_v", self.head_size_v)
        if not isinstance(self.dtype, torch.dtype):
            raise bad_argument("dtype", repr(self.dtype), "a torch.dtype")
        if self.page_size_padded is not None and self.page_size_padded < self.real_page_size_bytes:
            raise bad_argument(
                "page_size_padded", self.page_size_padded, f"at least {self.real_page_size_bytes}"
            )

    @classmethod
    def for_layer(
        cls,
        *,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType = "auto",
        **fields: Any,
    ) -> Self:
        """Return the spec of a layer of a model of `dtype`, whose cache is of `kv_cache_dtype`.

        Raises:
            ValueError: No such cache dtype, or a size is not positive.
        """
        handler = cache_dtype_handler(kv_cache_dtype)
        if handler.row_size is not None and not issubclass(cls, MLAAttentionSpec):
            raise bad_argument("kv_cache_dtype", repr(kv_cache_dtype), "a dtype that is not latent")
        return cls(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=handler.resolve_storage_dtype(dtype),
            kv_quant_mode=handler.quant_mode,
            cache_dtype_str=kv_cache_dtype,
            **fields,
        )

    @property
    def value_size(self) -> int:
        """Size of a value head."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def content_size(self) -> int:
        """Elements of one (block, head, token) row."""
        return self._handler.content_size(self.head_size, self.value_size, self.dtype.itemsize)

    @property
    def _handler(self) -> CacheDTypeHandler:
        if self.cache_dtype_str is not None:
            return cache_dtype_handler(self.cache_dtype_str)
        packed = 2 if self.kv_quant_mode == KVQuantMode.INT4_PER_TOKEN_HEAD else 1
        return CacheDTypeHandler("", self.dtype, self.kv_quant_mode, packed)

    @property
    def layer_shape(self) -> tuple[int, int, int]:
        """``(num_kv_heads, block_size, content_size)``: the shape of one block of the layer."""
        return (self.num_kv_heads, self.block_size, self.content_size)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one block without padding."""
        return self.block_size * self.num_kv_heads * self.content_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, padding included."""
        return self.page_size_padded or self.real_page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return the same format in blocks of another size; padding grows in proportion."""
        padded = self.page_size_padded
        if padded is not None:
            padded = padded * block_size // self.block_size
        return replace(self, block_size=block_size, page_size_padded=padded)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer that keeps all its tokens, though a window or chunks may limit what it looks at."""

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse a window together with chunks."""
        super().__post_init__()
        check_sliding_window(self.sliding_window)
        if self.attention_chunk_size is not None:
            check_positive("attention_chunk_size", self.attention_chunk_size)
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise bad_argument(
                "attention_chunk_size", self.attention_chunk_size, "None beside a sliding window"
            )


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer of which only the last `sliding_window` tokens are kept."""

    sliding_window: int

    def __post_init__(self) -> None:
        """Refuse a window of no token."""
        super().__post_init__()
        check_positive("sliding_window", self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer that attends inside chunks of `attention_chunk_size` tokens."""

    attention_chunk_size: int

    def __post_init__(self) -> None:
        """Refuse a chunk of no token."""
        super().__post_init__()
        check_positive("attention_chunk_size", self.attention_chunk_size)


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """A latent cache: one row of ``kv_lora_rank + qk_rope_head_dim`` elements a token."""

    num_kv_heads: int = 1

    @classmethod
    def for_layer(
        cls,
        *,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
        num_kv_heads: int = 1,
        kv_cache_dtype: CacheDType = "auto",
        **fields: Any,
    ) -> Self:
        """As `AttentionSpec.for_layer`; `head_size` is the width of a row."""
        return super().for_layer(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            **fields,
        )

    @property
    def value_size(self) -> int:
        """0: values are the latent part of the keys."""
        return 0


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """A layer that keeps no cache."""

    @property
    def page_size_bytes(self) -> int:
        """0: nothing is kept."""
        return 0


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """A cross-attention layer, which keeps the encoder's tokens."""
