"""From a scenario to tensors: inputs, a poisoned cache with history, metadata, the right answer.

The same scenario always gives the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnmux.abc.metadata import CommonAttentionMetadata
from attnmux.batch import make_metadata
from attnmux.kv_cache import AttentionSpec
from attnmux.testing.paged_read import SCALED_CACHE_DTYPES, CacheContent
from attnmux.testing.paged_write import write_rows
from attnmux.testing.poison import guarded, is_far, poison_, storage_bytes
from attnmux.testing.problem import AttentionProblem
from attnmux.testing.road import Layer, allocate_cache
from attnmux.testing.rows import FAR_STRIDE, arrange, draw_keys, draw_queries
from attnmux.testing.scenario import Request, Scenario
from attnmux.testing.tables import draw_table, forget_unseen_blocks, num_blocks, slots_of

_OUTPUT_GAP = 24  # elements between rows of an output that is a view of a wider buffer


@dataclass(frozen=True)
class Case:
    """Everything that one run of a scenario needs."""

    scenario: Scenario
    layer: Layer
    content: CacheContent
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    kv_cache: torch.Tensor  # poisoned, with the history written
    full_cache: torch.Tensor  # a copy as it should be after the new rows are written
    slots: torch.Tensor  # of the new rows; -1 is not written
    metadata: CommonAttentionMetadata
    problem: AttentionProblem  # over `full_cache`
    alibi_slopes: list[float] | None
    sinks: torch.Tensor | None
    scale: float

    @property
    def num_actual_tokens(self) -> int:
        """Rows that the backend writes."""
        return self.metadata.num_actual_tokens

    @property
    def writes_cache(self) -> bool:
        """Whether new rows go into the cache."""
        return self.key is not None and self.kv_cache.numel() > 0

    def writable_rows(self) -> torch.Tensor:
        """Return which elements of the cache a write of the new rows may change."""
        mask = torch.zeros(self.kv_cache.shape, dtype=torch.bool, device=self.kv_cache.device)
        slots = self.slots[self.slots >= 0]
        block_size = self.scenario.block_size
        mask[slots // block_size, :, slots % block_size] = True
        return mask

    def new_output(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a poisoned output between guards."""
        num_rows = self.query.shape[0]
        heads, size = self.scenario.num_heads, self.content.head_size_v
        shape = (num_rows, heads * size) if self.scenario.flat else (num_rows, heads, size)
        gap = {"fused": _OUTPUT_GAP, "far": FAR_STRIDE}.get(self.scenario.strides, 0)
        return guarded(shape, dtype or self.query.dtype, self.query.device, row_gap=gap)


def make_case(scenario: Scenario, spec: AttentionSpec, device: torch.device | str = "cpu") -> Case:
    """Make the tensors of a scenario, whose requests are in the order that the builder wants.

    Args:
        scenario: what to make.
        spec: of the layer's cache, as the backend wants it.
        device: where it runs.
    """
    generator = torch.Generator().manual_seed(scenario.seed)
    requests = (*scenario.requests, *[Request(0, 0)] * scenario.pad_requests)
    keys = draw_keys(scenario, requests, generator)
    queries = draw_queries(scenario, requests, generator)
    table = draw_table(scenario, requests, generator)
    content = _draw_content(scenario, generator)
    slopes = torch.rand(scenario.num_heads, generator=generator) * 0.45 + 0.05
    sinks = torch.rand(scenario.num_heads, generator=generator) * 2.5 + 0.5
    new = keys.part(new=True)
    query, key, value = arrange(scenario, queries, new.key, new.value, device)
    cache = allocate_cache(scenario, spec, num_blocks(scenario, requests), device)
    problem = _problem_of(scenario, requests, (query, key, value), cache, table, content)
    problem = replace(
        problem,
        alibi_slopes=slopes.tolist() if scenario.alibi else None,
        sinks=sinks.to(device) if scenario.sinks else None,
    )
    full_cache = cache
    slots = torch.full((new.position.numel(),), -1)
    if scenario.uses_cache:
        poison_(cache, scenario.poison)
        if scenario.forget_unseen:
            forget_unseen_blocks(problem, table, scenario.block_size)
        slots = slots_of(table, new.request, new.position, scenario.block_size)
        old = keys.part(new=False)
        old_slots = slots_of(table, old.request, old.position, scenario.block_size)
        write_rows(cache, old_slots, old.key.to(device), old.value.to(device), content)
        full_cache = copy_with_storage(cache)
        write_rows(full_cache, slots, key, value, content)
    metadata = _make_metadata(scenario, requests, table, slots, device)
    problem = replace(
        problem,
        kv_cache=full_cache if scenario.uses_cache else None,
        block_table=metadata.block_table_tensor,
    )
    brings_keys = not scenario.kv_sharing and not (scenario.is_cross and key.shape[0] == 0)
    return Case(
        scenario=scenario,
        layer=Layer.with_scales(_as_tensor(content.k_scale), _as_tensor(content.v_scale), device),
        content=content,
        query=query,
        key=key if brings_keys else None,
        value=value if brings_keys else None,
        kv_cache=cache,
        full_cache=full_cache,
        slots=slots.to(device),
        metadata=metadata,
        problem=problem,
        alibi_slopes=slopes.tolist() if scenario.alibi else None,
        sinks=sinks.to(device) if scenario.sinks else None,
        scale=problem.scale_factor,
    )


def copy_with_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a view with all the memory behind it, so that strides and surroundings are the same.

    A view whose rows lie gigabytes apart is copied alone.
    """
    if is_far(tensor):
        return tensor.clone()
    copy = storage_bytes(tensor).clone().view(tensor.dtype)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _draw_content(scenario: Scenario, generator: torch.Generator) -> CacheContent:
    """Draw scales that are no power of two and differ, so that a lost or swapped one shows."""
    size, size_v, name = scenario.head_size, scenario.value_size, scenario.kv_cache_dtype
    if name not in SCALED_CACHE_DTYPES:
        return CacheContent(size, size_v, name)
    count = scenario.num_kv_heads if scenario.per_head_scales else 1
    k_scale = torch.rand(count, generator=generator) * 0.2 + 0.2
    v_scale = torch.rand(count, generator=generator) * 0.5 + 1.3
    return CacheContent(size, size_v, name, k_scale, v_scale)


def _as_tensor(scale: float | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(scale, dtype=torch.float32).reshape(-1)


def _problem_of(
    scenario: Scenario,
    requests: Sequence[Request],
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    table: torch.Tensor,
    content: CacheContent,
) -> AttentionProblem:
    """Return what is asked, with lengths in tensors of the kit's own."""
    lengths = [request.query_len for request in requests]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return AttentionProblem(
        *rows,
        query_start_loc=starts,
        seq_lens=torch.tensor([request.seq_len for request in requests]),
        scale=scenario.head_size**-0.5 * 1.1,  # not the default, which an impl might assume
        kv_cache=cache if scenario.uses_cache else None,
        block_table=table,
        kv_cache_dtype=scenario.kv_cache_dtype,
        k_scale=content.k_scale,
        v_scale=content.v_scale,
        head_size=scenario.head_size,
        head_size_v=content.head_size_v,
        attn_type=scenario.attn_type,
        causal=_causal(scenario, requests),
        sliding_window=scenario.sliding_window,
        logits_soft_cap=scenario.logits_soft_cap,
        use_alibi_sqrt=scenario.alibi == "sqrt",
        mm_req_doc_ranges=_ranges(requests),
        rswa_window=scenario.rswa_window,
        rswa_prefix_lens=_prefix_lens(scenario, requests),
        encoder_seq_lens=_encoder_lens(scenario, requests),
    )


def _make_metadata(
    scenario: Scenario,
    requests: Sequence[Request],
    table: torch.Tensor,
    slots: torch.Tensor,
    device: torch.device | str,
) -> CommonAttentionMetadata:
    """Describe the batch as an engine would."""
    index = torch.int64 if scenario.index_dtype == "int64" else torch.int32
    encoder_lens = _encoder_lens(scenario, requests)
    causal = _causal(scenario, requests)
    prefix_lens = _prefix_lens(scenario, requests)
    metadata = make_metadata(
        [request.query_len for request in requests],
        # A dummy query has no key; the length is put right below.
        [max(request.seq_len, request.query_len) for request in requests],
        table.to(index) if scenario.uses_cache else None,
        scenario.block_size,
        device=device,
        causal=causal.to(device) if isinstance(causal, torch.Tensor) else causal,
        slot_mapping=slots.to(device),
        pad_num_tokens=scenario.num_tokens + scenario.pad_tokens,
        mm_req_doc_ranges=_ranges(requests),
        rswa_prefix_lens=None if prefix_lens is None else prefix_lens.to(device),
        encoder_seq_lens=None if encoder_lens is None else encoder_lens.to(device),
        encoder_seq_lens_cpu=None if encoder_lens is None else encoder_lens.numpy(),
    )
    seq_lens = torch.tensor([request.seq_len for request in requests])
    changes: dict[str, Any] = {
        "seq_lens": seq_lens.to(device, index),
        "seq_lens_cpu_upper_bound": seq_lens.int(),
        "query_start_loc": metadata.query_start_loc.to(index),
    }
    if scenario.short_slots:
        changes["slot_mapping"] = slots.to(device)
    return metadata.replace(**changes)


def _causal(scenario: Scenario, requests: Sequence[Request]) -> bool | torch.Tensor:
    if scenario.per_request_causal:
        return torch.tensor([request.causal for request in requests])
    return scenario.causal


def _ranges(requests: Sequence[Request]) -> dict[int, list[tuple[int, int]]] | None:
    ranges = {i: list(request.ranges) for i, request in enumerate(requests) if request.ranges}
    return ranges or None


def _prefix_lens(scenario: Scenario, requests: Sequence[Request]) -> torch.Tensor | None:
    if scenario.rswa_window is None:
        return None
    return torch.tensor([request.rswa_prefix for request in requests], dtype=torch.int32)


def _encoder_lens(scenario: Scenario, requests: Sequence[Request]) -> torch.Tensor | None:
    if not scenario.is_cross:
        return None
    return torch.tensor([request.encoder_len for request in requests], dtype=torch.int32)
