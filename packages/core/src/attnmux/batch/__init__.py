"""From plain lengths and tables to a batch, and from a batch to its parts.

Nothing here waits for a device: what must be known on the host is given on the host, and the rest
is computed where its inputs are.
"""

from __future__ import annotations

from attnmux.batch.making import NO_SLOT, compute_slot_mapping, make_metadata
from attnmux.batch.order import (
    BatchSplit,
    KindSplit,
    RequestKind,
    classify_requests,
    reorder_batch,
    split_by_kind,
    split_decodes_and_prefills,
)
from attnmux.batch.ranks import dcp_local_seq_lens

__all__ = [
    "NO_SLOT",
    "BatchSplit",
    "KindSplit",
    "RequestKind",
    "classify_requests",
    "compute_slot_mapping",
    "dcp_local_seq_lens",
    "make_metadata",
    "reorder_batch",
    "split_by_kind",
    "split_decodes_and_prefills",
]
