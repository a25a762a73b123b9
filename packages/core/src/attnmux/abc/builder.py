"""Once a step: the batch becomes what a backend's kernels read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from attnmux.checks import check_positive

if TYPE_CHECKING:
    from attnmux.abc.metadata import CommonAttentionMetadata
    from attnmux.config import EngineConfigLike
    from attnmux.kv_cache import KVCacheSpec

M = TypeVar("M")


class AttentionCGSupport(Enum):
    """Which batches may be captured in a CUDA graph. Cascade attention never may."""

    ALWAYS = 3
    """Any batch, prefills and decodes mixed."""
    UNIFORM_BATCH = 2
    """Batches whose queries are all of one length, such as decodes that verify drafts."""
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Batches of single-token decodes."""
    NEVER = 0
    """None."""


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Turns a batch into metadata of type `M`, once a step for all layers of a group.

    `build` never changes the batch it is given, and never waits for the device.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    """Read through `get_cudagraph_support`, which a subclass may override."""

    reorder_batch_threshold: int | None = None
    """Requests with at most this many query tokens go first in the batch; None: any order."""
    supports_update_block_table: bool = False
    """Whether `update_block_table` is there."""
    requires_block_table_width: ClassVar[bool] = False
    """Whether the constructor needs to know how many blocks a request may have."""
    supports_draft_decode_metadata_update: bool = False
    """Whether `update_draft_decode_metadata` is there."""

    @abstractmethod
    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: EngineConfigLike,
        device: torch.device,
    ):
        """Keep what a build needs.

        Args:
            kv_cache_spec: The cache of the layers, as the backend customised it.
            layer_names: The layers that share the metadata.
            vllm_config: The engine's settings (`attnmux.config.EngineConfig` or alike).
            device: Where metadata is wanted.
        """
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device
        self.kernel_block_size: int | None = None

    def set_kernel_block_size(self, kernel_block_size: int) -> None:
        """Tell the builder the kernel's block size where an engine's block is cut into several.

        Raises:
            ValueError: The size is not positive.
        """
        check_positive("kernel_block_size", kernel_block_size)
        self.kernel_block_size = kernel_block_size

    @classmethod
    def get_cudagraph_support(
        cls: type[AttentionMetadataBuilder[Any]],
        vllm_config: EngineConfigLike,
        kv_cache_spec: KVCacheSpec,
    ) -> AttentionCGSupport:
        """Which batches may be captured, for these settings and this cache."""
        return cls._cudagraph_support

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        """Set `reorder_batch_threshold`.

        With speculation, a decode has 1 token and its drafts (twice as many in parallel drafting);
        a backend that runs those as decodes raises the threshold accordingly. Context parallelism
        lowers it to 1 unless the backend takes several lengths there.
        """
        self.reorder_batch_threshold = reorder_batch_threshold
        if reorder_batch_threshold is not None and supports_spec_as_decode:
            speculative = self.vllm_config.speculative_config
            if speculative is not None and speculative.num_speculative_tokens is not None:
                drafts = speculative.num_speculative_tokens
                longest_decode = 1 + (2 if speculative.parallel_drafting else 1) * drafts
                self.reorder_batch_threshold = max(reorder_batch_threshold, longest_decode)
        dcp_size = self.vllm_config.parallel_config.decode_context_parallel_size
        if dcp_size > 1 and not supports_dcp_with_varlen:
            self.reorder_batch_threshold = 1

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """Return the metadata of this step.

        Args:
            common_prefix_len: Tokens at the start that all requests share; 0 where none.
            common_attn_metadata: The batch. Where `reorder_batch_threshold` is set, decodes first.
            fast_build: Prefer a quick build to quick kernels, for metadata that serves few layers.
        """
        raise NotImplementedError

    def update_block_table(
        self,
        metadata: M,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> M:
        """Return `metadata` for another cache group: the same batch in other blocks.

        Only where `supports_update_block_table` is True.
        """
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Return metadata to capture a graph with; an override calls `build` too."""
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        draft_index: int,
    ) -> M:
        """Return metadata for a draft model.

        Args:
            common_attn_metadata: The batch.
            draft_index: Which draft of a chain, or which level of a tree, is being computed.
        """
        return self.build(
            common_prefix_len=0,
            common_attn_metadata=common_attn_metadata,
            fast_build=True,
        )

    def update_draft_decode_metadata(self, metadata: M) -> None:
        """Advance `metadata` in place to the next draft step.

        It may be called while a graph is captured and is not called when the graph is replayed: it
        may only issue operations that can be captured, on tensors that stay where they are. Only
        where `supports_draft_decode_metadata_update` is True.
        """
        raise NotImplementedError

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: np.ndarray[Any, Any],
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Whether computing the shared prefix once would pay for this batch."""
        return False
