"""Requests with the same few query tokens, run together: the decodes of a batch.

One `bmm` serves all requests and KV heads of a tile; the query heads that share a KV head are rows
of its left side, so that keys are read once for all of them.
"""

from __future__ import annotations

import torch

from attnmux_cpu.kernels.cache_rows import decode_rows
from attnmux_cpu.kernels.problem import PagedKeys, Problem
from attnmux_cpu.kernels.schedule import Group, GroupTile
from attnmux_cpu.kernels.scores import attend_tile


def run_group(problem: Problem, group: Group) -> None:
    """Attend for all requests of `group` and write their rows."""
    query, state = problem.begin(group.rows, group.requests)
    for tile in group.tiles:
        problems = tile.active * problem.shape.heads.num_kv_heads
        key, value = _load(problem, tile)
        attend_tile(
            state.first(problems),
            problem.scores,
            query[:problems],
            key,
            value,
            tile.mask,
            _distance(problem, group, tile),
            problem.workspace,
        )
    problem.end(group.rows, group.requests, state)


def _load(problem: Problem, tile: GroupTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, float32 ``[active * num_kv_heads, tile, size]``; hidden ones are zero."""
    keys = problem.keys
    assert isinstance(keys, PagedKeys)
    raw = keys.pages.gather(tile.first_slots, problem.workspace)
    rows = decode_rows(raw, keys.row, problem.workspace).flatten(0, 1)
    if tile.hidden is not None:
        # Whatever lies there may be NaN, and 0 * NaN is NaN.
        rows.view(-1, rows.shape[-1]).index_fill_(0, tile.hidden, 0.0)
    size = keys.row.head_size
    return rows[..., :size], rows[..., size:]


def _distance(problem: Problem, group: Group, tile: GroupTile) -> torch.Tensor | None:
    if problem.scores.alibi_slopes is None:
        return None
    within = (
        torch.arange(problem.keys.pages.page, device="cpu")
        if isinstance(problem.keys, PagedKeys)
        else 0
    )
    key_pos = (tile.first_pos.unsqueeze(-1) + within).flatten(1)
    return key_pos.unsqueeze(1) - group.query_pos[: tile.active].unsqueeze(-1)
