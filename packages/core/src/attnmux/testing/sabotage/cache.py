"""Backends that write, read or scale the cache wrongly, or touch what is not theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnmux.abc.impl import AttentionLayer
from attnmux.abc.metadata import CommonAttentionMetadata
from attnmux.testing.paged_read import CacheContent
from attnmux.testing.paged_write import write_rows
from attnmux.testing.problem import AttentionProblem
from attnmux.testing.reference import ReferenceResult, solve
from attnmux.testing.sabotage.toy import ToyBuilder, ToyImpl, ToyMetadata


class LostKeyScaleImpl(ToyImpl):
    """Reads an fp8 cache without the scale of the keys."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Attend with scale 1."""
        return solve(replace(problem, k_scale=1.0))


class LostValueScaleImpl(ToyImpl):
    """Reads an fp8 cache without the scale of the values."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Attend with scale 1."""
        return solve(replace(problem, v_scale=1.0))


class FirstHeadScaleImpl(ToyImpl):
    """Uses the first KV head's scale for all."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Attend with one scale."""
        if isinstance(problem.k_scale, torch.Tensor) and isinstance(problem.v_scale, torch.Tensor):
            problem = replace(
                problem,
                k_scale=problem.k_scale.flatten()[:1],
                v_scale=problem.v_scale.flatten()[:1],
            )
        return solve(problem)


class WrongBitsImpl(ToyImpl):
    """Stores e4m3 bits in an e5m2 cache."""

    def write(
        self,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        content: CacheContent,
    ) -> None:
        """Write through a view of the other dtype."""
        if content.kv_cache_dtype == "fp8_e5m2":
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        write_rows(kv_cache, slots, key, value, content)


class WritesSlotMinusOneImpl(ToyImpl):
    """Takes slot -1 as the last slot of the last block."""

    def write(
        self,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        content: CacheContent,
    ) -> None:
        """Let Python's negative indices do what they do."""
        count = kv_cache.shape[0] * kv_cache.shape[2]
        wrapped = torch.where(slots < 0, slots + count, slots)
        padded = [x.nan_to_num() for x in (key, value)]
        write_rows(kv_cache, wrapped, padded[0], padded[1], content)


class ConsecutiveSlotsImpl(ToyImpl):
    """Takes a batch's slots as consecutive from the first."""

    def write(
        self,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        content: CacheContent,
    ) -> None:
        """Count up from the first slot that is written."""
        written = slots >= 0
        if bool(written.any()):
            first = int(slots[written][0])
            last = kv_cache.shape[0] * kv_cache.shape[2]
            count = (first + torch.arange(slots.numel())) % last
            slots = torch.where(written, count, slots)
        write_rows(kv_cache, slots, key, value, content)


class WritesSharedCacheImpl(ToyImpl):
    """Touches a cache that belongs to another layer."""

    def forward_with_lse(
        self, layer: AttentionLayer, query: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zero the null block first."""
        kv_cache = rest[2]
        if self.kv_sharing_target_layer_name and kv_cache.numel():
            kv_cache[0].view(torch.uint8).zero_()
        return super().forward_with_lse(layer, query, *rest, **named)


class MutatingBuilder(ToyBuilder):
    """Clamps lengths in the batch it was given."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ToyMetadata:
        """Change the lengths in place."""
        common_attn_metadata.seq_lens.clamp_(min=1)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class StaleBuilder(ToyBuilder):
    """Keeps what it built for a batch when the next one is empty."""

    kept: ToyMetadata | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ToyMetadata:
        """Build once."""
        if self.kept is None or common_attn_metadata.num_reqs > self.kept.batch.num_reqs:
            self.kept = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self.kept


class ScalesQueryInPlaceImpl(ToyImpl):
    """Multiplies the query by the softmax scale where it lies."""

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Scale, then attend with scale 1."""
        problem.query.mul_(self.scale)
        return solve(replace(problem, scale=1.0))
