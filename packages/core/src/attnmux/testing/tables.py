"""Where rows live in a paged cache: block tables that nothing is regular in, and slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.testing.problem import AttentionProblem
from attnmux.testing.reference import dense_rows
from attnmux.testing.scenario import Request, Scenario

NULL_BLOCK = 0
"""Never owned by a request: engines write dummies there, so it is always poisoned."""
_HUGE_BLOCK = 2**30  # far outside any cache, and inside int32
_SPARE_BLOCKS = 3  # owned by nobody, beside the null block


def num_blocks(scenario: Scenario, requests: Sequence[Request]) -> int:
    """Return how many blocks a cache for these requests has."""
    needed = sum(_blocks_of(scenario, request) for request in requests)
    return 1 + needed + (0 if scenario.far_blocks else _SPARE_BLOCKS)


def draw_table(
    scenario: Scenario, requests: Sequence[Request], generator: torch.Generator
) -> torch.Tensor:
    """Draw ``[num_reqs, max_blocks]`` block ids in no order; entries past a length are traps."""
    ids = torch.randperm(num_blocks(scenario, requests) - 1, generator=generator) + 1
    lengths = [max(request.seq_len, scenario.num_keys(request)) for request in requests]
    width = max((-(-length // scenario.block_size) for length in lengths), default=0) + 2
    trap = _HUGE_BLOCK if scenario.table_tail == "huge" else NULL_BLOCK
    table = torch.full((len(requests), width), trap, dtype=torch.int64)
    if scenario.table_tail == "huge":
        table[:, -1] = -_HUGE_BLOCK
    first = 0
    for row, request in enumerate(requests):
        count = _blocks_of(scenario, request)
        table[row, :count] = ids[first : first + count]
        first += count
    return table


def slots_of(
    table: torch.Tensor, request: torch.Tensor, position: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Return the slot of each (request, position): ``block * block_size + offset``; -1 for none."""
    written = position >= 0
    safe = position.clamp(min=0)
    block = table[request, safe // block_size].long()
    written = written & (block != NULL_BLOCK)
    return torch.where(written, block * block_size + safe % block_size, -1)


def forget_unseen_blocks(problem: AttentionProblem, table: torch.Tensor, block_size: int) -> None:
    """Give back, in place, each block whose keys no query sees: its entry is the null block then.

    That is what happens to a window's old blocks. Nothing but the masks of `problem` is read.
    """
    starts = problem.query_start_loc.tolist()
    seen: dict[int, torch.Tensor] = {}
    for piece in dense_rows(problem):
        request = next(i for i, end in enumerate(starts[1:]) if piece.rows.start < end)
        visible = piece.visible.any(dim=0)
        seen[request] = seen[request] | visible if request in seen else visible
    for request, visible in seen.items():
        for block, keys in enumerate(torch.split(visible, block_size)):
            if not bool(keys.any()):
                table[request, block] = NULL_BLOCK


def _blocks_of(scenario: Scenario, request: Request) -> int:
    return -(-scenario.num_keys(request) // scenario.block_size)
