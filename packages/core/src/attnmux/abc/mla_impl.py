"""Once a layer of latent attention: uncompressed for prefills, in the latent space for decodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

import torch

from attnmux.abc.impl import AttentionImplBase, AttentionLayer
from attnmux.abc.metadata import T
from attnmux.kv_cache import write_mla_cache
from attnmux.quant import OUTPUT_QUANT_KEYS

if TYPE_CHECKING:
    from attnmux.quant import QuantKey


class MLAAttentionImpl(AttentionImplBase[T], Generic[T]):
    """Latent attention: the cache keeps one compressed row a token for all heads.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    supports_pcp: bool = True

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Callable[[torch.Tensor], Any],
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        """Make the impl of one layer.

        Args:
            num_heads: Query heads.
            head_size: Width of a cache row: ``kv_lora_rank + qk_rope_head_dim``.
            scale: Factor of the scores, of the uncompressed head.
            num_kv_heads: 1.
            alibi_slopes: None.
            sliding_window: None where the backend has no window.
            kv_cache_dtype: Name of the cache's dtype.
            logits_soft_cap: None where the backend has none.
            attn_type: `AttentionType.DECODER`.
            kv_sharing_target_layer_name: None, or the layer whose cache is read.
            q_lora_rank: Rank of the query's own compression; not read by kernels.
            kv_lora_rank: Width of the latent part.
            qk_nope_head_dim: Width of a head's part without position.
            qk_rope_head_dim: Width of a head's rotated part.
            qk_head_dim: Both together.
            v_head_dim: Width of a value head.
            kv_b_proj: Maps ``[n, kv_lora_rank]`` to ``[n, num_heads * (qk_nope_head_dim +
                v_head_dim)]``; a tuple that begins with that is taken too.
            indexer: For a sparse impl, an object with ``topk_indices_buffer`` ``[num_tokens, k]``.
            q_pad_num_heads: Query heads after padding, where the caller pads them.
        """
        raise NotImplementedError

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: T,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend with uncompressed keys and values: the prefills of the batch.

        Args:
            q: ``[num_prefill_tokens, num_heads, qk_head_dim]``.
            kv_c_normed: ``[num_prefill_tokens, kv_lora_rank]``.
            k_pe: ``[num_prefill_tokens, 1, qk_rope_head_dim]``.
            kv_c_and_k_pe_cache: ``[num_blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim]``.
            attn_metadata: What this backend's builder made of the whole batch.
            k_scale: Scale of a quantised cache.
            output: Written: ``[num_prefill_tokens, num_heads * v_head_dim]``.
            output_scale: Scale of a static fp8 output.
        """
        raise NotImplementedError

    @abstractmethod
    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: T,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend in the latent space: the decodes of the batch.

        Args:
            q: ``[num_decode_tokens, num_heads, kv_lora_rank + qk_rope_head_dim]``, or its two
                parts.
            kv_c_and_k_pe_cache: As in `forward_mha`.
            attn_metadata: As in `forward_mha`.
            layer: The layer's scales.

        Returns:
            ``[num_decode_tokens, num_heads, kv_lora_rank]`` and the log-sum-exp
            ``[num_decode_tokens, num_heads]`` float32, or None where it is not needed.
        """
        raise NotImplementedError

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Whether the output can be quantised this way: all four, since the layer does it."""
        return quant_key in OUTPUT_QUANT_KEYS

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write latent and rotated parts into the cache; an empty cache takes nothing.

        Args:
            kv_c_normed: ``[num_tokens, kv_lora_rank]``.
            k_pe: ``[num_tokens, 1, qk_rope_head_dim]``.
            kv_cache: As in `forward_mha`.
            slot_mapping: ``[n]``, n at most num_tokens, of any shape; -1 skips.
            kv_cache_dtype: Name of the cache's dtype.
            k_scale: Scale of a quantised cache: stored is value / scale.
        """
        if kv_cache.numel() == 0:
            return
        write_mla_cache(
            kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten(), kv_cache_dtype, k_scale
        )
