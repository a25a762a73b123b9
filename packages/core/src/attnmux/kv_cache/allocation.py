"""One flat buffer for all layers, seen by each as its own logical cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from attnmux.checks import bad_argument, check_positive
from attnmux.kv_cache.dtypes import ROW_ALIGNMENT
from attnmux.kv_cache.layout import LAYOUT_PREFERENCE, KVCacheLayout
from attnmux.kv_cache.spec import AttentionSpec

if TYPE_CHECKING:
    from attnmux.abc.backend import AttentionBackend


@dataclass(frozen=True)
class KVCacheAllocation:
    """A cache: its one buffer and what each layer sees of it.

    Attributes:
        buffer: int8, one dimension; all bytes of all layers.
        views: Layer name to ``[num_blocks, num_kv_heads, block_size, content]``.
        layout: The order in memory.
        num_blocks: Blocks of each layer.
    """

    buffer: torch.Tensor
    views: dict[str, torch.Tensor]
    layout: KVCacheLayout
    num_blocks: int


def resolve_layout(
    backends: Mapping[str, type[AttentionBackend]], prefer: KVCacheLayout | None = None
) -> KVCacheLayout:
    """Return the layout that the backends of all layers can read.

    Args:
        backends: Layer name to the backend chosen for it.
        prefer: The layout wanted by the user, if any.

    The first backend with a preference decides among those that all can read.

    Raises:
        ValueError: No layout suits all, or `prefer` does not; the text says which backend reads
            what.
    """
    stated: dict[str, tuple[KVCacheLayout, ...]] = {}
    for backend in backends.values():
        layouts = backend.supported_kv_cache_layouts()
        if layouts is not None:
            stated[backend.get_name()] = layouts
    order = next(iter(stated.values()), LAYOUT_PREFERENCE)
    common = [layout for layout in order if all(layout in other for other in stated.values())]
    readable = "; ".join(
        f"{name} reads {', '.join(layout.name for layout in layouts) or 'none'}"
        for name, layouts in stated.items()
    )
    if not common:
        raise ValueError(f"no KV cache layout suits all layers: {readable}")
    if prefer is None:
        return common[0]
    if prefer not in common:
        raise bad_argument(
            "prefer", prefer.name, f"{' | '.join(layout.name for layout in common)} ({readable})"
        )
    return prefer


def allocate(
    specs: Mapping[str, AttentionSpec],
    num_blocks: int,
    layout: KVCacheLayout,
    device: torch.device | str = "cpu",
) -> KVCacheAllocation:
    """Allocate a zeroed cache for all layers in one buffer.

    Args:
        specs: Layer name to the spec that the layer's backend has customised. Layers whose pages
            are of no size get an empty view.
        num_blocks: Blocks of each layer.
        layout: As `resolve_layout` found it.
        device: Where the buffer is kept.

    Raises:
        ValueError: `num_blocks` is not positive, `layout` is no `KVCacheLayout`, or layers whose
            pages differ cannot be kept in it: it interleaves layers inside a page, or cuts a page
            in two.
    """
    check_positive("num_blocks", num_blocks)
    if not isinstance(layout, KVCacheLayout):
        raise bad_argument("layout", repr(layout), "a KVCacheLayout, as resolve_layout returns it")
    kept = {name: spec for name, spec in specs.items() if spec.page_size_bytes}
    _check_mixed(kept, layout)
    page_bytes = {name: _aligned_page(spec, kept) for name, spec in kept.items()}
    buffer = torch.zeros(num_blocks * sum(page_bytes.values()), dtype=torch.int8, device=device)
    views: dict[str, torch.Tensor] = {}
    offset = 0
    for name, spec in specs.items():
        if name not in kept:
            views[name] = torch.empty(0, dtype=spec.dtype, device=device)
        elif layout.is_block_compact:
            step = page_bytes[name] if layout.is_layer_compact else sum(page_bytes.values())
            views[name] = _page_view(buffer, spec, num_blocks, layout, offset, step)
            offset += page_bytes[name] * (num_blocks if layout.is_layer_compact else 1)
        else:
            place = list(kept).index(name)
            views[name] = _interleaved_view(buffer, spec, num_blocks, layout, place, len(kept))
    return KVCacheAllocation(buffer, views, layout, num_blocks)


def _aligned_page(spec: AttentionSpec, kept: Mapping[str, AttentionSpec]) -> int:
    # Pages of different layers follow each other: each must begin where the widest element, or the
    # scales inside a row, may begin.
    alignment = max(
        ROW_ALIGNMENT if other.kv_quant_mode.is_per_token_head else other.dtype.itemsize
        for other in kept.values()
    )
    return -(-spec.page_size_bytes // alignment) * alignment


def _check_mixed(kept: Mapping[str, AttentionSpec], layout: KVCacheLayout) -> None:
    if layout.is_block_compact or not kept:
        return
    shapes = {(spec.layer_shape, spec.dtype) for spec in kept.values()}
    padded = [name for name, spec in kept.items() if spec.page_size_padded is not None]
    if len(shapes) > 1 or padded:
        allowed = " | ".join(other.name for other in KVCacheLayout if other.is_block_compact)
        raise bad_argument(
            "layout", f"{layout.name} for layers whose pages differ or are padded", allowed
        )


def _page_view(
    buffer: torch.Tensor,
    spec: AttentionSpec,
    num_blocks: int,
    layout: KVCacheLayout,
    offset: int,
    step: int,
) -> torch.Tensor:
    itemsize = spec.dtype.itemsize
    order = layout.layer_view_order  # begins with the block
    shape = (num_blocks, *spec.layer_shape)
    strides = [0, 0, 0, 1]
    strides[0] = step // itemsize
    run = 1
    for dim in reversed(order[1:]):
        strides[dim] = run
        run *= shape[dim]
    return torch.as_strided(buffer.view(spec.dtype), shape, strides, offset // itemsize)


def _interleaved_view(
    buffer: torch.Tensor,
    spec: AttentionSpec,
    num_blocks: int,
    layout: KVCacheLayout,
    place: int,
    num_layers: int,
) -> torch.Tensor:
    logical = (num_layers, num_blocks, *spec.layer_shape)
    order = layout.stride_order
    physical = [logical[dim] for dim in order]
    flat = buffer.view(spec.dtype)[: prod(physical)].view(physical)
    return flat.permute([order.index(dim) for dim in range(5)])[place]
