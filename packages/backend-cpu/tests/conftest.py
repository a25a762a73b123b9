"""One way from plain numbers to an answer and what the reference says of it, for all tests here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnmux
from attnmux.batch import make_metadata
from attnmux.config import EngineConfig, ModelConfig
from attnmux.kv_cache import FullAttentionSpec, KVCacheLayout, allocate
from attnmux.testing.paged_read import CacheContent
from attnmux.testing.paged_write import write_rows
from attnmux.testing.poison import poison_
from attnmux.testing.problem import AttentionProblem
from attnmux.testing.reference import solve
from attnmux.testing.tolerances import budget_for, judge, judge_lse
from attnmux_cpu.backend import CPUAttentionBackend
from attnmux_cpu.options import CPUAttentionOptions

SPARE_BLOCKS = 3
GARBAGE = 2**30  # a table entry that nobody may follow


@dataclass
class Step:
    """A batch and a layer in plain numbers; what is left out is the plain decoder."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    heads: tuple[int, int] = (4, 2)
    head_size: int = 32
    head_size_v: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: str = "auto"
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    attn_type: str = "decoder"
    causal: bool | Sequence[bool] = True
    window: int | None = None
    soft_cap: float | None = None
    alibi: str = ""
    sinks: bool = False
    ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_window: int | None = None
    rswa_prefixes: Sequence[int] | None = None
    encoder_lens: Sequence[int] | None = None
    cacheless: bool = False
    scales: tuple[Sequence[float], Sequence[float]] | None = None
    size: float = 1.0
    pad_tokens: int = 0
    arrange: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    options: CPUAttentionOptions | None = None
    seed: int = 0

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def has_cache(self) -> bool:
        return self.attn_type == "decoder" or (
            self.attn_type == "encoder_decoder" and not self.cacheless
        )

    @property
    def key_lens(self) -> Sequence[int]:
        if self.attn_type in ("encoder", "encoder_only"):
            return self.query_lens
        return self.seq_lens if self.encoder_lens is None else self.encoder_lens


@dataclass
class Built:
    """A step as tensors, ready to run; nothing of the batch is in the cache yet but the context."""

    step: Step
    impl: Any
    layer: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: torch.Tensor
    batch: Any
    builder: Any
    problem: AttentionProblem
    content: CacheContent

    def update(self) -> None:
        if self.step.attn_type == "decoder":
            self.impl.do_kv_cache_update(
                self.layer, self.key, self.value, self.cache, self.batch.slot_mapping
            )

    def new_output(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = (*self.query.shape[:2], self.step.value_size)
        return poison_(torch.empty(shape, dtype=dtype or self.step.dtype))

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        metadata = self.builder.build(0, self.batch)
        return self.impl.forward_with_lse(
            self.layer, self.query, self.key, self.value, self.cache, metadata, self.new_output()
        )

    def forward(self) -> torch.Tensor:
        metadata = self.builder.build(0, self.batch)
        return self.impl.forward(
            self.layer, self.query, self.key, self.value, self.cache, metadata, self.new_output()
        )

    def check(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Update, attend with and without log-sum-exp, compare both; return those of the first.

        Without it, other kernels may run.
        """
        self.update()
        output, lse = self.attend()
        self.compare(output, lse)
        self.compare(self.forward())
        return output, lse

    def compare(self, output: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        exact = solve(self.problem)
        budget = budget_for(self.problem, exact)
        rows = self.batch.num_actual_tokens
        verdict = judge(output[:rows], exact.output[:rows], budget.output[:rows])
        assert verdict.ratio <= 1, f"output: {verdict}"
        if lse is not None:
            verdict = judge_lse(lse[:rows], exact.lse[:rows], budget.lse[:rows])
            assert verdict.ratio <= 1, f"lse: {verdict}"


def build(step: Step) -> Built:
    random = torch.Generator().manual_seed(step.seed)
    num_heads, kv_heads = step.heads
    tokens = sum(step.query_lens) + step.pad_tokens
    content = _content(step)
    table = _table(step, random)
    query = _draw(random, tokens, num_heads, step.head_size) * step.size
    own_keys = tokens if step.attn_type == "decoder" else sum(step.key_lens)
    key = _draw(random, max(own_keys, tokens), kv_heads, step.head_size)
    value = _draw(random, max(own_keys, tokens), kv_heads, step.value_size)
    query, key, value = (step.arrange(part.to(step.dtype)) for part in (query, key, value))
    cache = torch.empty(0)
    if step.has_cache:
        cache = _cache(step, table)
        _write_context(step, cache, table, random, content)
    batch = _batch(step, table, tokens)
    slopes = (torch.rand(num_heads, generator=random) * 0.4 + 0.1).tolist() if step.alibi else None
    sinks = torch.randn(num_heads, generator=random) + 1.0 if step.sinks else None
    scale = 1.2 * step.head_size**-0.5
    asked = {"sinks": sinks, "options": step.options}
    asked |= {"use_alibi_sqrt": step.alibi == "sqrt", "head_size_v": step.head_size_v}
    impl = attnmux.create_impl(
        CPUAttentionBackend,
        num_heads=num_heads,
        head_size=step.head_size,
        scale=scale,
        num_kv_heads=kv_heads,
        alibi_slopes=slopes,
        sliding_window=step.window,
        kv_cache_dtype=step.cache_dtype,
        logits_soft_cap=step.soft_cap,
        attn_type=step.attn_type,
        **asked,
    )
    config = EngineConfig(model_config=ModelConfig(rswa_window=step.rswa_window))
    builder = attnmux.create_builder(CPUAttentionBackend, _spec(step), ["layer"], config, "cpu")
    problem = AttentionProblem(
        query=query,
        key=key,
        value=value,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        scale=scale,
        kv_cache=cache,
        block_table=batch.block_table_tensor,
        kv_cache_dtype=step.cache_dtype,
        k_scale=content.k_scale,
        v_scale=content.v_scale,
        head_size=step.head_size,
        head_size_v=step.value_size,
        attn_type=step.attn_type,
        causal=batch.causal,
        sliding_window=step.window,
        logits_soft_cap=step.soft_cap,
        alibi_slopes=slopes,
        use_alibi_sqrt=step.alibi == "sqrt",
        sinks=sinks,
        mm_req_doc_ranges=step.ranges,
        rswa_window=step.rswa_window,
        rswa_prefix_lens=batch.rswa_prefix_lens,
        encoder_seq_lens=batch.encoder_seq_lens,
    )
    layer = SimpleNamespace(
        _k_scale=torch.as_tensor(content.k_scale, dtype=torch.float32),
        _v_scale=torch.as_tensor(content.v_scale, dtype=torch.float32),
    )
    return Built(step, impl, layer, query, key, value, cache, batch, builder, problem, content)


def _draw(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=random)


def _content(step: Step) -> CacheContent:
    k_scale, v_scale = ([1.0], [1.0]) if step.scales is None else step.scales
    return CacheContent(
        step.head_size,
        step.value_size,
        step.cache_dtype,
        torch.tensor(k_scale),
        torch.tensor(v_scale),
    )


def _spec(step: Step) -> FullAttentionSpec:
    return FullAttentionSpec.for_layer(
        block_size=step.block_size,
        num_kv_heads=step.heads[1],
        head_size=step.head_size,
        head_size_v=step.head_size_v,
        dtype=step.dtype,
        kv_cache_dtype=step.cache_dtype,
    )


def _table(step: Step, random: torch.Generator) -> torch.Tensor:
    counts = [-(-length // step.block_size) for length in step.key_lens]
    free = (torch.randperm(sum(counts) + SPARE_BLOCKS, generator=random)).tolist()
    rows = torch.full((len(counts), max(counts, default=0) + 1), GARBAGE, dtype=torch.int32)
    for request, count in enumerate(counts):
        rows[request, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    return rows


def _cache(step: Step, table: torch.Tensor) -> torch.Tensor:
    # Two layers in one buffer, so that a layer's view is not contiguous in some layouts.
    num_blocks = int((table != GARBAGE).sum()) + SPARE_BLOCKS
    specs = {"other": _spec(step), "layer": _spec(step)}
    return poison_(allocate(specs, num_blocks, step.layout).views["layer"])


def _write_context(
    step: Step,
    cache: torch.Tensor,
    table: torch.Tensor,
    random: torch.Generator,
    content: CacheContent,
) -> None:
    for request, (queries, keys) in enumerate(zip(step.query_lens, step.key_lens, strict=True)):
        old = keys - queries if step.attn_type == "decoder" else keys
        pos = torch.arange(max(old, 0))
        blocks = table[request, pos // step.block_size].long()
        slots = blocks * step.block_size + pos % step.block_size
        key = _draw(random, len(pos), step.heads[1], step.head_size).to(step.dtype)
        value = _draw(random, len(pos), step.heads[1], step.value_size).to(step.dtype)
        write_rows(cache, slots, key, value, content)


def _batch(step: Step, table: torch.Tensor, tokens: int) -> Any:
    fields: dict[str, Any] = {"mm_req_doc_ranges": step.ranges}
    if step.rswa_prefixes is not None:
        fields["rswa_prefix_lens"] = torch.tensor(step.rswa_prefixes)
    if step.encoder_lens is not None:
        fields["encoder_seq_lens"] = torch.tensor(step.encoder_lens, dtype=torch.int32)
    fields["slot_mapping"] = torch.full((tokens,), -1)
    if step.attn_type == "decoder":
        fields["slot_mapping"] = _slots(step, table, tokens)
    # Lengths below those of the queries are meant: rows of padding, or of cross-attention.
    batch = make_metadata(
        step.query_lens,
        [max(lens) for lens in zip(step.query_lens, step.seq_lens, strict=True)],
        table if step.has_cache else None,
        step.block_size,
        causal=step.causal if isinstance(step.causal, bool) else torch.tensor(step.causal),
        pad_num_tokens=tokens,
        **fields,
    )
    return batch.replace(seq_lens=torch.tensor(step.seq_lens, dtype=torch.int32))


def _slots(step: Step, table: torch.Tensor, tokens: int) -> torch.Tensor:
    slots: list[int] = []
    for request, (queries, keys) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
        for pos in range(keys - queries, keys):
            block = int(table[request, pos // step.block_size])
            slots.append(block * step.block_size + pos % step.block_size if keys else -1)
    return torch.tensor(slots + [-1] * (tokens - len(slots)), dtype=torch.int64)


@pytest.fixture
def built() -> Callable[..., Built]:
    """``built(query_lens, seq_lens, **fields of Step)``: the step as tensors."""

    def make(query_lens: Sequence[int], seq_lens: Sequence[int], **fields: Any) -> Built:
        return build(Step(query_lens, seq_lens, **fields))

    return make
