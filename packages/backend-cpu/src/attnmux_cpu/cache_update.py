"""Writing a layer's cache: alone, after rotary embedding, or after norm and rotary embedding.

Each form checks everything before it writes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

import torch

from attnmux.checks import bad_argument, check_index_dtype, check_tensor
from attnmux.kv_cache import CacheDTypeHandler, KVQuantMode
from attnmux_cpu import arguments
from attnmux_cpu.kernels.cache_rows import RowFormat, encode_rows, write_rows
from attnmux_cpu.kernels.rotary import normalised, rotated
from attnmux_cpu.kernels.tiles import HeadShape

Scales: TypeAlias = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
"""Of stored keys and values, where the dtype has any."""


@dataclass(frozen=True)
class Rotation:
    """By which angles tokens are turned.

    Attributes:
        positions: ``[num_tokens]``.
        cos_sin_cache: ``[max_position, rotary_dim]``: cosines, then sines.
        is_neox: Whether halves turn against each other, not neighbours.
    """

    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    is_neox: bool

    def check(self, num_tokens: int, head_size: int) -> Rotation:
        """Return it with int64 positions.

        Raises:
            ValueError: A shape, dtype or device does not fit, or a position is not in the table.
        """
        check_tensor("positions", self.positions, shape=(num_tokens,), device="cpu")
        check_index_dtype("positions", self.positions)
        table = self.cos_sin_cache
        check_tensor(
            "cos_sin_cache",
            table,
            shape=("max_position", "rotary_dim"),
            dtype=arguments.FLOAT_DTYPES,
            device="cpu",
        )
        if table.shape[1] % 2 or not 0 < table.shape[1] <= head_size:
            raise bad_argument(
                "cos_sin_cache.shape[1]", table.shape[1], f"an even number up to {head_size}"
            )
        positions = self.positions.long()
        if positions.numel():
            low, high = (int(end) for end in positions.aminmax())
            if low < 0 or high >= table.shape[0]:
                raise bad_argument(
                    "positions", low if low < 0 else high, f"0 to {table.shape[0] - 1}"
                )
        return Rotation(positions, table, self.is_neox)

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, num_heads, head_size]`` turned, float32."""
        return rotated(heads, self.positions, self.cos_sin_cache, self.is_neox)


@dataclass(frozen=True)
class HeadNorm:
    """Weights ``[head_size]`` of the norms of query and key heads, and what keeps them finite."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float

    def check(self, head_size: int) -> None:
        """Raise `ValueError` where a weight does not fit."""
        for name, weight in (("q_weight", self.query_weight), ("k_weight", self.key_weight)):
            check_tensor(
                name, weight, shape=(head_size,), dtype=arguments.FLOAT_DTYPES, device="cpu"
            )
        if not isinstance(self.eps, Real) or not 0 <= self.eps < float("inf"):
            raise bad_argument("rms_norm_eps", self.eps, "a number of at least 0")


@dataclass(frozen=True)
class _Write:
    """A checked write: rows of new keys and values, and where they go."""

    cache: torch.Tensor
    row: RowFormat
    scales: Scales
    rows: torch.Tensor | None
    slots: torch.Tensor

    def run(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``[tokens, num_kv_heads, size]`` keys and values."""
        if not self.slots.numel():
            return
        chosen: slice | torch.Tensor = slice(0, self.slots.shape[0])
        if self.rows is not None:
            chosen = self.rows
        encoded = encode_rows(key[chosen], value[chosen], self.row, *self.scales)
        write_rows(self.cache, encoded, self.slots)


@dataclass(frozen=True)
class CacheUpdate:
    """How one layer stores keys and values.

    Attributes:
        heads: The layer's heads.
        handler: The cache's dtype.
    """

    heads: HeadShape
    handler: CacheDTypeHandler

    def row_format(self, model_dtype: torch.dtype) -> RowFormat:
        """Return the format of a row, for inputs of `model_dtype`."""
        heads = self.heads
        dtype = self.handler.resolve_storage_dtype(model_dtype)
        content = self.handler.content_size(heads.head_size, heads.value_size, dtype.itemsize)
        return RowFormat(heads.head_size, heads.value_size, content, dtype, self.handler.quant_mode)

    def check(self, kv_cache: object, row: RowFormat, block_size: int | None) -> torch.Tensor:
        """Return the cache, or raise `ValueError` where it does not fit."""
        return arguments.check_cache(
            kv_cache, self.heads.num_kv_heads, row.content, row.dtype, block_size
        )

    def scales(self, layer: object, row: RowFormat) -> Scales:
        """Return the layer's key and value scales, None where the dtype has none."""
        if row.quant_mode != KVQuantMode.FP8_PER_TENSOR:
            return None, None
        count = self.heads.num_kv_heads
        return (
            arguments.cache_scale("_k_scale", layer, count),
            arguments.cache_scale("_v_scale", layer, count),
        )

    def update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values; see `AttentionImpl.do_kv_cache_update`."""
        key, value = self._key_and_value(key, value)
        self._plan(layer, key, kv_cache, slot_mapping).run(key, value)

    def rotate(self, query: torch.Tensor, key: torch.Tensor | None, rotation: Rotation) -> None:
        """Rotate queries, and keys if there are any, in place."""
        heads = self.heads
        query = arguments.heads_apart("query", query, heads.num_heads, heads.head_size)
        rotation = rotation.check(query.shape[0], heads.head_size)
        if key is not None:
            key = arguments.heads_apart("key", key, heads.num_kv_heads, heads.head_size)
            check_tensor("key", key, shape=(query.shape[0], "heads", "size"))
            key.copy_(rotation.apply(key))
        query.copy_(rotation.apply(query))

    def rotate_and_update(
        self,
        layer: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate queries and keys in place and write; see `do_rope_and_kv_cache_update`."""
        heads = self.heads
        query = arguments.heads_apart("query", query, heads.num_heads, heads.head_size)
        key, value = self._key_and_value(key, value)
        arguments.check_same_dtype("key", key, "query", query.dtype)
        check_tensor("key", key, shape=(query.shape[0], "heads", "size"))
        rotation = rotation.check(query.shape[0], heads.head_size)
        write = self._plan(layer, key, kv_cache, slot_mapping)
        query.copy_(rotation.apply(query))
        key.copy_(rotation.apply(key))
        write.run(key, value)

    def normalise_rotate_and_update(
        self,
        layer: object,
        qkv: torch.Tensor,
        q_out: torch.Tensor,
        k_out: torch.Tensor,
        norm: HeadNorm,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        writes: bool,
    ) -> None:
        """Write `q_out`, `k_out` and, if it `writes`, the cache.

        See `AttentionImpl.do_qk_norm_rope_kvcache_update`.
        """
        heads = self.heads
        query_size = heads.num_heads * heads.head_size
        key_end = query_size + heads.num_kv_heads * heads.head_size
        hidden = key_end + heads.num_kv_heads * heads.value_size
        check_tensor(
            "qkv", qkv, shape=("num_tokens", hidden), dtype=arguments.FLOAT_DTYPES, device="cpu"
        )
        tokens = qkv.shape[0]
        query = qkv[:, :query_size].view(tokens, heads.num_heads, heads.head_size)
        key = qkv[:, query_size:key_end].view(tokens, heads.num_kv_heads, heads.head_size)
        value = qkv[:, key_end:].view(tokens, heads.num_kv_heads, heads.value_size)
        outs = []
        for name, out, count in (
            ("q_out", q_out, heads.num_heads),
            ("k_out", k_out, heads.num_kv_heads),
        ):
            apart = arguments.heads_apart(name, out, count, heads.head_size)
            check_tensor(name, apart, shape=(tokens, count, heads.head_size))
            arguments.check_same_dtype(name, apart, "qkv", qkv.dtype)
            outs.append(apart)
        norm.check(heads.head_size)
        rotation = rotation.check(tokens, heads.head_size)
        write = None
        if writes:
            write = self._plan(layer, key, kv_cache, slot_mapping)
        outs[0].copy_(rotation.apply(normalised(query, norm.query_weight, norm.eps)))
        outs[1].copy_(rotation.apply(normalised(key, norm.key_weight, norm.eps)))
        if write is not None:
            write.run(outs[1], value)

    def _key_and_value(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = self.heads
        key = arguments.heads_apart("key", key, heads.num_kv_heads, heads.head_size)
        value = arguments.heads_apart("value", value, heads.num_kv_heads, heads.value_size)
        arguments.check_same_dtype("value", value, "key", key.dtype)
        check_tensor("value", value, shape=(key.shape[0], "heads", "size"))
        return key, value

    def _plan(
        self, layer: object, key: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> _Write:
        row = self.row_format(key.dtype)
        cache = self.check(kv_cache, row, None)
        num_slots = cache.shape[0] * cache.shape[2]
        rows, slots = arguments.written_slots(slot_mapping, key.shape[0], num_slots)
        return _Write(cache, row, self.scales(layer, row), rows, slots)
