"""One layer's call: what every tile needs to know, and how a run of rows begins and ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux_cpu.kernels.cache_rows import RowFormat
from attnmux_cpu.kernels.masks import MaskRule
from attnmux_cpu.kernels.output import OutputWriter
from attnmux_cpu.kernels.paging import PagedRows
from attnmux_cpu.kernels.schedule import Rows
from attnmux_cpu.kernels.scores import ScoreRule, load_queries, query_factor
from attnmux_cpu.kernels.softmax import SoftmaxState
from attnmux_cpu.kernels.tiles import TileShape
from attnmux_cpu.kernels.workspace import Workspace


@dataclass(frozen=True)
class PagedKeys:
    """Keys and values in a cache.

    Attributes:
        pages: Where they are.
        row: How they are stored.
        key_scale: What stored keys are multiplied by: float32, one element or ``[num_kv_heads]``;
            None: nothing.
        value_scale: The same for values.
    """

    pages: PagedRows
    row: RowFormat
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class DenseKeys:
    """Keys ``[tokens, num_kv_heads, head_size]`` and values, request after request."""

    key: torch.Tensor
    value: torch.Tensor
    key_scale: None = None
    value_scale: None = None


@dataclass(frozen=True)
class Problem:
    """One layer's call.

    Attributes:
        query: ``[tokens, num_heads, head_size]``, any strides.
        keys: Where keys and values come from.
        masks: The layer's mask.
        scores: What happens to scores.
        sinks: float32 ``[num_kv_heads, group]``; None: none.
        shape: The layer's tiles.
        writer: Takes the results.
        workspace: Scratch memory.
    """

    query: torch.Tensor
    keys: PagedKeys | DenseKeys
    masks: MaskRule
    scores: ScoreRule
    sinks: torch.Tensor | None
    shape: TileShape
    writer: OutputWriter
    workspace: Workspace

    def begin(self, rows: Rows, requests: int) -> tuple[torch.Tensor, SoftmaxState]:
        """Load the queries of `rows`, which belong to `requests` requests of equal length.

        Returns:
            Queries ``[requests * num_kv_heads, group * queries, head_size]`` and an empty state.
        """
        heads = self.shape.heads
        factor = query_factor(self.scores, self.keys.key_scale)
        queries = self.query[rows]
        by_request = queries.view(requests, -1, heads.num_heads, heads.head_size)
        query = load_queries(by_request, heads.num_kv_heads, factor, self.workspace)
        state = SoftmaxState.empty(self.workspace, query.shape[0], query.shape[1], heads.value_size)
        return query, state

    def end(self, rows: Rows, requests: int, state: SoftmaxState) -> None:
        """Finish the state that `begin` made for `rows` and write its results."""
        heads = self.shape.heads
        by_head = (requests, heads.num_kv_heads, heads.group, -1)
        output, lse = state.finish(self._sinks_of(requests, state.acc.shape[1] // heads.group))
        values = output.view(*by_head, heads.value_size)
        if self.keys.value_scale is not None:
            values.mul_(self.keys.value_scale.view(1, -1, 1, 1, 1))
        self.writer.write(
            rows,
            values.permute(0, 3, 1, 2, 4).reshape(-1, heads.num_heads, heads.value_size),
            lse.view(by_head).permute(0, 3, 1, 2).reshape(-1, heads.num_heads),
        )

    def end_empty(self, rows: slice, sinks: torch.Tensor | None) -> None:
        """Write the results of rows that see no key: zeros, and the sinks if there are any."""
        heads = self.shape.heads
        tokens = rows.stop - rows.start
        no_key = torch.full((heads.num_heads,), float("-inf"))
        lse = no_key if sinks is None else sinks.flatten()
        values = torch.zeros((tokens, heads.num_heads, heads.value_size))
        self.writer.write(rows, values, lse.expand(tokens, -1))

    def _sinks_of(self, requests: int, queries: int) -> torch.Tensor | None:
        if self.sinks is None:
            return None
        heads = self.shape.heads
        wide = self.sinks.view(1, heads.num_kv_heads, heads.group, 1)
        return wide.expand(requests, -1, -1, queries).reshape(
            requests * heads.num_kv_heads, heads.group * queries, 1
        )
