"""A backend for tests: one request, one head at a time, written to be read.

It keeps this package's tests independent of any installed backend, and counts what the engine asks
of it. It is no oracle: the engine is held against transformers' own attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnmux.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from attnmux.kv_cache import split_kv

NAME = "NAIVE_TEST"


class NaiveBackend(AttentionBackend):
    supported_dtypes = [torch.float32]  # noqa: RUF012 - the contract's form
    supported_kv_cache_dtypes = ["auto"]  # noqa: RUF012
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[NaiveImpl]:
        return NaiveImpl

    @staticmethod
    def get_builder_cls() -> type[NaiveBuilder]:
        return NaiveBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_logits_soft_cap(cls) -> bool:
        return True


@dataclass
class NaiveMetadata(AttentionMetadata):
    batch: CommonAttentionMetadata


class NaiveBuilder(AttentionMetadataBuilder[NaiveMetadata]):
    built: list[CommonAttentionMetadata] = []  # noqa: RUF012 - tests look at it and clear it

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> NaiveMetadata:
        self.built.append(common_attn_metadata)
        return NaiveMetadata(common_attn_metadata)


class NaiveImpl(AttentionImpl[NaiveMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        head_size_v: int | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.head_size_v = head_size_v or head_size
        self.scale = scale
        self.group = num_heads // (num_kv_heads or num_heads)
        self.window = sliding_window
        self.soft_cap = logits_soft_cap
        self.causal = attn_type == AttentionType.DECODER
        self.sinks = sinks
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        keys, values = split_kv(kv_cache, self.head_size, self.head_size_v)
        block_size = kv_cache.shape[2]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                keys[slot // block_size, :, slot % block_size] = key[token]
                values[slot // block_size, :, slot % block_size] = value[token]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: NaiveMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch = attn_metadata.batch
        starts = batch.query_start_loc.tolist()
        for req, seq_len in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[req], starts[req + 1])
            keys, values = key[rows], value[rows]
            if self.causal:
                keys, values = self._gather(kv_cache, batch.block_table_tensor[req], seq_len)
            output[rows] = self._attend(query[rows], keys, values)
        return output

    def _gather(
        self, kv_cache: torch.Tensor, table: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = split_kv(kv_cache, self.head_size, self.head_size_v)
        position = torch.arange(seq_len)
        block, offset = table[position // kv_cache.shape[2]], position % kv_cache.shape[2]
        return keys[block, :, offset], values[block, :, offset]

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        keys = keys.repeat_interleave(self.group, dim=1)
        values = values.repeat_interleave(self.group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        query_pos = torch.arange(len(keys) - len(query), len(keys))[:, None]
        distance = query_pos - torch.arange(len(keys))
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values)
