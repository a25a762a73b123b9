"""Reading pages of one layer's cache view, whatever its strides are.

A cache view is ``[num_blocks, num_kv_heads, block_size, content]`` with a content stride of 1. It
is read as a list of contiguous runs: runs of `page` tokens where a head's tokens lie side by side,
of a single token otherwise. One `index_select` then copies the runs of many requests into
``[requests, heads, tokens, content]``, the order in which the products want them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from attnmux_cpu.kernels.workspace import Workspace

MAX_PAGE = 256
"""Tokens of a page at most; larger blocks are read as several pages, so that tiles stay small."""

BYTE_SIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8)


def page_size(block_size: int, limit: int = MAX_PAGE) -> int:
    """Return the largest divisor of `block_size` that is at most `limit`."""
    return max(d for d in range(1, min(block_size, limit) + 1) if block_size % d == 0)


@lru_cache(maxsize=64)
def _offsets_within(heads: int, head_step: int, tokens: int, token_step: int) -> torch.Tensor:
    """int64 ``[heads, 1, tokens]``: where each head's run begins, from the start of a page."""
    by_head = torch.arange(heads, device="cpu").mul_(head_step).view(-1, 1, 1)
    return by_head + torch.arange(tokens, device="cpu").mul_(token_step)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View 8-bit floats as uint8, since torch indexes them in few places; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in BYTE_SIZED else tensor


class PagedRows:
    """A cache view, ready to gather pages from.

    Args:
        cache: ``[num_blocks, num_kv_heads, block_size, content]``, any strides, last one 1.
        page: Tokens gathered together; divides the block size.
    """

    def __init__(self, cache: torch.Tensor, page: int) -> None:
        """Describe the memory of `cache` as overlapping runs that `index_select` can pick from."""
        self.dtype = cache.dtype
        self.num_blocks, self.num_kv_heads, self.block_size, self.content = cache.shape
        self.page = page
        # The stride of a dimension of one entry means nothing.
        per_block, per_head, per_token = (
            stride if size > 1 else 0
            for stride, size in zip(cache.stride()[:3], cache.shape[:3], strict=True)
        )
        side_by_side = page == 1 or per_token == self.content
        run = page * self.content if side_by_side else self.content
        unit = math.gcd(per_block, per_head, per_token) or run
        last = (
            (self.num_blocks - 1) * per_block
            + (self.num_kv_heads - 1) * per_head
            + (self.block_size - (page if side_by_side else 1)) * per_token
        )
        raw = as_bytes(cache)
        self.runs = raw.as_strided((last // unit + 1, run), (unit, 1), raw.storage_offset())
        self.block_step = per_block // unit
        self.token_step = per_token // unit
        self.within = _offsets_within(
            self.num_kv_heads, per_head // unit, 1 if side_by_side else page, self.token_step
        )

    def gather(self, first_slots: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """Copy pages into the workspace.

        Args:
            first_slots: int64 ``[requests, pages]``: block times block size plus the page's first
                token within the block.
            workspace: Gives the memory.

        Returns:
            ``[requests, heads, pages * page, content]`` contiguous, in the cache's dtype.
        """
        requests, pages = first_slots.shape
        blocks = first_slots // self.block_size
        start = blocks * self.block_step
        if self.page != self.block_size:
            start += (first_slots - blocks * self.block_size) * self.token_step
        index = start.view(requests, 1, pages, 1) + self.within
        flat = workspace.take("pages", (index.numel(), self.runs.shape[1]), self.runs.dtype)
        torch.index_select(self.runs, 0, index.view(-1), out=flat)
        shape = (requests, self.num_kv_heads, pages * self.page, self.content)
        return flat.view(self.dtype).view(shape)
