"""A builder over many steps: other batch sizes, captures, chunks and then decodes."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnmux.batch import make_metadata
from attnmux.testing.behaviours.behaviour import PROVED, Behaviour, Tried, draw, prepare
from attnmux.testing.case import Case
from attnmux.testing.declared import Declared, dtype_of
from attnmux.testing.kit import Target, answer, build, impl_for, run_case
from attnmux.testing.outcome import NonConformanceError, State
from attnmux.testing.poison import poison_
from attnmux.testing.problem import AttentionProblem
from attnmux.testing.reference import solve
from attnmux.testing.road import (
    Layer,
    allocate_cache,
    make_builder,
    make_impl,
    reasons_against,
    request_of,
    spec_of,
)
from attnmux.testing.scenario import Request, Scenario
from attnmux.testing.tolerances import budget_for, judge
from attnmux.testing.variants import likely_kind


def _builder_reuse(target: Target, declared: Declared, seed: int) -> Tried:
    """One builder sees eight requests, then none, then three: each step is answered for itself."""
    scenario = draw(declared, "decode", seed, "builder_reuse")
    batches = (
        scenario.requests,
        (Request(0, 0), Request(0, 9)),
        (Request(1, 4), Request(1, 21), Request(1, 17)),
    )
    builder = make_builder(target.backend, scenario, target.device, target.options)
    for requests in batches:
        case, _ = prepare(target, replace(scenario, requests=requests))
        run_case(target, answer(case), builder)
    return PROVED


def _capture(target: Target, declared: Declared, seed: int) -> Tried:
    """Dummy batches of a graph capture build and run; the real step after them is right."""
    scenario = draw(declared, "decode", seed, "capture_then_step")
    case, builder = prepare(target, scenario)
    impl = impl_for(target, case)
    for query_len in (1, 4):
        for num_reqs in (1, 2, 8):
            batch = _dummy_batch(case, query_len, num_reqs)
            metadata = builder.build_for_cudagraph_capture(batch)
            rows = query_len * num_reqs
            shape = (rows, scenario.num_heads, scenario.head_size)
            query = torch.zeros(shape, dtype=case.query.dtype, device=target.device)
            kv_shape = (rows, scenario.num_kv_heads, scenario.head_size)
            key = torch.zeros(kv_shape, dtype=case.query.dtype, device=target.device)
            impl.forward(
                case.layer, query, key, key, case.kv_cache, metadata, torch.empty_like(query)
            )
    run_case(target, answer(case), builder)
    return PROVED


def _dummy_batch(case: Case, query_len: int, num_reqs: int) -> object:
    table = torch.zeros(num_reqs, 2, dtype=torch.int32, device=case.query.device)
    return make_metadata(
        [query_len] * num_reqs,
        [query_len] * num_reqs,
        table,
        max(case.scenario.block_size, query_len),
        device=case.query.device,
        slot_mapping=torch.full((query_len * num_reqs,), -1, device=case.query.device),
    )


def _steps(target: Target, declared: Declared, seed: int) -> Tried:
    """A prompt in chunks, then token by token over two edges of blocks: each row is exact."""
    _run_steps(target, draw(declared, "decode", seed, "steps"))
    return PROVED


def _window_steps(target: Target, declared: Declared, seed: int) -> Tried:
    """The same with windows that are, and are not, a multiple of the block."""
    scenario = draw(declared, "decode", seed, "window_steps")
    windowed = replace(scenario, sliding_window=2)
    if reasons := reasons_against(target.backend, request_of(windowed, target.device)):
        return State.DECLINED, tuple(str(reason) for reason in reasons)
    block = scenario.block_size if scenario.block_size <= 16 else 8
    for window in (block, block + block // 2 + 1, 1):
        _run_steps(target, replace(scenario, sliding_window=window))
    return PROVED


def _run_steps(target: Target, scenario: Scenario) -> None:
    """Feed one request through its own cache, chunk by chunk, and judge each step."""
    block = scenario.block_size
    chunks = [6, 5, *[1] * min(2 * block + 2, 30)]
    total = sum(chunks)
    generator = torch.Generator().manual_seed(scenario.seed)
    dtype, device = dtype_of(scenario.dtype), target.device
    query = torch.randn(total, scenario.num_heads, scenario.head_size, generator=generator)
    query = (query * scenario.size).to(device, dtype)
    shape = (2, total, scenario.num_kv_heads, scenario.head_size)
    key, value = torch.randn(shape, generator=generator).to(device, dtype)
    spec = spec_of(scenario, target.backend)
    num_blocks = -(-total // block)
    cache = poison_(allocate_cache(scenario, spec, num_blocks + 2, device))
    table = (torch.randperm(num_blocks, generator=generator) + 1).int().view(1, -1).to(device)
    one = torch.ones(1)
    layer = Layer.with_scales(one, one, device)
    builder = make_builder(target.backend, scenario, device, target.options)
    scale = scenario.head_size**-0.5
    impl = make_impl(
        target.backend,
        scenario,
        scale=scale,
        alibi_slopes=None,
        sinks=None,
        options=target.options,
    )
    start = 0
    for length in chunks:
        end = start + length
        batch = make_metadata([length], [end], table, block, device=device)
        metadata = builder.build(0, batch)
        rows = query[start:end], key[start:end], value[start:end]
        if not target.backend.forward_includes_kv_cache_update:
            impl.do_kv_cache_update(layer, rows[1], rows[2], cache, batch.slot_mapping)
        output = torch.full_like(rows[0], float("nan"))
        impl.forward(layer, *rows, cache, metadata, output)
        problem = AttentionProblem(
            *rows,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            scale=scale,
            kv_cache=cache,
            block_table=table,
            sliding_window=scenario.sliding_window,
        )
        exact = solve(problem)
        budget = budget_for(problem, exact)
        verdict = judge(output, exact.output, budget.output)
        if verdict.ratio > 1.0:
            raise NonConformanceError(
                f"step with query_len {length} and seq_len {end} is wrong "
                f"(block size {block}, window {scenario.sliding_window})",
                f"worst: token {verdict.row}, head {verdict.head}: error {verdict.error:.3g}, "
                f"allowed {verdict.budget:.3g}",
                likely_kind(output, problem, exact, budget) or "",
            )
        start = end


def _log_sum_exp(target: Target, declared: Declared, seed: int) -> Tried:
    """Every scenario checks it where it is supported; here it is declined where it is not."""
    case, builder = prepare(target, draw(declared, "mixed", seed, "log_sum_exp"))
    if target.backend.supports_lse():
        run_case(target, answer(case), builder)
        return PROVED
    impl = impl_for(target, case)
    arguments = case.layer, case.query, case.key, case.value, case.full_cache
    try:
        impl.forward_with_lse(*arguments, build(builder, case), case.new_output())
    except (NotImplementedError, ValueError):
        return State.DECLINED, ("log-sum-exp output not supported",)
    raise NonConformanceError("supports_lse says no, yet forward_with_lse runs without an error")


def _batch_invariance(target: Target, declared: Declared, seed: int) -> Tried:
    """A request has the same bits alone and between others, where that is claimed."""
    if not target.backend.supports_batch_invariance():
        return State.DECLINED, ("batch invariance not supported",)
    scenario = replace(draw(declared, "decode", seed, "batch_invariance"), pad_tokens=0)
    case, builder = prepare(target, scenario)
    impl = impl_for(target, case)
    cache = case.full_cache
    together = case.new_output()
    metadata = build(builder, case)
    impl.forward(case.layer, case.query, case.key, case.value, cache, metadata, together)
    starts = case.metadata.query_start_loc_cpu.tolist()
    for request, request_spec in enumerate(case.scenario.requests):
        if request_spec.query_len == 0:
            continue
        rows = slice(starts[request], starts[request + 1])
        batch = make_metadata(
            [request_spec.query_len],
            [request_spec.seq_len],
            case.metadata.block_table_tensor[request : request + 1],
            scenario.block_size,
            device=target.device,
            slot_mapping=case.metadata.slot_mapping[rows],
        )
        assert case.key is not None
        assert case.value is not None
        alone = torch.empty_like(together[rows])
        inputs = case.query[rows], case.key[rows], case.value[rows]
        impl.forward(case.layer, *inputs, cache, builder.build(0, batch), alone)
        if not torch.equal(alone, together[rows]):
            raise NonConformanceError(
                f"request {request} (seq_len {request_spec.seq_len}) has other bits alone than in "
                "the batch, though batch invariance is claimed"
            )
    return PROVED


BEHAVIOURS = (
    Behaviour("builder_reuse", "builder used again", _builder_reuse),
    Behaviour("capture_then_step", "graph capture", _capture),
    Behaviour("steps", "chunks, then decodes", _steps),
    Behaviour("window_steps", "chunks, then decodes", _window_steps),
    Behaviour("log_sum_exp", "log-sum-exp", _log_sum_exp),
    Behaviour("batch_invariance", "batch invariance", _batch_invariance),
)
