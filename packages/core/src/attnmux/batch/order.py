"""Which requests of a batch are decodes, extends and prefills, and in which order they go."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from attnmux.abc.metadata import CommonAttentionMetadata
from attnmux.batch.lengths import Lengths, integers, on_host
from attnmux.checks import bad_argument, check_positive


class RequestKind(IntEnum):
    """What a step does for a request, in the order in which a sorted batch has them."""

    DECODE = 0
    """Few tokens after a finished prompt."""
    SHORT_EXTEND = 1
    """As few tokens, of a prompt of which some are computed."""
    LONG_EXTEND = 2
    """More tokens, after some are computed."""
    PREFILL = 3
    """The first tokens of a request."""


def classify_requests(
    query_lens: Lengths,
    num_computed_tokens: Lengths,
    is_prefilling: Sequence[bool] | np.ndarray[Any, Any] | torch.Tensor | None = None,
    decode_threshold: int = 1,
) -> np.ndarray[Any, Any]:
    """Return the `RequestKind` of each request.

    Args:
        query_lens: New tokens of each request, on the host.
        num_computed_tokens: Tokens computed before this step, on the host.
        is_prefilling: Whether the prompt is unfinished, on the host; None: nowhere.
        decode_threshold: Most tokens that still count as few.

    Raises:
        ValueError: An argument is on a device, or their lengths differ.
    """
    check_positive("decode_threshold", decode_threshold)
    query = integers("query_lens", query_lens)
    computed = integers("num_computed_tokens", num_computed_tokens)
    prefilling = (
        np.zeros(query.shape, dtype=bool)
        if is_prefilling is None
        else on_host("is_prefilling", is_prefilling).astype(bool)
    )
    if query.ndim != 1 or (query < 0).any():
        raise bad_argument("query_lens", query_lens, "one length of at least 0 a request")
    if not query.shape == computed.shape == prefilling.shape:
        raise bad_argument(
            "num_computed_tokens, is_prefilling",
            f"{computed.shape[0]} and {prefilling.shape[0]} requests",
            f"{query.shape[0]}, as many as query_lens",
        )
    kinds = np.full(query.shape, int(RequestKind.LONG_EXTEND))
    few = query <= decode_threshold
    kinds[few & prefilling] = RequestKind.SHORT_EXTEND
    kinds[few & ~prefilling] = RequestKind.DECODE
    kinds[(computed == 0) & ~(few & ~prefilling & (query == 0))] = RequestKind.PREFILL
    return kinds


def reorder_batch(kinds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the order that sorts a batch by kind: entry `i` is the old place of new request `i`.

    Requests of one kind keep their order.
    """
    return np.argsort(kinds, kind="stable")


class BatchSplit(NamedTuple):
    """Where the decodes of a batch end."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> BatchSplit:
    """Count the requests at the front of the batch that have at most `decode_threshold` tokens.

    Args:
        common_attn_metadata: A batch with its decodes first.
        decode_threshold: Most tokens of a decode.
        require_uniform: Count only decodes that all have as many tokens as the first; padding
            requests at the end count as such when all before them do.

    Only the host's copy of the query lengths is read. Requests after the first longer one count as
    prefills, short ones too.
    """
    check_positive("decode_threshold", decode_threshold)
    batch = common_attn_metadata
    start = batch.query_start_loc_cpu.numpy()[: batch.num_reqs + 1]
    query_lens = np.diff(start)
    if require_uniform and query_lens.size:
        fits = (query_lens == query_lens[0]) | (query_lens == 0)
        fits &= query_lens <= decode_threshold
    else:
        fits = query_lens <= decode_threshold
    num_reqs = int(query_lens.size)
    num_decodes = num_reqs if fits.all() else int(np.argmin(fits))
    if num_decodes == num_reqs:
        return BatchSplit(num_reqs, 0, batch.num_actual_tokens, 0)
    num_decode_tokens = int(start[num_decodes])
    return BatchSplit(
        num_decodes,
        num_reqs - num_decodes,
        num_decode_tokens,
        batch.num_actual_tokens - num_decode_tokens,
    )


class KindSplit(NamedTuple):
    """Requests and tokens of each `RequestKind`, in its order."""

    num_reqs: tuple[int, ...]
    num_tokens: tuple[int, ...]


def split_by_kind(
    common_attn_metadata: CommonAttentionMetadata, decode_threshold: int = 1
) -> KindSplit:
    """Count requests and tokens of each kind in a batch that `reorder_batch` sorted.

    Padding requests at the end count as of the kind of the last request that has tokens.

    Raises:
        ValueError: The batch is not sorted, or lacks the host's bound of `seq_lens`.
    """
    batch = common_attn_metadata
    if batch.seq_lens_cpu_upper_bound is None:
        raise bad_argument("seq_lens_cpu_upper_bound", None, "the host's bound of seq_lens")
    start = batch.query_start_loc_cpu.numpy()[: batch.num_reqs + 1]
    query_lens = np.diff(start)
    computed = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs] - query_lens
    kinds = classify_requests(query_lens, computed, batch.is_prefilling, decode_threshold)
    end = int(np.flatnonzero(query_lens).max(initial=-1)) + 1
    kinds[end:] = np.maximum(kinds[end:], kinds[end - 1] if end else RequestKind.DECODE)
    if (np.diff(kinds) < 0).any():
        raise bad_argument(
            "common_attn_metadata",
            f"requests in the order {[RequestKind(kind).name for kind in kinds]}",
            "decodes, short extends, long extends, prefills",
        )
    reqs = [int((kinds == kind).sum()) for kind in RequestKind]
    tokens = [int(query_lens[kinds == kind].sum()) for kind in RequestKind]
    return KindSplit(tuple(reqs), tuple(tokens))
