"""What a step's schedule says; `planning` makes one.

A schedule depends on lengths, tables, and a layer's mask and shape, so that all layers of the same
kind share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Rows: TypeAlias = slice | torch.Tensor
"""Tokens of a batch: a run of them, or their int64 indices."""
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Lengths:
    """A batch in plain numbers, on the CPU.

    Attributes:
        query_starts: ``[num_reqs + 1]``.
        key_lens: ``[num_reqs]``: tokens of each request that have keys.
        causal: ``[num_reqs]`` bool.
        prefix_lens: ``[num_reqs]``: prefix of reference sliding-window attention; 0 where none.
        mm_ranges: Request index to inclusive ranges that see both ways.
        block_table: int64 ``[num_reqs, max_blocks]``; None: keys are not in a cache.
        block_size: Tokens of a block.
    """

    query_starts: IntArray
    key_lens: IntArray
    causal: BoolArray
    prefix_lens: IntArray
    mm_ranges: Mapping[int, Sequence[tuple[int, int]]]
    block_table: torch.Tensor | None
    block_size: int

    @property
    def query_lens(self) -> IntArray:
        """``[num_reqs]``."""
        return np.diff(self.query_starts)


@dataclass(frozen=True)
class GroupTile:
    """Keys that the first `active` requests of a group read together.

    Attributes:
        active: Requests.
        first_slots: int64 ``[active, pages]``: where each page begins in the cache.
        first_pos: int64 ``[active, pages]``: position of each page's first token.
        mask: bool ``[active, queries, tile]``; None: all seen.
        hidden: int64: of the tile's ``active * num_kv_heads * tile`` rows, those that no query of
            their request sees; None: there are none.
    """

    active: int
    first_slots: torch.Tensor
    first_pos: torch.Tensor
    mask: torch.Tensor | None
    hidden: torch.Tensor | None


@dataclass(frozen=True)
class Group:
    """Requests with the same number of query tokens, longest first.

    Attributes:
        rows: The query tokens, request by request.
        requests: How many.
        queries: Query tokens of each.
        query_pos: int64 ``[requests, queries]``.
        tiles: What is read.
    """

    rows: Rows
    requests: int
    queries: int
    query_pos: torch.Tensor
    tiles: list[GroupTile]


@dataclass(frozen=True)
class Single:
    """A request that runs alone.

    Attributes:
        first_row: Its first query token in the batch.
        queries: Its query tokens.
        key_len: Its tokens that have keys.
        first_key: Its first row among keys that are not in a cache.
        causal: Whether queries see only earlier keys.
        prefix_len: Prefix of reference sliding-window attention.
        mm_ranges: Inclusive ranges that see both ways.
        page_slots: int64 ``[pages]``: where each page begins in the cache; None without one.
    """

    first_row: int
    queries: int
    key_len: int
    first_key: int
    causal: bool
    prefix_len: int
    mm_ranges: Sequence[tuple[int, int]]
    page_slots: torch.Tensor | None


@dataclass
class Schedule:
    """Everything a layer runs, and what of the cache it reads.

    Attributes:
        page: Tokens of a page; divides the block size.
        groups: Requests that run together.
        singles: Requests that run alone.
        empty_rows: Query tokens of requests without keys.
        padding: Query tokens of no request.
        lowest_block: Smallest block that is read.
        highest_block: Largest block that is read; below `lowest_block` where none is.
    """

    page: int
    groups: list[Group] = field(default_factory=list)
    singles: list[Single] = field(default_factory=list)
    empty_rows: list[slice] = field(default_factory=list)
    padding: slice | None = None
    lowest_block: int = 0
    highest_block: int = -1

    def note_blocks(self, blocks: torch.Tensor) -> None:
        """Widen the span of blocks that are read."""
        if blocks.numel():
            low, high = (int(end) for end in blocks.aminmax())
            known = self.highest_block >= self.lowest_block
            self.lowest_block = min(low, self.lowest_block) if known else low
            self.highest_block = max(high, self.highest_block) if known else high
