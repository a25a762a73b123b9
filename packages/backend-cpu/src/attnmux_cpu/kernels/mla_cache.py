"""Reading rows of a latent cache by request and position.

A cache is ``[num_blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim]``; a row is a token's
latent, then its rotated part.
"""

from __future__ import annotations

import torch

from attnmux.checks import bad_argument
from attnmux_cpu.kernels.paging import PagedRows
from attnmux_cpu.kernels.workspace import Workspace


class LatentCache:
    """One layer's cache with the blocks of the batch's requests.

    Args:
        kv_cache: ``[num_blocks, 1, block_size, width]``, any strides, last one 1.
        block_table: int64 ``[num_reqs, max_blocks]``.
        scale: Factor of the stored values.
        workspace: Gives the memory of what is read.
    """

    def __init__(
        self,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        scale: float,
        workspace: Workspace,
    ) -> None:
        """Describe the cache; nothing is read."""
        self.rows = PagedRows(kv_cache, page=1)
        self.block_size = kv_cache.shape[2]
        self.width = kv_cache.shape[3]
        self.block_table = block_table
        self.scale = scale
        self.workspace = workspace

    def read_stored(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return rows as they are stored.

        Args:
            requests: int64, broadcasts against `positions`.
            positions: int64 ``[n, m]``, each below its request's length.

        Returns:
            ``[n, m, width]`` in the cache's dtype, valid until the next read.
        """
        blocks = self.block_table[requests, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        return self.rows.gather(slots, self.workspace)[:, 0]

    def read(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As `read_stored`, but float32; still to be multiplied by `scale`."""
        stored = self.read_stored(requests, positions)
        if stored.dtype == torch.float32:
            return stored
        return self.workspace.take("rows", stored.shape).copy_(stored)


def check_block_table(
    block_table: torch.Tensor, num_cached: torch.Tensor, num_blocks: int, block_size: int
) -> None:
    """Raise `ValueError` unless every entry that will be looked up names a block of the cache.

    Args:
        block_table: int64 ``[num_reqs, max_blocks]``.
        num_cached: int64 ``[num_reqs]``: tokens of each request that are read from the cache.
        num_blocks: Blocks of the cache.
        block_size: Tokens in a block.
    """
    width = block_table.shape[1]
    used = (num_cached + block_size - 1) // block_size
    longest = int(used.max()) if used.numel() else 0
    if longest > width:
        raise bad_argument(
            "block_table_tensor.shape[1]", width, f"at least {longest}, as seq_lens asks"
        )
    table = block_table[:, :longest]
    wrong = ((table < 0) | (table >= num_blocks)) & (
        torch.arange(longest, device="cpu") < used[:, None]
    )
    if wrong.any():
        request, column = wrong.nonzero()[0].tolist()
        raise bad_argument(
            f"block_table_tensor[{request}, {column}]",
            int(table[request, column]),
            f"0 to {num_blocks - 1}, the blocks of the cache",
        )
