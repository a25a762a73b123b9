"""How large a tile is: the one place where shapes meet the bound of the workspace."""

from __future__ import annotations

from dataclasses import dataclass

from attnmux_cpu.kernels.paging import MAX_PAGE, page_size

FLOAT_BYTES = 4

# Larger tiles fall out of the last-level cache, smaller ones are dominated by the cost of a call:
# measured with benchmarks/cpu_attention.py on two cores of a Zen 4.
GROUP_TILE_BYTES = 4 << 20
SCORE_TILE_BYTES = 4 << 20
TILE_KV = 512
MAX_TILE_Q = 128
FUSED_TILE_Q = 256
MIN_GROUP_TOKENS = 128
"""Keys of each request that a tile of several requests should at least hold."""


@dataclass(frozen=True)
class HeadShape:
    """Heads of a layer.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Divides `num_heads`.
        head_size: Size of a query and key head.
        value_size: Size of a value head.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class TileShape:
    """Tiles of one layer within one workspace.

    Attributes:
        heads: The layer's heads.
        workspace_bytes: Bound of all buffers together.
    """

    heads: HeadShape
    workspace_bytes: int

    @property
    def _key_bytes(self) -> int:
        """Bytes of one token's keys and values, as gathered and in float32."""
        heads = self.heads
        return 2 * FLOAT_BYTES * heads.num_kv_heads * (heads.head_size + heads.value_size)

    def _query_bytes(self, queries: int) -> int:
        """Bytes of query, accumulator and output of that many tokens of a request."""
        heads = self.heads
        return 3 * FLOAT_BYTES * heads.num_heads * queries * max(heads.head_size, heads.value_size)

    def page(self, block_size: int) -> int:
        """Tokens of a page: a divisor of the block size of which a tile holds at least one."""
        return page_size(block_size, max(1, min(MAX_PAGE, self.tile_kv)))

    @property
    def tile_kv(self) -> int:
        """Keys of a tile of one request."""
        return max(1, min(TILE_KV, self.workspace_bytes // 4 // self._key_bytes))

    @property
    def tile_q(self) -> int:
        """Query tokens of a tile of one request."""
        score_bytes = FLOAT_BYTES * self.heads.num_heads * self.tile_kv
        by_scores = min(SCORE_TILE_BYTES, self.workspace_bytes // 4) // score_bytes
        by_state = self.workspace_bytes // 4 // self._query_bytes(1)
        return max(1, min(MAX_TILE_Q, by_scores, by_state))

    @property
    def fused_keys(self) -> int:
        """Keys of a request that fit as a whole."""
        return self.workspace_bytes // 2 // self._key_bytes

    def fused_queries(self, queries: int) -> int:
        """Query tokens of a call of torch's attention, for a request of so many."""
        at_once = self.workspace_bytes // 4 // self._query_bytes(1)
        return max(1, queries if queries <= at_once else min(at_once, FUSED_TILE_Q))

    def group_tokens(self, queries: int) -> int:
        """Keys of a tile of several requests with `queries` tokens each, all requests together."""
        score_bytes = 2 * FLOAT_BYTES * self.heads.num_heads * queries
        budget = min(GROUP_TILE_BYTES, self.workspace_bytes // 4)
        return max(1, budget // (self._key_bytes // 2 + score_bytes))

    def group_requests(self, queries: int) -> int:
        """Requests of a tile at most."""
        return max(1, self.workspace_bytes // 8 // self._query_bytes(queries))
