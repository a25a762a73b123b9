"""Run a latent backend on a scenario as a layer would, and judge all that it leaves behind.

A layer writes its new rows with `do_kv_cache_update`, sends the batch's decodes (all tokens of a
sparse impl without dense prefill) through `forward_mqa` and the others through `forward_mha`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnmux.abc.backend import AttentionBackend
from attnmux.config import CacheConfig, EngineConfig, ModelConfig, SpeculativeConfig
from attnmux.create import create_builder, create_impl
from attnmux.testing.case import copy_with_storage
from attnmux.testing.declared import dtype_of
from attnmux.testing.mla.case import MlaCase, make_mla_case, spec_of
from attnmux.testing.mla.judging import (
    Split,
    exact_absorbed,
    exact_uncompressed,
    judged,
    judged_lse,
    rows_are_rounded,
)
from attnmux.testing.mla.scenarios import MlaScenario
from attnmux.testing.mla.tolerances import mla_budget
from attnmux.testing.outcome import NonConformanceError
from attnmux.testing.paged_write import write_complaint, write_rows
from attnmux.testing.poison import Watch, guarded
from attnmux.testing.road import LAYER_NAMES
from attnmux.testing.watching import MetadataWatch

FP8_SCALE = 0.017
"""Scale of a static fp8 output: results of about 1 use the range without saturating."""


def run_mla_scenario(
    backend: type[AttentionBackend],
    scenario: MlaScenario,
    *,
    device: torch.device | str = "cpu",
    options: object | None = None,
) -> float:
    """Run one scenario.

    Returns:
        The largest error in budgets; at most 1.

    Raises:
        NonConformanceError: something is not as the contract says.
    """
    builder = make_mla_builder(backend, scenario, device, options)
    scenario = in_order_for(scenario, builder.reorder_batch_threshold)
    case = make_mla_case(scenario, backend, device)
    impl = make_mla_impl(backend, case, options)
    watches = _watch_inputs(case)
    metadata = _build(builder, case)
    _check(watches, "build")
    _update_cache(case, impl)
    _check(watches, "do_kv_cache_update")
    split = _split(case, impl, metadata)
    cache_watch = Watch.of("kv_cache", case.kv_cache)
    worst = max(
        _run_mqa(case, impl, metadata, split) if split.num_tokens else 0.0,
        _run_mha(case, impl, metadata, split) if split.num_prefill_tokens else 0.0,
    )
    _check([*watches, cache_watch], "forward")
    return worst


def make_mla_builder(
    backend: type[AttentionBackend],
    scenario: MlaScenario,
    device: torch.device | str = "cpu",
    options: object | None = None,
) -> Any:
    """Make the backend's builder for the scenario's layers."""
    drafts = scenario.num_speculative_tokens
    config = EngineConfig(
        model_config=ModelConfig(
            dtype=dtype_of(scenario.dtype),
            num_heads=scenario.num_heads,
            num_kv_heads=1,
            head_size=scenario.head_size,
        ),
        cache_config=CacheConfig(
            block_size=scenario.block_size, cache_dtype=scenario.kv_cache_dtype
        ),
        speculative_config=SpeculativeConfig(drafts) if drafts else None,
    )
    spec = spec_of(scenario, backend)
    return create_builder(backend, spec, LAYER_NAMES, config, device, options)


def make_mla_impl(
    backend: type[AttentionBackend], case: MlaCase, options: object | None = None, **changes: Any
) -> Any:
    """Make the backend's impl for the case; `changes` replace arguments."""
    arguments = {**case.impl_arguments(), **changes}
    if options is not None:
        arguments["options"] = options
    return create_impl(backend, **arguments)


def in_order_for(scenario: MlaScenario, decode_threshold: int | None) -> MlaScenario:
    """Put decodes first, where a builder asks for it, and empty places last."""
    if decode_threshold is None:
        return scenario
    threshold = decode_threshold

    def rank(index: int) -> int:
        query_len = scenario.requests[index].query_len
        return 2 if query_len == 0 else int(query_len > threshold)

    order = sorted(range(len(scenario.requests)), key=rank)
    return replace(scenario, requests=tuple(scenario.requests[i] for i in order))


def _watch_inputs(case: MlaCase) -> list[Watch | MetadataWatch]:
    named = {
        "q": case.q,
        "q[0]": case.q_latent,
        "q[1]": case.q_pe,
        "kv_c_normed": case.kv_c,
        "k_pe": case.k_pe,
        "kv_b_proj": case.w_kv_b,
        "layer._k_scale": case.layer._k_scale,
    }
    if case.indexer is not None:
        named["topk_indices_buffer"] = case.indexer.topk_indices_buffer
    watches: list[Watch | MetadataWatch] = [Watch.of(name, x) for name, x in named.items()]
    return [*watches, MetadataWatch.of(case.metadata)]


def _check(watches: list[Watch | MetadataWatch], after: str) -> None:
    for watch in watches:
        if found := watch.complaint():
            raise NonConformanceError(f"{after} changed {found}")


def _build(builder: Any, case: MlaCase) -> Any:
    """Build the batch's metadata, by way of another table where the scenario says so."""
    batch = case.metadata
    if not (case.scenario.new_table and builder.supports_update_block_table):
        return builder.build(0, batch)
    # Any blocks of the cache will do: nothing may be read from them.
    other = batch.block_table_tensor.clone().fill_(0)
    slots = torch.full_like(batch.slot_mapping, -1)
    metadata = builder.build(0, batch.replace(block_table_tensor=other, slot_mapping=slots))
    return builder.update_block_table(metadata, batch.block_table_tensor, batch.slot_mapping)


def _update_cache(case: MlaCase, impl: Any) -> None:
    """Write the new rows, and check that they and only they are there."""
    expected = copy_with_storage(case.kv_cache)
    key = case.kv_c[: case.slots.numel(), None]
    rotary = case.k_pe[: case.slots.numel()]
    write_rows(expected, case.slots, key, rotary, case.content)
    watch = Watch.of("kv_cache", case.kv_cache, case.writable_rows())
    impl.do_kv_cache_update(
        case.kv_c,
        case.k_pe,
        case.kv_cache,
        case.metadata.slot_mapping,
        case.scenario.kv_cache_dtype,
        case.layer._k_scale,
    )
    if found := watch.complaint():
        raise NonConformanceError(f"do_kv_cache_update wrote outside its slots: {found}")
    found = write_complaint(case.kv_cache, expected, case.slots, key, rotary, case.content)
    if found:
        raise NonConformanceError(found)


def _split(case: MlaCase, impl: Any, metadata: Any) -> Split:
    """Read the batch's split from the metadata, and check that it is one."""
    total, num_reqs = case.metadata.num_actual_tokens, case.metadata.num_reqs
    if impl.is_sparse and not impl.supports_dense_mha_prefill:
        return Split(num_reqs, total, 0)
    split = Split(metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefill_tokens)
    if split.num_tokens + split.num_prefill_tokens != total:
        raise NonConformanceError(
            f"metadata: num_decode_tokens {split.num_tokens} and num_prefill_tokens "
            f"{split.num_prefill_tokens} do not add up to {total} tokens"
        )
    if split.num_requests + metadata.num_prefills != num_reqs:
        raise NonConformanceError(
            f"metadata: num_decodes {split.num_requests} and num_prefills "
            f"{metadata.num_prefills} do not add up to {num_reqs} requests"
        )
    return split


def _run_mqa(case: MlaCase, impl: Any, metadata: Any, split: Split) -> float:
    scenario, tokens = case.scenario, split.num_tokens
    parts = case.q_latent[:tokens], case.q_pe[:tokens]
    query = parts if scenario.query_in_parts else torch.cat(parts, dim=-1)
    output, lse = impl.forward_mqa(query, case.kv_cache, metadata, case.layer)
    heads = scenario.padded_heads or scenario.num_heads
    wanted = [tokens, heads, scenario.kv_lora_rank]
    if list(output.shape) != wanted or output.dtype != case.dtype:
        raise NonConformanceError(
            f"forward_mqa: got {output.dtype} {list(output.shape)}; right: {case.dtype} {wanted}"
        )
    exact = exact_absorbed(case, split)
    budget = mla_budget(
        exact, case.dtype, uncompressed=False, rounded_rows=rows_are_rounded(scenario)
    )
    got = output[:, : scenario.num_heads]
    worst = judged("forward_mqa", got, exact.latent, budget.output)
    if lse is None:
        if impl.need_to_return_lse_for_decode:
            raise NonConformanceError("forward_mqa returned no log-sum-exp though it is needed")
        return worst
    return max(worst, judged_lse(case, impl, lse, wanted[:2], exact, budget))


def _run_mha(case: MlaCase, impl: Any, metadata: Any, split: Split) -> float:
    scenario, first = case.scenario, split.num_tokens
    heads, size = scenario.num_heads, scenario.v_head_dim
    num_rows = case.q.shape[0] - first
    shape = (num_rows, heads * size) if scenario.flat else (num_rows, heads, size)
    dtype = torch.float8_e4m3fn if scenario.output_fp8 else case.dtype
    output = guarded(shape, dtype, case.q.device, row_gap=24 if scenario.fused else 0)
    writable = torch.zeros(shape, dtype=torch.bool, device=output.device)
    writable[: split.num_prefill_tokens] = True
    watch = Watch.of("output", output, writable)
    scale = torch.tensor([FP8_SCALE], device=output.device) if scenario.output_fp8 else None
    impl.forward_mha(
        case.q[first:],
        case.kv_c[first:],
        case.k_pe[first:],
        case.kv_cache,
        metadata,
        case.layer._k_scale,
        output,
        scale,
    )
    if found := watch.complaint():
        raise NonConformanceError(f"forward_mha wrote outside its output rows: {found}")
    got = output[: split.num_prefill_tokens].reshape(-1, heads, size).double()
    if scale is not None:
        got = got * float(scale)
    exact = exact_uncompressed(case, split)
    assert exact.output is not None
    rounded = rows_are_rounded(scenario)
    budget = mla_budget(exact, case.dtype, dtype, uncompressed=True, rounded_rows=rounded)
    allowed = budget.output
    if scale is not None:  # below the smallest normal value, fp8 rounds to multiples of 2**-9
        allowed = allowed + float(scale) * 2.0**-10
    return judged("forward_mha", got, exact.output, allowed)
