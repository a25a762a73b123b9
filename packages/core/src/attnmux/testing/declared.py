"""What a backend says of itself: sizes, dtypes, layouts. Read from the backend, never listed here.

Features are not in this module: whether one is there is the backend's answer to the request of a
scenario (`attnmux.testing.road.reasons_against`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.abc.backend import AttentionBackend, MultipleOf
from attnmux.kv_cache import KVCacheLayout
from attnmux.testing.paged_read import KNOWN_CACHE_DTYPES

_ANY_HEAD_SIZE = (64, 80, 40, 96, 128, 192, 256)
"""Tried where a backend takes any: powers of two and what models have beside them."""
_MULTIPLES = (1, 2, 3)
_ANY_BLOCK_SIZE = (16, 8, 12, 1, 48, 32, 128, 256, 528)
"""Tried where any is declared: usual ones, no power of two, one token, sizes of hybrid models."""
_QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Declared:
    """Values that scenarios for one backend are drawn from; usual ones first."""

    head_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    cache_dtypes: tuple[str, ...]
    unknown_cache_dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...]
    layouts: tuple[str, ...]
    undeclared: tuple[tuple[str, str, str, Any], ...] = ()
    """What it does not take and must refuse: scenario, row of the report, field, value."""

    @classmethod
    def by(cls, backend: type[AttentionBackend]) -> Declared:
        """Ask `backend`."""
        names = list(backend.supported_kv_cache_dtypes) or list(KNOWN_CACHE_DTYPES)
        layouts = backend.supported_kv_cache_layouts() or tuple(KVCacheLayout)
        sizes = backend.get_supported_head_sizes() or _ANY_HEAD_SIZE
        return cls(
            head_sizes=tuple(size for size in sizes if backend.supports_head_size(size)),
            dtypes=tuple(
                dtype_name(dtype) for dtype in _QUERY_DTYPES if backend.supports_dtype(dtype)
            ),
            cache_dtypes=tuple(name for name in KNOWN_CACHE_DTYPES if name in names),
            unknown_cache_dtypes=tuple(name for name in names if name not in KNOWN_CACHE_DTYPES),
            block_sizes=_block_sizes(backend),
            layouts=tuple(layout.name for layout in layouts),
            undeclared=tuple(_undeclared(backend, [layout.name for layout in layouts])),
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return `torch.bfloat16` for "bfloat16"."""
    dtype: Any = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _undeclared(
    backend: type[AttentionBackend], layouts: list[str]
) -> Iterator[tuple[str, str, str, Any]]:
    """Yield a dtype, head size, block size and layout of each kind that the backend declines."""
    for dtype in _QUERY_DTYPES:
        if not backend.supports_dtype(dtype):
            name = dtype_name(dtype)
            yield f"dtype_{name}", "dtypes", "dtype", name
    for size in _ANY_HEAD_SIZE:
        if not backend.supports_head_size(size):
            yield f"head_size_{size}", "head sizes", "head_size", size
            break
    for size in _ANY_BLOCK_SIZE:
        if not backend.supports_block_size(size):
            yield f"block_size_{size}", "block sizes", "block_size", size
            break
    for layout in KVCacheLayout:
        if layout.name not in layouts:
            yield f"layout_{layout.name}", "cache layouts", "layout", layout.name


def _block_sizes(backend: type[AttentionBackend]) -> tuple[int, ...]:
    declared = backend.get_supported_kernel_block_sizes() or [MultipleOf(1)]
    sizes: list[int] = []
    for size in declared:
        if not isinstance(size, MultipleOf):
            sizes.append(size)
        elif size.base == 1:
            sizes.extend(_ANY_BLOCK_SIZE)
        else:
            sizes.extend(size.base * times for times in _MULTIPLES)
    return tuple(size for size in dict.fromkeys(sizes) if backend.supports_block_size(size))
