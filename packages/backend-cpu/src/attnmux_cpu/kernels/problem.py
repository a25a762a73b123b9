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

    def load(self, rows: Rows, requests: int) -> torch.Tensor:
        """Load the queries of `rows`, which belong to `requests` requests of equal length.

        Returns:
            ``[requests * num_kv_heads, group * queries, head_size]`` float32, scaled so that a
            product with a stored key is a score (see `query_factor`).
        """
        heads = self.shape.heads
        factor = query_factor(self.scores, self.keys.key_scale)
        queries = self.query[rows]
        by_request = queries.view(requests, -1, heads.num_heads, heads.head_size)
        return load_queries(by_request, heads.num_kv_heads, factor, self.workspace)

    def begin(self, rows: Rows, requests: int) -> tuple[torch.Tensor, SoftmaxState]:
        """Load queries as `load` does, and make an empty state for them."""
        query = self.load(rows, requests)
        problems, folded, _ = query.shape
        value_size = self.shape.heads.value_size
        return query, SoftmaxState.empty(self.workspace, problems, folded, value_size)

    def end(self, rows: Rows, requests: int, state: SoftmaxState) -> None:
        """Finish the state that `begin` made for `rows` and write its results."""
        heads = self.shape.heads
        by_head = (requests, heads.num_kv_heads, heads.group, -1)
        sinks = self._sinks_of(requests, state.acc.shape[1] // heads.group)
        lse = None
        if self.writer.lse is None:
            output = state.finish_output(sinks)
        else:
            output, row_lse = state.finish(sinks)
            lse = row_lse.view(by_head)
        self.write(rows, requests, output.view(*by_head, heads.value_size), lse)

    def write(
        self, rows: Rows, requests: int, values: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Write the results of `rows`, which belong to `requests` requests of equal length.

        Args:
            rows: The tokens.
            requests: How many requests.
            values: ``[requests, num_kv_heads, group, queries, value_size]`` of stored values: their
                scale is still to come. Overwritten.
            lse: ``[requests, num_kv_heads, group, queries]``; None where the writer takes none.
        """
        heads = self.shape.heads
        if self.keys.value_scale is not None:
            values.mul_(self.keys.value_scale.view(1, -1, 1, 1, 1))
        by_token = values.permute(0, 3, 1, 2, 4).reshape(-1, heads.num_heads, heads.value_size)
        if lse is not None:
            lse = lse.permute(0, 3, 1, 2).reshape(-1, heads.num_heads)
        self.writer.write(rows, by_token, lse)

    def end_empty(self, rows: slice, sinks: torch.Tensor | None) -> None:
        """Write the results of rows that see no key: zeros, and the sinks if there are any."""
        heads = self.shape.heads
        tokens = rows.stop - rows.start
        no_key = torch.full((heads.num_heads,), float("-inf"), dtype=torch.float32, device="cpu")
        lse = no_key if sinks is None else sinks.flatten()
        values = torch.zeros(
            (tokens, heads.num_heads, heads.value_size), dtype=torch.float32, device="cpu"
        )
        self.writer.write(rows, values, lse.expand(tokens, -1))

    def _sinks_of(self, requests: int, queries: int) -> torch.Tensor | None:
        if self.sinks is None:
            return None
        heads = self.shape.heads
        wide = self.sinks.view(1, heads.num_kv_heads, heads.group, 1)
        return wide.expand(requests, -1, -1, queries).reshape(
            requests * heads.num_kv_heads, heads.group * queries, 1
        )
