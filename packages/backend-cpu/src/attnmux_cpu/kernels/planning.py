"""Once a step: which requests run together, and which pages they read.

Requests with the same small number of query tokens form groups, which share tiles (`grouping`). All
others run one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attnmux_cpu.kernels.grouping import GroupPlanner
from attnmux_cpu.kernels.masks import MaskRule, key_ranges
from attnmux_cpu.kernels.schedule import IntArray, Lengths, Schedule, Single
from attnmux_cpu.kernels.tiles import TileShape


@dataclass(frozen=True)
class LayerKind:
    """What a schedule depends on besides the batch; layers of the same kind share one.

    Attributes:
        rule: The layer's mask.
        shape: The layer's tiles.
        max_grouped: Query tokens of a request that may join a group.
    """

    rule: MaskRule
    shape: TileShape
    max_grouped: int


def make_schedule(lengths: Lengths, kind: LayerKind, num_tokens: int) -> Schedule:
    """Plan one step for layers of one kind; `num_tokens` includes padding."""
    schedule = Schedule(kind.shape.page(lengths.block_size))
    query_lens, first_keys = lengths.query_lens.tolist(), _starts(lengths.key_lens)
    grouped: dict[int, list[int]] = {}
    for request, (queries, key_len) in enumerate(
        zip(query_lens, lengths.key_lens.tolist(), strict=True)
    ):
        first = int(lengths.query_starts[request])
        if queries and not key_len:
            schedule.empty_rows.append(slice(first, first + queries))
        elif queries and _may_join(lengths, request, queries, kind.max_grouped):
            grouped.setdefault(queries, []).append(request)
        elif queries:
            schedule.singles.append(_single(lengths, kind.rule, schedule, request, first_keys))
    for queries, members in grouped.items():
        planner = GroupPlanner(lengths, kind.rule, kind.shape, schedule, queries)
        schedule.groups += planner.groups(np.array(members))
    used = int(lengths.query_starts[-1])
    if used < num_tokens:
        schedule.padding = slice(used, num_tokens)
    return schedule


def _starts(lens: IntArray) -> list[int]:
    starts: list[int] = np.concatenate(([0], np.cumsum(lens))).tolist()
    return starts


def _may_join(lengths: Lengths, request: int, queries: int, max_grouped: int) -> bool:
    if lengths.block_table is None or queries > max_grouped:
        return False
    end = int(lengths.key_lens[request])
    # Queries inside a range that sees both ways need that range's mask.
    return not any(
        start < end and last >= end - queries for start, last in lengths.mm_ranges.get(request, ())
    )


def _single(
    lengths: Lengths, rule: MaskRule, schedule: Schedule, request: int, first_keys: list[int]
) -> Single:
    queries, key_len = int(lengths.query_lens[request]), int(lengths.key_lens[request])
    causal, prefix_len = bool(lengths.causal[request]), int(lengths.prefix_lens[request])
    mm_ranges = lengths.mm_ranges.get(request, ())
    page_slots = None
    if lengths.block_table is not None:
        page, block_size = schedule.page, lengths.block_size
        starts = torch.arange(-(-key_len // page), device="cpu") * page
        blocks = lengths.block_table[request, : -(-key_len // block_size)]
        page_slots = blocks[starts // block_size] * block_size + starts % block_size
        span = (key_len - queries, key_len)
        for low, high in key_ranges(rule, span, key_len, causal, prefix_len, mm_ranges):
            schedule.note_blocks(blocks[low // block_size : -(-high // block_size)])
    return Single(
        first_row=int(lengths.query_starts[request]),
        queries=queries,
        key_len=key_len,
        first_key=first_keys[request],
        causal=causal,
        prefix_len=prefix_len,
        mm_ranges=mm_ranges,
        page_slots=page_slots,
    )
