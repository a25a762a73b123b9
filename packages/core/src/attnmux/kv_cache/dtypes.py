"""Names of cache dtypes, and what each says about storage.

A plugin may add names through the hook ``attnmux_kv_cache_dtypes``; those here are always known.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

import torch

from attnmux.checks import bad_argument

CacheDType: TypeAlias = str
"""Name of a cache dtype: one of `registered_cache_dtypes()`."""

SCALE_BYTES: Final = 4
"""Bytes of one float32 scale kept inside a row of the cache."""
ROW_ALIGNMENT: Final = 16
"""Rows that carry scales are padded to this many bytes, so that each can be read in wide loads."""


class KVQuantMode(IntEnum):
    """How a cache is quantised."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    NVFP4 = 4
    INT4_PER_TOKEN_HEAD = 5

    @property
    def is_per_token_head(self) -> bool:
        """Whether each token and head has a scale of its own, kept in the cache."""
        return self in (
            KVQuantMode.INT8_PER_TOKEN_HEAD,
            KVQuantMode.FP8_PER_TOKEN_HEAD,
            KVQuantMode.INT4_PER_TOKEN_HEAD,
        )

    @property
    def is_nvfp4(self) -> bool:
        """Whether values are packed fp4 with block scales."""
        return self == KVQuantMode.NVFP4


@dataclass(frozen=True)
class CacheDTypeHandler:
    """One cache dtype.

    Attributes:
        name: What users write.
        storage_dtype: Dtype of the cache tensor; None: that of the model.
        quant_mode: How values are quantised.
        values_per_element: Values packed in one element (2 for four-bit dtypes).
        row_size: For latent caches of a fixed form, elements of a row whatever the head size.
    """

    name: str
    storage_dtype: torch.dtype | None
    quant_mode: KVQuantMode = KVQuantMode.NONE
    values_per_element: int = 1
    row_size: int | None = None

    def resolve_storage_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the cache tensor for a model of `model_dtype`."""
        return model_dtype if self.storage_dtype is None else self.storage_dtype

    def content_size(self, head_size: int, head_size_v: int, itemsize: int = 1) -> int:
        """Return the elements of one (block, head, token) row.

        Keys come first, then values (`head_size_v` 0 for a latent cache). With a scale for each
        token and head, two float32 scales follow at the next multiple of 4 bytes, key's first, and
        the row is padded to `ROW_ALIGNMENT` bytes.
        """
        if self.row_size is not None:
            return self.row_size
        values = -(-(head_size + head_size_v) // self.values_per_element)
        if not self.quant_mode.is_per_token_head:
            return values
        num_bytes = scale_offset(values * itemsize) + 2 * SCALE_BYTES
        return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT // itemsize


def scale_offset(num_value_bytes: int) -> int:
    """Return the byte at which a row's scales begin, after its values."""
    return -(-num_value_bytes // SCALE_BYTES) * SCALE_BYTES


_FP8 = KVQuantMode.FP8_PER_TENSOR
_BUILT_IN = (
    CacheDTypeHandler("auto", None),
    CacheDTypeHandler("float32", torch.float32),
    CacheDTypeHandler("float16", torch.float16),
    CacheDTypeHandler("bfloat16", torch.bfloat16),
    CacheDTypeHandler("fp8", torch.float8_e4m3fn, _FP8),
    CacheDTypeHandler("fp8_e4m3", torch.float8_e4m3fn, _FP8),
    CacheDTypeHandler("fp8_e5m2", torch.float8_e5m2, _FP8),
    CacheDTypeHandler("int8_per_token_head", torch.int8, KVQuantMode.INT8_PER_TOKEN_HEAD),
    CacheDTypeHandler("fp8_per_token_head", torch.float8_e4m3fn, KVQuantMode.FP8_PER_TOKEN_HEAD),
    CacheDTypeHandler("int4_per_token_head", torch.uint8, KVQuantMode.INT4_PER_TOKEN_HEAD, 2),
    # 512 fp8 values, four float32 scales, 64 bfloat16 rotated values: 656 bytes a token.
    CacheDTypeHandler("fp8_ds_mla", torch.uint8, _FP8, row_size=656),
)
_handlers: dict[str, CacheDTypeHandler] = {handler.name: handler for handler in _BUILT_IN}


def registered_cache_dtypes() -> tuple[str, ...]:
    """Return the names of all cache dtypes, those of plugins included."""
    return tuple(_handlers)


def register_cache_dtype(handler: CacheDTypeHandler) -> None:
    """Make a cache dtype known. The same handler twice is nothing.

    Raises:
        ValueError: The name is taken by another handler.
    """
    known = _handlers.setdefault(handler.name, handler)
    if known != handler:
        raise bad_argument("handler", handler, f"a new name; {handler.name!r} is {known}")


def cache_dtype_handler(name: CacheDType) -> CacheDTypeHandler:
    """Return what is known of a cache dtype.

    Raises:
        ValueError: No such name; the closest one is suggested.
    """
    if name not in _handlers:
        _ask_plugins()
    if name not in _handlers:
        close = difflib.get_close_matches(str(name), _handlers, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise bad_argument("kv_cache_dtype", repr(name) + hint, " | ".join(_handlers))
    return _handlers[name]


def _ask_plugins() -> None:
    # Plugins bring their dtypes when they are first asked, which happens once in a process.
    from attnmux.plugins import get_registry

    get_registry().plugins()


def get_kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """Return how a cache of this dtype is quantised; a name that is not known is not quantised."""
    if kv_cache_dtype == "nvfp4":
        return KVQuantMode.NVFP4
    handler = _handlers.get(kv_cache_dtype)
    return KVQuantMode.NONE if handler is None else handler.quant_mode
