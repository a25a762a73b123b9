"""The one oracle: attention in float64, every feature, on plain tensors.

Written to be read, not to be fast: one request at a time, whole score matrices. Every backend and
every test is judged by it, so it takes no shortcut that a kernel would take.

For a query at position ``q`` and a key at position ``k``::

    s       = scale * dot(query, key)
    s       = cap * tanh(s / cap)                               with a soft cap
    s      += slope * (k - q)                                   with ALiBi
    s      += -slope * sqrt(max(q - k, 0))                      with its square-root form
    visible = (causal and window and rswa) or (q and k in the same multimodal range)
    lse     = ln(sum over visible keys of exp(s) + exp(sink))
    output  = sum over visible keys of exp(s - lse) * value
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attnmux.checks import bad_argument, check_head_counts
from attnmux.testing.paged_read import CacheContent, read_sequence
from attnmux.testing.problem import AttentionProblem, split_heads

_SCORES_AT_ONCE = 1 << 22  # float64 scores held at a time: 32 MiB, so that long contexts fit


class ReferenceResult(NamedTuple):
    """What attention should give: both float64, one row for each row of `query`."""

    output: torch.Tensor  # [num_tokens, num_heads, head_size_v]
    lse: torch.Tensor  # [num_tokens, num_heads], natural logarithm


@dataclass(frozen=True)
class DenseRows:
    """Some query rows of one request with all its keys, as dense float64 tensors."""

    rows: slice  # which rows of `query`
    query: torch.Tensor  # [t, num_heads, head_size]
    key: torch.Tensor  # [n, num_heads, head_size], heads of a group repeated
    value: torch.Tensor  # [n, num_heads, head_size_v]
    visible: torch.Tensor  # bool [t, n]
    bias: torch.Tensor  # [num_heads, t, n], added after the soft cap


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    **arguments: Any,
) -> ReferenceResult:
    """Attend in float64.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, or flattened when `head_size` is given.
        key, value: rows of each request, where no cache is read.
        **arguments: the other attributes of `AttentionProblem`, each documented there;
            `query_start_loc` and `seq_lens` are always needed.

    Returns:
        output and lse. A row that sees no key has output 0 and lse -inf, or the sink.

    Raises:
        ValueError: an argument that has no meaning (window of 0, a window on cross attention, …).
    """
    return solve(AttentionProblem(query, key, value, **arguments))


def solve(problem: AttentionProblem) -> ReferenceResult:
    """Attend in float64; see `reference_attention`."""
    queries = problem.queries
    output = queries.new_zeros((*queries.shape[:2], problem.size_v), dtype=torch.float64)
    lse = output.new_full(output.shape[:2], float("-inf"))
    for piece in dense_rows(problem):
        weights, row_lse = weigh_keys(
            piece, problem.scale_factor, problem.logits_soft_cap, problem.sinks
        )
        output[piece.rows] = torch.einsum("htn,nhd->thd", weights, piece.value)
        lse[piece.rows] = row_lse.transpose(0, 1)
    return ReferenceResult(output, lse)


def weigh_keys(
    piece: DenseRows,
    scale: float,
    logits_soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights ``[num_heads, t, n]`` of the keys and the lse ``[num_heads, t]``.

    The weights of a row add up to 1 without a sink, to less with one, to 0 without a visible key.
    """
    scores = torch.einsum("thd,nhd->htn", piece.query, piece.key) * scale
    if logits_soft_cap:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    scores = (scores + piece.bias).masked_fill(~piece.visible, float("-inf"))
    if sinks is not None:
        sink = sinks.double().to(scores.device).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    weights = weights.masked_fill(torch.isneginf(lse).unsqueeze(-1), 0.0)
    return weights[..., : piece.key.shape[0]], lse


def dense_rows(problem: AttentionProblem) -> Iterator[DenseRows]:
    """Yield every query row with all keys of its request, masks and biases worked out."""
    queries = problem.queries
    num_heads = queries.shape[1]
    first_key_row = 0
    starts = problem.query_start_loc.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        num_keys = problem.num_keys(request, end - start)
        keys, values = _keys_and_values(problem, request, num_keys, first_key_row)
        first_key_row += num_keys
        check_head_counts(num_heads, keys.shape[1])
        group = num_heads // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        key_positions = torch.arange(num_keys, device=queries.device)
        first = problem.first_position(request, end - start)
        step = max(1, _SCORES_AT_ONCE // max(1, num_keys * num_heads))
        for row in range(start, end, step):
            rows = slice(row, min(row + step, end))
            positions = first + torch.arange(row - start, rows.stop - start, device=queries.device)
            visible = _visible_keys_of(problem, request, positions, key_positions)
            # A key that no row sees may never have been written, or be freed: 0 * NaN is NaN.
            unseen = ~visible.any(dim=0).view(-1, 1, 1)
            yield DenseRows(
                rows,
                queries[rows].double(),
                keys.masked_fill(unseen, 0.0),
                values.masked_fill(unseen, 0.0),
                visible,
                alibi_bias(
                    positions,
                    key_positions,
                    problem.alibi_slopes,
                    problem.use_alibi_sqrt,
                    num_heads,
                ),
            )


def visible_keys(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    *,
    causal: bool,
    sliding_window: int | None = None,
    two_sided: bool = False,
    ranges: Sequence[tuple[int, int]] = (),
    rswa_window: int | None = None,
    rswa_prefix: int = 0,
) -> torch.Tensor:
    """Return the mask ``[len(query_positions), len(key_positions)]``, True where a key is seen."""
    q, k = query_positions.unsqueeze(1), key_positions.unsqueeze(0)
    distance = q - k
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if sliding_window is not None:
        visible &= (distance.abs() if two_sided else distance) < sliding_window
    if rswa_window is not None:
        visible &= (k < rswa_prefix) | (distance < rswa_window)
    for start, end in ranges:
        visible |= (q >= start) & (q <= end) & (k >= start) & (k <= end)
    return visible


def alibi_bias(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    slopes: Sequence[float] | torch.Tensor | None,
    square_root: bool,
    num_heads: int,
) -> torch.Tensor:
    """Return what is added to the scores, ``[num_heads, q, k]`` float64; 0 without slopes."""
    relative = (key_positions.unsqueeze(0) - query_positions.unsqueeze(1)).double()
    if slopes is None:
        return relative.new_zeros((num_heads, *relative.shape))
    per_head = torch.as_tensor(slopes, dtype=torch.float64, device=relative.device).view(-1, 1, 1)
    if per_head.shape[0] != num_heads:
        raise bad_argument("alibi_slopes", f"{per_head.shape[0]} slopes", f"{num_heads} slopes")
    if square_root:
        return -per_head * (-relative).clamp(min=0).sqrt()
    return per_head * relative


def _visible_keys_of(
    problem: AttentionProblem,
    request: int,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
) -> torch.Tensor:
    prefix_lens = problem.rswa_prefix_lens
    return visible_keys(
        query_positions,
        key_positions,
        causal=problem.is_causal(request),
        sliding_window=problem.sliding_window,
        two_sided=problem.type_name in ("encoder", "encoder_only"),
        ranges=(problem.mm_req_doc_ranges or {}).get(request, ()),
        rswa_window=problem.rswa_window if prefix_lens is not None else None,
        rswa_prefix=0 if prefix_lens is None else int(prefix_lens[request]),
    )


def _keys_and_values(
    problem: AttentionProblem, request: int, num_keys: int, first_key_row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 keys ``[num_keys, num_kv_heads, head_size]`` and values of one request."""
    if problem.uses_cache:
        assert problem.kv_cache is not None  # `uses_cache` says so
        assert problem.block_table is not None  # checked when the problem was made
        content = CacheContent(
            problem.size,
            problem.size_v,
            problem.kv_cache_dtype,
            problem.k_scale,
            problem.v_scale,
        )
        return read_sequence(problem.kv_cache, problem.block_table[request], num_keys, content)
    assert problem.key is not None  # checked when the problem was made
    assert problem.value is not None
    rows = slice(first_key_row, first_key_row + num_keys)
    keys = split_heads(problem.key, problem.size)[rows].double()
    return keys, split_heads(problem.value, problem.size_v)[rows].double()
