"""One request at a time, in tiles of query tokens by tiles of keys: prefills, chunks and encoders.

Keys that no query of a tile sees are neither read nor multiplied; where all are seen there is no
mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnmux_cpu.kernels.cache_rows import decode_rows
from attnmux_cpu.kernels.masks import Range, key_ranges, same_range, sees_all, visible
from attnmux_cpu.kernels.problem import DenseKeys, PagedKeys, Problem
from attnmux_cpu.kernels.schedule import Single
from attnmux_cpu.kernels.scores import attend_tile


def run_single(problem: Problem, request: Single) -> None:
    """Attend for one request and write its rows."""
    context = request.key_len - request.queries
    for start in range(0, request.queries, problem.shape.tile_q):
        stop = min(start + problem.shape.tile_q, request.queries)
        rows = slice(request.first_row + start, request.first_row + stop)
        _run_tile(problem, request, rows, (context + start, context + stop))


def _run_tile(problem: Problem, request: Single, rows: slice, queries: Range) -> None:
    query, state = problem.begin(rows, 1)
    for keys in _tiles(problem, request, queries):
        key, value = load_keys(problem, request, keys)
        attend_tile(
            state,
            problem.scores,
            query,
            key,
            value,
            _mask_unless_all(problem, request, queries, keys),
            _distance(problem, queries, keys),
            problem.workspace,
        )
    problem.end(rows, 1, state)


def _tiles(problem: Problem, request: Single, queries: Range) -> Iterator[Range]:
    tile = problem.shape.tile_kv
    if isinstance(problem.keys, PagedKeys):
        page = problem.keys.pages.page
        tile = tile // page * page
    for low, high in key_ranges(
        problem.masks,
        queries,
        request.key_len,
        request.causal,
        request.prefix_len,
        request.mm_ranges,
    ):
        while low < high:
            # Ends on multiples of the tile, so that no page is gathered twice.
            stop = min(high, low // tile * tile + tile)
            yield low, stop
            low = stop


def load_keys(problem: Problem, request: Single, keys: Range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the positions `keys`, float32 ``[num_kv_heads, tile, size]``."""
    source, (low, high) = problem.keys, keys
    if isinstance(source, DenseKeys):
        tokens = slice(request.first_key + low, request.first_key + high)
        return (
            _by_head(problem, "key", source.key[tokens]),
            _by_head(problem, "value", source.value[tokens]),
        )
    assert request.page_slots is not None
    page = source.pages.page
    first = low // page
    slots = request.page_slots[first : -(-high // page)]
    raw = source.pages.gather(slots.unsqueeze(0), problem.workspace)
    rows = decode_rows(raw, source.row, problem.workspace)[0]
    seen = rows[:, low - first * page : high - first * page]
    size = source.row.head_size
    return seen[..., :size], seen[..., size:]


def _by_head(problem: Problem, name: str, tokens: torch.Tensor) -> torch.Tensor:
    by_head = tokens.transpose(0, 1)
    return problem.workspace.take(name, by_head.shape).copy_(by_head)


def tile_mask(problem: Problem, request: Single, queries: Range, keys: Range) -> torch.Tensor:
    """Return the mask of positions `queries` by `keys`, bool, True where a key is seen."""
    query_pos = torch.arange(*queries, device="cpu").unsqueeze(-1)
    key_pos = torch.arange(*keys, device="cpu")
    mask = visible(problem.masks, query_pos, key_pos, request.causal, request.prefix_len)
    if request.mm_ranges:
        mask |= same_range(query_pos, key_pos, request.mm_ranges)
    return mask


def _mask_unless_all(
    problem: Problem, request: Single, queries: Range, keys: Range
) -> torch.Tensor | None:
    if sees_all(problem.masks, queries, keys, request.causal, request.prefix_len):
        return None
    return tile_mask(problem, request, queries, keys).unsqueeze(0)


def _distance(problem: Problem, queries: Range, keys: Range) -> torch.Tensor | None:
    if problem.scores.alibi_slopes is None:
        return None
    return (
        torch.arange(*keys, device="cpu") - torch.arange(*queries, device="cpu").unsqueeze(-1)
    ).unsqueeze(0)
