"""Latent attention to given positions: each token has a list of its own.

Tokens are worked on in tiles that let their gathered rows fit the workspace; a list longer than
the workspace is worked on piece by piece. Absorbed form, as in `mla_decode`.
"""

from __future__ import annotations

import torch

from attnmux.checks import bad_argument
from attnmux_cpu.kernels.mla_cache import LatentCache
from attnmux_cpu.kernels.softmax import SoftmaxState

INDICES_NAME = "indexer.topk_indices_buffer"


def check_indices(indices: torch.Tensor, num_visible: torch.Tensor) -> None:
    """Raise `ValueError` unless each list names different positions that its token may see.

    Args:
        indices: ``[num_tokens, k]`` int64; -1 is padding, at any place.
        num_visible: ``[num_tokens]`` int64: positions from 0 up to this are visible.
    """
    outside = (indices < -1) | (indices >= num_visible[:, None])
    if outside.any():
        token, place = outside.nonzero()[0].tolist()
        visible = int(num_visible[token])
        raise bad_argument(
            f"{INDICES_NAME}[{token}, {place}]",
            int(indices[token, place]),
            f"-1 (padding) or a position that the token sees, below {visible}",
        )
    ordered = indices.sort(dim=-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, place = twice.nonzero()[0].tolist()
        raise bad_argument(
            f"{INDICES_NAME}[{token}]",
            f"position {int(ordered[token, place])} twice",
            "each position at most once",
        )


def launch_sparse(
    query: tuple[torch.Tensor, ...],
    cache: LatentCache,
    token_requests: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    rank: int,
    workspace_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend.

    Args:
        query: Parts that make ``[num_tokens, num_heads, width]`` when joined at the last dimension;
            may have more rows than `indices`, whose result is 0.
        cache: The layer's cache.
        token_requests: int64 ``[num_listed]``: the request of each token that has a list.
        indices: int64 ``[num_listed, k]``, as `check_indices` wants them.
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
    # Padding goes last, so that a tile ends where its longest list does.
    lists = indices.sort(dim=-1, descending=True).values
    lengths = (lists >= 0).sum(dim=-1)
    # Tokens without a position would have no row to read.
    listed = lengths.nonzero().flatten()
    tile_kv = max(1, min(lists.shape[1], workspace_tokens))
    tile_q = max(1, workspace_tokens // tile_kv)
    for first in range(0, listed.numel(), tile_q):
        tokens = listed[first : first + tile_q]
        rows = torch.cat([piece[tokens] for piece in query], dim=-1).float()
        rows.mul_(scale * cache.scale)
        longest = int(lengths[tokens].max())
        state = SoftmaxState.empty(cache.workspace, tokens.numel(), num_heads, rank)
        for start in range(0, longest, tile_kv):
            tile = lists[tokens, start : min(start + tile_kv, longest)]
            padding = tile < 0
            # Padding reads a listed row again: only written rows are sure to be finite.
            positions = torch.where(padding, lists[tokens, :1], tile)
            keys = cache.read(token_requests[tokens, None], positions)
            scores = torch.bmm(rows, keys.transpose(1, 2))
            scores.masked_fill_(padding[:, None], -torch.inf)
            state.step(scores, keys[..., :rank])
        latents, tile_lse = state.finish()
        output[tokens] = latents.mul_(cache.scale).to(output.dtype)
        lse[tokens] = tile_lse
    return output, lse
