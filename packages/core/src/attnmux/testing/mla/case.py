"""From a scenario of latent attention to tensors: inputs, a batch, a poisoned cache with history.

The same scenario always gives the same tensors.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.abc.backend import AttentionBackend
from attnmux.abc.metadata import CommonAttentionMetadata
from attnmux.batch import make_metadata
from attnmux.kv_cache import AttentionSpec, MLAAttentionSpec
from attnmux.testing.declared import dtype_of
from attnmux.testing.mla.reference import absorb_query, split_kv_b_weight
from attnmux.testing.mla.scenarios import MlaScenario
from attnmux.testing.paged_read import SCALED_CACHE_DTYPES, CacheContent
from attnmux.testing.paged_write import write_rows
from attnmux.testing.poison import guarded, poison_
from attnmux.testing.road import Layer, allocate_cache
from attnmux.testing.scenario import Scenario
from attnmux.testing.tables import draw_table, num_blocks, slots_of

_ROW_GAP = 40  # elements between rows of a view of a wider buffer


@dataclass(frozen=True)
class TopkIndexer:
    """What a sparse impl reads of an indexer."""

    topk_indices_buffer: torch.Tensor


@dataclass(frozen=True)
class MlaCase:
    """Everything that one run of a scenario needs; sizes are those of the scenario.

    Attributes:
        q: ``[num_tokens, num_heads, qk_head_dim]``, not absorbed.
        q_latent: ``[num_tokens, heads, kv_lora_rank]``: absorbed and rounded; heads that only pad
            it hold poison.
        q_pe: ``[num_tokens, heads, qk_rope_head_dim]``: likewise.
        kv_c, k_pe: ``[num_tokens, kv_lora_rank]`` and ``[num_tokens, 1, qk_rope_head_dim]``.
        w_kv_b: ``[num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]``.
        kv_cache: poisoned, with the history written.
        table: int64; the block table of the batch, which may be built over another first.
        slots: of the new rows.
        indexer: lists of positions, or None.
    """

    scenario: MlaScenario
    spec: AttentionSpec
    layer: Layer
    content: CacheContent
    scale: float
    q: torch.Tensor
    q_latent: torch.Tensor
    q_pe: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    w_kv_b: torch.Tensor
    kv_cache: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    metadata: CommonAttentionMetadata
    indexer: TopkIndexer | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.q.dtype

    @property
    def query_lens(self) -> list[int]:
        """New tokens of each request."""
        return [request.query_len for request in self.scenario.requests]

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each request after the step."""
        return [request.seq_len for request in self.scenario.requests]

    @property
    def causal(self) -> list[bool]:
        """Whether each request looks back only."""
        return [self.scenario.causal_of(request) for request in self.scenario.requests]

    @property
    def cache_scale(self) -> float:
        """Factor of stored values."""
        return float(self.layer._k_scale)

    def project(self, latents: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Stand for ``kv_b_proj``: as layers of engines do, return a pair with no bias in it."""
        return torch.nn.functional.linear(latents, self.w_kv_b), None

    def impl_arguments(self) -> dict[str, Any]:
        """Return the keywords of `attnmux.create_impl`."""
        scenario = self.scenario
        return {
            "num_heads": scenario.num_heads,
            "head_size": scenario.head_size,
            "scale": self.scale,
            "num_kv_heads": 1,
            "alibi_slopes": None,
            "sliding_window": None,
            "kv_cache_dtype": scenario.kv_cache_dtype,
            "logits_soft_cap": None,
            "attn_type": "decoder",
            "kv_sharing_target_layer_name": None,
            "q_lora_rank": None,
            "kv_lora_rank": scenario.kv_lora_rank,
            "qk_nope_head_dim": scenario.qk_nope_head_dim,
            "qk_rope_head_dim": scenario.qk_rope_head_dim,
            "qk_head_dim": scenario.qk_nope_head_dim + scenario.qk_rope_head_dim,
            "v_head_dim": scenario.v_head_dim,
            "kv_b_proj": self.project,
            "indexer": self.indexer,
            "q_pad_num_heads": scenario.padded_heads,
        }

    def writable_rows(self) -> torch.Tensor:
        """Return which elements of the cache a write of the new rows may change."""
        mask = torch.zeros(self.kv_cache.shape, dtype=torch.bool)
        slots = self.slots[self.slots >= 0]
        mask[slots // self.scenario.block_size, :, slots % self.scenario.block_size] = True
        return mask.to(self.kv_cache.device)


def make_mla_case(
    scenario: MlaScenario, backend: type[AttentionBackend], device: torch.device | str = "cpu"
) -> MlaCase:
    """Make the tensors of a scenario, whose requests are in the order that the builder wants."""
    # Other numbers in each scenario, the same ones wherever it is run.
    draw = zlib.crc32(f"{scenario.seed}:{scenario.name}".encode())
    generator = torch.Generator().manual_seed(draw)
    dtype = dtype_of(scenario.dtype)
    spec = spec_of(scenario, backend)
    table, cache = _draw_cache(scenario, spec, generator, device)
    layer = _draw_layer(scenario, generator, device)
    rank, rope = scenario.kv_lora_rank, scenario.qk_rope_head_dim
    content = CacheContent(rank, rope, scenario.kv_cache_dtype, layer._k_scale, layer._k_scale)
    request, position, is_new = _places(scenario)
    slots = slots_of(table, request, position, scenario.block_size)
    rows = torch.randn(position.numel(), rank + rope, generator=generator).to(dtype)
    history = rows[~is_new].to(device)
    write_rows(cache, slots[~is_new], history[:, None, :rank], history[:, None, rank:], content)
    head = scenario.qk_nope_head_dim + rope
    q = torch.randn(scenario.num_tokens, scenario.num_heads, head, generator=generator).to(dtype)
    width = scenario.num_heads * (scenario.qk_nope_head_dim + scenario.v_head_dim)
    w_kv_b = (torch.randn(width, rank, generator=generator) * rank**-0.5).to(dtype)
    w_uk, _ = split_kv_b_weight(
        w_kv_b, scenario.num_heads, scenario.qk_nope_head_dim, scenario.v_head_dim
    )
    absorbed = absorb_query(q[..., : scenario.qk_nope_head_dim], w_uk).to(dtype)
    own = _place(scenario, rows[is_new], device)
    return MlaCase(
        scenario=scenario,
        spec=spec,
        layer=layer,
        content=content,
        scale=head**-0.5 * 1.6,  # no default that an impl might assume
        q=_place(scenario, q, device),
        q_latent=_place(scenario, _pad_heads(scenario, absorbed), device),
        q_pe=_place(scenario, _pad_heads(scenario, q[..., -rope:]), device),
        kv_c=own[:, :rank] if scenario.fused else own[:, :rank].contiguous(),
        k_pe=own[:, None, rank:] if scenario.fused else own[:, None, rank:].contiguous(),
        w_kv_b=w_kv_b.to(device),
        kv_cache=cache,
        table=table.to(device),
        slots=slots[is_new].to(device),
        metadata=_make_metadata(scenario, table, slots[is_new], device),
        indexer=_draw_indexer(scenario, position[is_new], generator, device),
    )


def spec_of(scenario: MlaScenario, backend: type[AttentionBackend]) -> AttentionSpec:
    """Return the cache spec of the scenario's layer, as the backend wants it."""
    spec = MLAAttentionSpec.for_layer(
        block_size=scenario.block_size,
        num_kv_heads=1,
        head_size=scenario.head_size,
        dtype=dtype_of(scenario.dtype),
        kv_cache_dtype=scenario.kv_cache_dtype,
    )
    return backend.customize_spec(spec)


def _draw_cache(
    scenario: MlaScenario,
    spec: AttentionSpec,
    generator: torch.Generator,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a table, and a poisoned cache of the middle one of three layers."""
    paging = Scenario(
        name=scenario.name,
        seed=scenario.seed,
        phase=scenario.phase,
        topics=scenario.topics,
        requests=scenario.requests,
        dtype=scenario.dtype,
        block_size=scenario.block_size,
        layout=scenario.layout,
        table_tail=scenario.table_tail,
        far_blocks=scenario.far_blocks,
    )
    table = draw_table(paging, scenario.requests, generator)
    cache = allocate_cache(paging, spec, num_blocks(paging, scenario.requests), device)
    return table, poison_(cache, scenario.poison)


def _draw_layer(
    scenario: MlaScenario, generator: torch.Generator, device: torch.device | str
) -> Layer:
    scale = torch.ones(1)
    if scenario.kv_cache_dtype in SCALED_CACHE_DTYPES:
        # No power of two, so that a scale that is lost or applied twice shows.
        scale = torch.rand(1, generator=generator) * 0.2 + 0.2
    return Layer.with_scales(scale, scale, device)


def _places(scenario: MlaScenario) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Request and position of each token, and whether it comes with this step.

    The query of a request that is shorter than it stands before position 0 and has no slot.
    """
    requests, positions, is_new = [], [], []
    for index, request in enumerate(scenario.requests):
        context = request.seq_len - request.query_len
        places = torch.arange(min(0, context), request.seq_len)
        requests.append(torch.full_like(places, index))
        positions.append(places)
        is_new.append(places >= context)
    return torch.cat(requests), torch.cat(positions), torch.cat(is_new)


def _place(scenario: MlaScenario, rows: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Place rows in memory as the scenario says, with rows of NaN behind them."""
    num_rows = rows.shape[0] + scenario.pad_tokens + scenario.extra_rows
    gap = _ROW_GAP if scenario.fused else 0
    placed = guarded((num_rows, *rows.shape[1:]), rows.dtype, device, row_gap=gap)
    placed[: rows.shape[0]] = rows.to(device)
    return placed


def _pad_heads(scenario: MlaScenario, query: torch.Tensor) -> torch.Tensor:
    """Append heads that hold NaN: what an engine's padding may hold."""
    extra = (scenario.padded_heads or scenario.num_heads) - scenario.num_heads
    return torch.nn.functional.pad(query, (0, 0, 0, extra), value=float("nan"))


def _make_metadata(
    scenario: MlaScenario, table: torch.Tensor, slots: torch.Tensor, device: torch.device | str
) -> CommonAttentionMetadata:
    """Describe the batch as an engine would."""
    index = torch.int64 if scenario.index_dtype == "int64" else torch.int32
    flags = torch.tensor([request.causal for request in scenario.requests])
    metadata = make_metadata(
        [request.query_len for request in scenario.requests],
        # A dummy query has no key; the length is put right below.
        [max(request.seq_len, request.query_len) for request in scenario.requests],
        table.to(index),
        scenario.block_size,
        device=device,
        causal=flags.to(device) if scenario.per_request_causal else scenario.causal,
        slot_mapping=slots.to(device),
        pad_num_tokens=scenario.num_tokens + scenario.pad_tokens,
    )
    seq_lens = torch.tensor([request.seq_len for request in scenario.requests])
    return metadata.replace(
        seq_lens=seq_lens.to(device, index),
        seq_lens_cpu_upper_bound=seq_lens.int(),
        query_start_loc=metadata.query_start_loc.to(index),
    )


def _draw_indexer(
    scenario: MlaScenario,
    positions: torch.Tensor,
    generator: torch.Generator,
    device: torch.device | str,
) -> TopkIndexer | None:
    """Draw for each token different positions that it sees, in any order, with gaps of -1."""
    if scenario.topk is None:
        return None
    seq_lens = [r.seq_len for r in scenario.requests for _ in range(r.query_len)]
    flags = [scenario.causal_of(r) for r in scenario.requests for _ in range(r.query_len)]
    # Rows of tokens without a request hold what is no position at all.
    num_rows = len(seq_lens) + scenario.pad_tokens + scenario.extra_rows
    lists = torch.full((num_rows, scenario.topk), 2**30, dtype=torch.int32)
    for row, (position, seq_len) in enumerate(zip(positions.tolist(), seq_lens, strict=True)):
        visible = max(position + 1, 0) if flags[row] else seq_len
        # Some tokens have a full list, some one that is short by a place.
        count = min(visible, scenario.topk if row % 2 else max(scenario.topk - 1, 1))
        lists[row] = -1
        chosen = torch.randperm(visible, generator=generator)[:count]
        places = torch.randperm(scenario.topk, generator=generator)[:count]
        lists[row, places] = chosen.int()
    return TopkIndexer(lists.to(device))
