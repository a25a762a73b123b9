"""Checks of a batch that the builders of this package share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

import torch

from attnmux.backend import CommonAttentionMetadata
from attnmux.checks import bad_argument, check_index_dtype, check_tensor


def check_batch(batch: CommonAttentionMetadata) -> None:
    """Raise `ValueError` unless lengths, table and causality describe `num_reqs` requests.

    Buffers that an engine keeps may have more rows than the batch has requests.
    """
    if not isinstance(batch, CommonAttentionMetadata):
        raise bad_argument(
            "common_attn_metadata", type(batch).__name__, CommonAttentionMetadata.__name__
        )
    reqs = batch.num_reqs
    if not isinstance(reqs, int) or reqs < 0:
        raise bad_argument("num_reqs", reqs, "an integer of at least 0")
    check_lengths("query_start_loc", batch.query_start_loc, reqs + 1)
    check_lengths("seq_lens", batch.seq_lens, reqs)
    check_table("block_table_tensor", batch.block_table_tensor, reqs)
    if not isinstance(batch.causal, bool):
        check_tensor("causal", batch.causal, shape=("num_reqs",), dtype=torch.bool, device="cpu")
        _check_rows("causal", batch.causal, reqs)
    starts = batch.query_start_loc[: reqs + 1]
    if int(starts[0]) != 0 or bool((starts.diff() < 0).any()):
        raise bad_argument("query_start_loc", starts.tolist(), "ascending from 0")
    if int(starts[-1]) > batch.num_actual_tokens:
        raise bad_argument(
            "query_start_loc[-1]", int(starts[-1]), f"at most {batch.num_actual_tokens} tokens"
        )


def check_lengths(name: str, tensor: torch.Tensor, count: int) -> None:
    """Raise `ValueError` unless `tensor` holds at least `count` integers of 0 or more."""
    check_tensor(name, tensor, shape=("num_reqs",), device="cpu")
    check_index_dtype(name, tensor)
    _check_rows(name, tensor, count)
    if count and int(tensor[:count].min()) < 0:
        raise bad_argument(name, int(tensor[:count].min()), "0 or more")


def check_table(name: str, table: torch.Tensor, reqs: int) -> None:
    """Raise `ValueError` unless `table` has at least `reqs` rows of blocks."""
    check_tensor(name, table, shape=("num_reqs", "max_blocks"), device="cpu")
    check_index_dtype(name, table)
    _check_rows(name, table, reqs)


def _check_rows(name: str, tensor: torch.Tensor, count: int) -> None:
    if tensor.shape[0] < count:
        raise bad_argument(f"{name}.shape", list(tensor.shape), f"[{count}], or more rows")


def check_mm_ranges(ranges: Mapping[int, Sequence[tuple[int, int]]], reqs: int) -> None:
    """Raise `ValueError` unless ranges are pairs, ascending, apart, of requests of the batch."""
    if not isinstance(ranges, Mapping):
        raise bad_argument("mm_req_doc_ranges", type(ranges).__name__, "a dict by request index")
    for request, spans in ranges.items():
        if request not in range(reqs):
            raise bad_argument("mm_req_doc_ranges", f"request {request!r}", f"0 to {reqs - 1}")
        if not _are_pairs(spans):
            raise bad_argument(
                "mm_req_doc_ranges", f"{spans} of request {request}", "pairs of integers"
            )
        previous = -1
        for start, end in sorted(spans):
            if not previous < start <= end:
                raise bad_argument(
                    "mm_req_doc_ranges",
                    f"{list(spans)} of request {request}",
                    "inclusive (first, last) positions that do not overlap",
                )
            previous = end


def _are_pairs(spans: object) -> bool:
    return isinstance(spans, Sequence) and all(
        isinstance(span, Sequence)
        and len(span) == 2
        and all(isinstance(place, Integral) for place in span)
        for span in spans
    )
