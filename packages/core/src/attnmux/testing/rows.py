"""The rows of a step: queries, keys and values, and which of the keys were there before.

Everything random is drawn on the CPU from the scenario's seed; the views are made where the
scenario runs, with the strides that it asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.testing.declared import dtype_of
from attnmux.testing.scenario import Request, Scenario

FAR_STRIDE = 2**30 + 64
"""Elements between rows or blocks that lie far apart: the third is past 2**31."""
_QUERY_GAP = 40  # elements between query rows where they are a view of a wider buffer


@dataclass(frozen=True)
class KeyRows:
    """Keys and values of all requests, request by request, in order of position."""

    key: torch.Tensor  # [n, num_kv_heads, head_size]
    value: torch.Tensor
    request: torch.Tensor  # int64 [n]
    position: torch.Tensor  # int64 [n]; negative for the row of a dummy query
    is_new: torch.Tensor  # bool [n]: comes with this step

    def part(self, new: bool) -> KeyRows:
        """Return the rows that come with this step, or those that were there before."""
        chosen = self.is_new if new else ~self.is_new
        fields = (self.key, self.value, self.request, self.position, self.is_new)
        return KeyRows(*(field[chosen] for field in fields))


def draw_keys(
    scenario: Scenario, requests: Sequence[Request], generator: torch.Generator
) -> KeyRows:
    """Draw the keys and values that every request has after this step."""
    request_ids, positions, is_new = [], [], []
    for index, request in enumerate(requests):
        last = scenario.num_keys(request)
        first = 0
        num_new = request.query_len
        if scenario.is_cross:
            num_new = last if scenario.cacheless or scenario.phase == "prefill" else 0
        else:
            first = min(0, last - num_new)
        if scenario.kv_sharing:
            num_new = 0
        places = torch.arange(first, last)
        positions.append(places)
        is_new.append(places >= last - num_new)
        request_ids.append(torch.full_like(places, index))
    position = torch.cat(positions)
    shape = (position.numel(), scenario.num_kv_heads, scenario.head_size)
    dtype = dtype_of(scenario.dtype)
    key = torch.randn(shape, generator=generator)
    value = torch.randn((*shape[:2], scenario.value_size), generator=generator) + 0.25
    if scenario.size < 0:
        key = key.abs()  # with queries that are all negative: every score far below 0
    return KeyRows(
        key.to(dtype), value.to(dtype), torch.cat(request_ids), position, torch.cat(is_new)
    )


def draw_queries(
    scenario: Scenario, requests: Sequence[Request], generator: torch.Generator
) -> torch.Tensor:
    """Draw ``[num_tokens, num_heads, head_size]`` of the tokens that belong to a request."""
    num_tokens = sum(request.query_len for request in requests)
    shape = (num_tokens, scenario.num_heads, scenario.head_size)
    query = torch.randn(shape, generator=generator)
    if scenario.size < 0:
        query = query.abs()
    return (query * scenario.size).to(dtype_of(scenario.dtype))


def arrange(
    scenario: Scenario,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place the rows in memory as the scenario says, rows of padding behind them full of NaN.

    Returns:
        query, key and value as views; the query flattened where the scenario is flat.
    """
    behind = scenario.pad_tokens + scenario.extra_rows
    num_rows = query.shape[0] + behind
    # Keys of cross attention are an encoder's: they are not padded with the decoder's tokens.
    num_keys = key.shape[0] + (0 if scenario.is_cross else behind)
    if scenario.strides == "fused" and num_keys == num_rows:
        widths = [x.shape[1] * x.shape[2] for x in (query, key, value)]
        buffer = _padding((num_rows, sum(widths)), query.dtype, device)
        columns = torch.split(buffer, widths, dim=1)
        parts = [
            part.view(num_rows, *x.shape[1:])
            for part, x in zip(columns, (query, key, value), strict=True)
        ]
    else:
        width = query.shape[1] * query.shape[2]
        if scenario.strides == "far":
            # Address space only: nobody touches what lies between the rows.
            wide = torch.empty((num_rows, FAR_STRIDE), dtype=query.dtype, device=device)
        else:
            gap = 0 if scenario.strides == "contiguous" else _QUERY_GAP
            wide = _padding((num_rows, width + gap), query.dtype, device)
        parts = [wide[:, :width].view(num_rows, *query.shape[1:])]
        parts.append(_padding((num_keys, *key.shape[1:]), key.dtype, device))
        parts.append(_place_value(scenario, num_keys, value, device))
    for part, rows in zip(parts, (query, key, value), strict=True):
        part[: rows.shape[0]] = rows.to(device)
    return (parts[0].flatten(1) if scenario.flat else parts[0]), parts[1], parts[2]


def _place_value(
    scenario: Scenario, num_keys: int, value: torch.Tensor, device: torch.device | str
) -> torch.Tensor:
    if scenario.strides == "transposed":
        heads_first = (value.shape[1], num_keys, value.shape[2])
        return _padding(heads_first, value.dtype, device).transpose(0, 1)
    return _padding((num_keys, *value.shape[1:]), value.dtype, device)


def _padding(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
