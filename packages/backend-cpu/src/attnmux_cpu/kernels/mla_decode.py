"""Latent attention of decodes: the query is absorbed, all heads share one key row a token.

Requests are taken longest first and padded to the longest query among them. Keys come in tiles:
those requests that still have keys there are the first of the order, so that one long request
beside many short ones does not pad them. A tile has as many keys as let the rows of all its
requests fit the workspace. Source of the absorbed form: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnmux_cpu.kernels.mla_cache import LatentCache
from attnmux_cpu.kernels.softmax import SoftmaxState

MIN_TILE_KV = 64
"""Keys of the smallest tile: below this the calls cost more than the products."""


@dataclass(frozen=True)
class DecodeSchedule:
    """The decodes that have something to do, longest first.

    Attributes:
        requests: int64 ``[n]``: index of each request in the batch.
        num_keys: int64 ``[n]``: keys of each, descending, at least 1.
        token_rows: int64 ``[n, max_query_len]``: row of each token in the query; where a request
            has fewer tokens, its first one again.
        num_visible: int64 ``[n, max_query_len]``: keys that each token sees, counted from the
            first; 0 for a token that is not there.
    """

    requests: torch.Tensor
    num_keys: torch.Tensor
    token_rows: torch.Tensor
    num_visible: torch.Tensor

    def batches(self, size: int) -> Iterator[DecodeSchedule]:
        """Yield the schedule in parts of at most `size` requests."""
        for start in range(0, self.requests.numel(), size):
            part = slice(start, start + size)
            yield DecodeSchedule(
                self.requests[part],
                self.num_keys[part],
                self.token_rows[part],
                self.num_visible[part],
            )


def plan_decode(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, causal: torch.Tensor
) -> DecodeSchedule:
    """Make the schedule of the requests given.

    Args:
        query_start_loc: int64 ``[n + 1]``: first query row of each request.
        seq_lens: int64 ``[n]``: keys of each request.
        causal: bool ``[n]``.
    """
    query_lens = query_start_loc.diff()
    busy = ((query_lens > 0) & (seq_lens > 0)).nonzero().flatten()
    order = busy[torch.argsort(seq_lens[busy], descending=True, stable=True)]
    query_lens, num_keys = query_lens[order, None], seq_lens[order, None]
    width = int(query_lens.max()) if order.numel() else 0
    place = torch.arange(width, device="cpu")
    there = place < query_lens
    visible = torch.where(causal[order, None], num_keys - query_lens + place + 1, num_keys)
    return DecodeSchedule(
        requests=order,
        num_keys=num_keys[:, 0],
        token_rows=query_start_loc[order, None] + torch.where(there, place, 0),
        num_visible=torch.where(there, visible, 0).clamp_min_(0),
    )


def launch_decode(
    query: tuple[torch.Tensor, ...],
    cache: LatentCache,
    schedule: DecodeSchedule,
    *,
    scale: float,
    rank: int,
    workspace_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend.

    Args:
        query: Parts that make ``[num_tokens, num_heads, width]`` when joined at the last dimension.
        cache: The layer's cache.
        schedule: What `plan_decode` made.
        scale: Factor of the scores.
        rank: Width of the latent part.
        workspace_tokens: Bound of the cache rows that are held at a time.

    Returns:
        ``[num_tokens, num_heads, rank]`` in the query's dtype and log-sum-exp
        ``[num_tokens, num_heads]`` float32; 0 and -inf for tokens that see nothing.
    """
    num_tokens, num_heads = query[0].shape[:2]
    output = query[0].new_zeros(num_tokens, num_heads, rank)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device="cpu")
    for part in schedule.batches(max(1, workspace_tokens // MIN_TILE_KV)):
        rows = torch.cat([piece[part.token_rows] for piece in query], dim=-1).float()
        # A stored value times its scale is the key: one factor of the query does both.
        rows.mul_(scale * cache.scale)
        state = _attend(rows, cache, part, rank, workspace_tokens)
        out_rows, lse_rows = state.finish()
        there = part.num_visible > 0
        tokens = part.token_rows[there]
        latents = out_rows.view(*there.shape, num_heads, rank)[there].mul_(cache.scale)
        output[tokens] = latents.to(output.dtype)
        lse[tokens] = lse_rows.view(*there.shape, num_heads)[there]
    return output, lse


def _attend(
    query: torch.Tensor, cache: LatentCache, part: DecodeSchedule, rank: int, workspace_tokens: int
) -> SoftmaxState:
    batch, query_len, num_heads, width = query.shape
    query = query.view(batch, query_len * num_heads, width)
    state = SoftmaxState.empty(cache.workspace, batch, query_len * num_heads, rank)
    # Tiles that end below this are seen by every token, and need no mask.
    num_seen_by_all = int(part.num_visible.min())
    for active, start, end in _tiles(part.num_keys, workspace_tokens):
        places = torch.arange(start, end, device="cpu")
        # Past a request's end its last row is read again: only written rows are sure to be finite.
        positions = torch.minimum(places, part.num_keys[:active, None] - 1)
        keys = cache.read(part.requests[:active, None], positions)
        scores = cache.workspace.take("scores", (active, query_len * num_heads, end - start))
        torch.bmm(query[:active], keys.transpose(1, 2), out=scores)
        if end > num_seen_by_all:
            hidden = places >= part.num_visible[:active, :, None]
            by_token = scores.view(active, query_len, num_heads, end - start)
            by_token.masked_fill_(hidden[:, :, None], -torch.inf)
        state.first(active).step(scores, keys[..., :rank])
    return state


def _tiles(num_keys: torch.Tensor, workspace_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield (requests that have keys here, first key, end) until the longest request is done."""
    descending = num_keys.tolist()
    active, start = len(descending), 0
    while start < descending[0]:
        while descending[active - 1] <= start:
            active -= 1
        end = min(start + max(MIN_TILE_KV, workspace_tokens // active), descending[0])
        yield active, start, end
        start = end
