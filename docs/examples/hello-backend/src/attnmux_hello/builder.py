"""Once a step: turn the batch that all backends share into this backend's schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from attnmux.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from attnmux.checks import bad_argument, check_index_dtype


@dataclass(frozen=True)
class RequestSlice:
    """One request of the batch: where its tokens stand, and how much of its cache is filled."""

    index: int
    """Its row of the block table."""
    tokens: slice
    """Its rows of query and output."""
    seq_len: int
    """Its keys: those of earlier steps and those of this one."""


@dataclass
class HelloMetadata(AttentionMetadata):
    """The schedule of one step; the same object serves every layer."""

    requests: list[RequestSlice]
    block_table: torch.Tensor
    """Integer [num_reqs, max_blocks]: the cache blocks of a request in order."""
    num_actual_tokens: int
    """Rows of the output that are written; those of no request get zeros."""


class HelloBuilder(AttentionMetadataBuilder[HelloMetadata]):
    """Slices the batch into requests."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        """Keep what the layers share: their cache spec, their names, the config, the device."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        window = vllm_config.model_config.rswa_window
        if window is not None:
            raise bad_argument("rswa_window", window, "None (not offered)")

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HelloMetadata:
        """Return the schedule of a batch, which is read and never changed.

        Raises:
            ValueError: The batch asks for a mask that the backend has not declared.
        """
        batch = common_attn_metadata
        _check_batch(batch)
        # Lengths of a CPU batch are host memory: reading them waits for nothing.
        starts = batch.query_start_loc.tolist()
        requests = [
            RequestSlice(index, slice(starts[index], starts[index + 1]), seq_len)
            for index, seq_len in enumerate(batch.seq_lens.tolist())
            if starts[index] < starts[index + 1]  # a padding request has no tokens
        ]
        return HelloMetadata(
            requests=requests,
            block_table=batch.block_table_tensor,
            num_actual_tokens=batch.num_actual_tokens,
        )


def _check_batch(batch: CommonAttentionMetadata) -> None:
    if batch.causal is not True:
        raise bad_argument("causal", batch.causal, "True (others are not offered)")
    for name in ("mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens"):
        if getattr(batch, name) is not None:
            raise bad_argument(name, "a value", "None (not offered)")
    for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
        check_index_dtype(name, getattr(batch, name))
