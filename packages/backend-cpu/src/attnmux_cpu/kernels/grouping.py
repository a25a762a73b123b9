"""Groups of requests with the same number of query tokens, which share tiles of keys.

Longest requests come first and a tile holds a prefix of the group, so that keys are padded to a
common length within a tile only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from attnmux_cpu.kernels.masks import MaskRule, visible
from attnmux_cpu.kernels.schedule import Group, GroupTile, IntArray, Lengths, Rows, Schedule
from attnmux_cpu.kernels.tiles import MIN_GROUP_TOKENS, TileShape


@dataclass(frozen=True)
class Pages:
    """Pages that each request of a group reads: some at its head, the rest further on.

    All ``[requests]``, counted in pages from the start of the request.
    """

    head_first: IntArray
    head: IntArray
    tail_first: IntArray
    count: IntArray

    @classmethod
    def seen(
        cls, lengths: Lengths, rule: MaskRule, page: int, queries: int, members: IntArray
    ) -> Pages:
        """Return the pages with a key that one of a request's last `queries` tokens sees."""
        key_lens = lengths.key_lens[members]
        first_query = key_lens - queries
        low = np.zeros_like(key_lens)
        if rule.window is not None:
            low = np.maximum(first_query - rule.window + 1, 0)
        head_first, head, recent = low // page, np.zeros_like(low), low
        if rule.rswa_window is not None:
            prefix = np.minimum(lengths.prefix_lens[members], key_lens)
            head = np.maximum(-(-prefix // page) - head_first, 0)
            recent = np.maximum(low, first_query - rule.rswa_window + 1)
        tail_first = np.maximum(recent // page, head_first + head)
        count = head + np.maximum(-(-key_lens // page) - tail_first, 0)
        return cls(head_first, head, tail_first, count)

    def select(self, order: IntArray) -> Pages:
        """Return the same for some of the requests, in another order."""
        return Pages(
            self.head_first[order], self.head[order], self.tail_first[order], self.count[order]
        )

    def index(self, start: int, stop: int, active: int) -> torch.Tensor:
        """int64 ``[active, stop - start]``: which page is at each place; past the end, the last."""
        place = np.minimum(np.arange(start, stop)[None], self.count[:active, None] - 1)
        head = self.head[:active, None]
        at_head = self.head_first[:active, None] + place
        further_on = self.tail_first[:active, None] + place - head
        return torch.from_numpy(np.where(place < head, at_head, further_on))


@dataclass(frozen=True)
class GroupPlanner:
    """Makes the groups of requests with `queries` query tokens each, for one schedule."""

    lengths: Lengths
    rule: MaskRule
    shape: TileShape
    schedule: Schedule
    queries: int

    def groups(self, members: IntArray) -> Iterator[Group]:
        """Cut requests into groups whose tiles fit the workspace."""
        page = self.schedule.page
        pages = Pages.seen(self.lengths, self.rule, page, self.queries, members)
        order = np.argsort(-pages.count, kind="stable")
        members, pages = members[order], pages.select(order)
        tokens = self.shape.group_tokens(self.queries)
        most = self.shape.group_requests(self.queries)
        start = 0
        while start < len(members):
            keys_each = min(int(pages.count[start]) * page, max(page, MIN_GROUP_TOKENS))
            size = min(most, max(1, tokens // keys_each))
            part = np.arange(start, min(start + size, len(members)))
            yield self._group(members[part], pages.select(part))
            start += size

    def _group(self, members: IntArray, pages: Pages) -> Group:
        starts, key_lens = self.lengths.query_starts[members], self.lengths.key_lens[members]
        query_pos = torch.from_numpy((key_lens - self.queries)[:, None] + np.arange(self.queries))
        tiles, start, longest = [], 0, int(pages.count[0])
        while start < longest:
            active = int((pages.count > start).sum())
            keys_each = self.shape.group_tokens(self.queries) // active
            stop = min(longest, start + max(1, keys_each // self.schedule.page))
            within = torch.from_numpy(pages.count[:active, None] > np.arange(start, stop)[None])
            tile_pages = pages.index(start, stop, active)
            tiles.append(self._tile(members[:active], tile_pages, within, query_pos[:active]))
            start = stop
        return Group(_rows(starts, self.queries), len(members), self.queries, query_pos, tiles)

    def _tile(
        self, members: IntArray, pages: torch.Tensor, within: torch.Tensor, query_pos: torch.Tensor
    ) -> GroupTile:
        page, block_size = self.schedule.page, self.lengths.block_size
        assert self.lengths.block_table is not None
        first_pos = pages * page
        requests = torch.from_numpy(members).unsqueeze(1)
        blocks = self.lengths.block_table[requests, first_pos // block_size]
        self.schedule.note_blocks(blocks)
        mask = self._mask(members, first_pos, within, query_pos)
        return GroupTile(
            active=len(members),
            first_slots=blocks * block_size + first_pos % block_size,
            first_pos=first_pos,
            mask=mask,
            hidden=None if mask is None else self._hidden(mask),
        )

    def _mask(
        self,
        members: IntArray,
        first_pos: torch.Tensor,
        within: torch.Tensor,
        query_pos: torch.Tensor,
    ) -> torch.Tensor | None:
        page = self.schedule.page
        key_pos = (
            (first_pos.unsqueeze(-1) + torch.arange(page, device="cpu")).flatten(1).unsqueeze(1)
        )
        ends = torch.from_numpy(self.lengths.key_lens[members]).view(-1, 1, 1)
        is_key = within.repeat_interleave(page, dim=1).unsqueeze(1) & (key_pos < ends)
        mask = is_key & visible(
            self.rule,
            query_pos.unsqueeze(-1),
            key_pos,
            torch.from_numpy(self.lengths.causal[members]).view(-1, 1, 1),
            torch.from_numpy(self.lengths.prefix_lens[members]).view(-1, 1, 1),
        )
        return None if bool(mask.all()) else mask

    def _hidden(self, mask: torch.Tensor) -> torch.Tensor | None:
        requests, tokens = (~mask.any(dim=1)).nonzero(as_tuple=True)
        if not requests.numel():
            return None
        heads = self.shape.heads.num_kv_heads
        by_head = requests.unsqueeze(1) * heads + torch.arange(heads, device="cpu")
        return (by_head * mask.shape[2] + tokens.unsqueeze(1)).flatten()


def _rows(starts: IntArray, queries: int) -> Rows:
    if (np.diff(starts) == queries).all():
        return slice(int(starts[0]), int(starts[-1]) + queries)
    return torch.from_numpy((starts[:, None] + np.arange(queries)).reshape(-1))
