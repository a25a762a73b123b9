"""Scenarios about memory and limits rather than about what attention computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from attnmux.testing.scenario import Request, Scenario


@dataclass(frozen=True)
class MemoryTopic:
    """One row of the report about memory, padding, strides or extreme values."""

    name: str
    title: str
    phases: tuple[str, ...]
    apply: Callable[[Scenario, Random], Scenario]


def _nan_tails(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, poison="nan", table_tail="huge")


def _finite_tails(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, poison="finite", table_tail="poisoned")


def _dummy_rows(scenario: Scenario, random: Random) -> Scenario:
    # What a captured graph is padded with: a query without a key, and places without a query.
    requests = (*scenario.requests, Request(1, 0), Request(1, 0), Request(0, 0), Request(0, 0))
    return replace(scenario, requests=requests, pad_requests=2)


def _dummy_rows_with_sink(scenario: Scenario, random: Random) -> Scenario:
    return replace(_dummy_rows(scenario, random), sinks=True)


def _padding(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, pad_requests=3, pad_tokens=5, extra_rows=4, short_slots=False)


def _short_slots(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, pad_tokens=4, short_slots=True)


def _only_empty(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, requests=(Request(0, 0), Request(0, 7)), pad_tokens=2)


def _fused(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, strides="fused", flat=False)


def _one_token_fused(scenario: Scenario, random: Random) -> Scenario:
    # With a single token the stride of the token dimension means nothing and may be anything.
    return replace(scenario, strides="fused", flat=False, requests=(Request(1, 21),), pad_tokens=0)


def _transposed(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, strides="transposed", flat=False)


def _int64(scenario: Scenario, random: Random) -> Scenario:
    return replace(scenario, index_dtype="int64")


def _low_scores(scenario: Scenario, random: Random) -> Scenario:
    # All scores far below any finite stand-in for infinity that a mask may use.
    return replace(scenario, size=-9000.0, dtype=_widest(scenario))


def _high_scores_capped(scenario: Scenario, random: Random) -> Scenario:
    # Scores of thousands: a cap through exp(x) and exp(-x) divides infinity by infinity.
    return replace(scenario, size=3000.0, logits_soft_cap=50.0, dtype=_widest(scenario))


def _widest(scenario: Scenario) -> str:
    return scenario.dtype if scenario.dtype != "float16" else "bfloat16"


def _far_blocks(scenario: Scenario, random: Random) -> Scenario:
    requests = (Request(1, scenario.block_size + 3),)  # two blocks, the second past 2**31 elements
    return replace(scenario, far_blocks=True, requests=requests, forget_unseen=False)


def _far_rows(scenario: Scenario, random: Random) -> Scenario:
    requests = (Request(2, 5), Request(2, scenario.block_size + 1))
    return replace(
        scenario,
        strides="far",
        requests=requests,
        flat=False,
        pad_tokens=0,
        dtype=_narrow(scenario),
    )


def _narrow(scenario: Scenario) -> str:
    return scenario.dtype if scenario.dtype != "float32" else "bfloat16"


ALL = ("decode", "mixed", "prefill", "extend")
MEMORY_TOPICS = (
    MemoryTopic("nan_tails", "memory nobody wrote", ALL, _nan_tails),
    MemoryTopic("finite_tails", "memory nobody wrote", ("mixed", "decode"), _finite_tails),
    MemoryTopic("dummy_rows", "padded rows of a graph", ("decode", "mixed"), _dummy_rows),
    MemoryTopic("dummy_rows_sink", "padded rows of a graph", ("decode",), _dummy_rows_with_sink),
    MemoryTopic("padding", "padding", ("mixed", "decode"), _padding),
    MemoryTopic("short_slots", "padding", ("prefill", "decode"), _short_slots),
    MemoryTopic("only_empty", "padding", ("decode",), _only_empty),
    MemoryTopic("fused_qkv", "strided inputs", ("mixed", "decode"), _fused),
    MemoryTopic("one_token_fused", "strided inputs", ("decode",), _one_token_fused),
    MemoryTopic("transposed_value", "strided inputs", ("prefill",), _transposed),
    MemoryTopic("far_blocks", "offsets past 2**31", ("decode",), _far_blocks),
    MemoryTopic("far_rows", "offsets past 2**31", ("extend",), _far_rows),
    MemoryTopic("int64_indices", "index dtypes", ("mixed",), _int64),
    MemoryTopic("low_scores", "extreme scores", ("mixed", "decode"), _low_scores),
    MemoryTopic("high_scores", "extreme scores", ("mixed", "decode"), _high_scores_capped),
)
