"""Once a layer: what runs attention. Latent attention is in `mla_impl`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

import torch

from attnmux import parallel
from attnmux.abc.attention_type import AttentionType
from attnmux.abc.metadata import AttentionMetadata, T
from attnmux.kv_cache import KVQuantMode, get_kv_quant_mode

if TYPE_CHECKING:
    from attnmux.quant import QuantKey


class AttentionLayer(Protocol):
    """What an impl may read of the layer that calls it: the scales of quantised tensors.

    Device tensors hold one float32 element, or one for each KV head. A kernel reads them on the
    device each time, since they may change between replays of a graph.
    """

    _q_scale: torch.Tensor
    _k_scale: torch.Tensor
    _k_scale_cpu: torch.Tensor
    _v_scale: torch.Tensor
    _v_scale_cpu: torch.Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float
    _prob_scale: torch.Tensor

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run the layer."""
        ...


def _place_in(get_group: Callable[[], Any]) -> tuple[int, int]:
    try:
        group = get_group()
    except AssertionError:  # no groups were made: a single process, or a test
        return 1, 0
    return group.world_size, group.rank_in_group


class AttentionImplBase(ABC, Generic[T]):
    """What standard and latent attention have in common; each defines its own forward methods."""

    is_sparse: ClassVar[bool] = False
    """Whether the impl attends to given top-k positions."""
    supports_dense_mha_prefill: ClassVar[bool] = True
    """Whether `forward_mha` is there; without it, a sparse impl sends all to `forward_mqa`."""

    num_heads: int
    head_size: int
    scale: float

    can_return_lse_for_decode: bool = False
    """Whether decodes can return their log-sum-exp, which context parallelism needs."""

    lse_base_on_e: bool = True
    """True: log-sum-exp is a natural logarithm. False: it is to base 2. Merges depend on it."""

    supports_pcp: bool = False
    """Whether prefill context parallelism is supported."""
    supports_dcp: bool = True
    """Whether decode context parallelism is supported."""
    supports_mtp_with_cp_non_trivial_interleave_size: bool = False
    """Whether several tokens a decode work when context-parallel ranks keep runs of tokens."""

    need_to_return_lse_for_decode: bool = False
    """Whether this impl's decodes must return it now; set when the impl is made."""

    supports_quant_query_input: bool = False
    """Whether queries may come quantised; an impl sets it when it is made."""

    dcp_world_size: int
    dcp_rank: int

    pcp_world_size: int
    pcp_rank: int

    total_cp_world_size: int
    total_cp_rank: int

    def __new__(cls, *args: Any, **kwargs: Any) -> AttentionImplBase[T]:
        """Read this process's place among the context-parallel ranks, whatever `__init__` does.

        Where no groups were made, as in tests, the place is rank 0 of 1.
        """
        self = super().__new__(cls)
        self.dcp_world_size, self.dcp_rank = _place_in(parallel.get_dcp_group)
        self.pcp_world_size, self.pcp_rank = _place_in(parallel.get_pcp_group)
        self.total_cp_world_size = self.dcp_world_size
        self.total_cp_rank = self.dcp_rank
        self.need_to_return_lse_for_decode = (
            self.dcp_world_size > 1 and self.can_return_lse_for_decode
        )
        return self

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Prepare weights that the impl keeps, once they are loaded; most keep none."""


class AttentionImpl(AttentionImplBase[T], Generic[T]):
    """Attention of a layer with keys and values of their own."""

    kv_cache_dtype: str

    @property
    def kv_quant_mode(self) -> KVQuantMode:
        """How this layer's cache is quantised."""
        return get_kv_quant_mode(self.kv_cache_dtype)

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """Make the impl of one layer.

        Impls may take more keywords, which `attnmux.create_impl` passes where they are asked for:
        ``sinks`` (``[num_heads]`` float32), ``use_alibi_sqrt``, ``head_size_v``, ``options``.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: T,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend and write the result into `output`, which is returned.

        Args:
            layer: The layer's scales.
            query: ``[num_tokens, num_heads, head_size]``.
            key: ``[num_tokens, num_kv_heads, head_size]``; may be None where another layer's cache
                is read.
            value: ``[num_tokens, num_kv_heads, head_size_v]``; as `key`.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, head_size + head_size_v]`` with any
                strides; empty for encoders.
            attn_metadata: What this backend's builder made.
            output: ``[num_tokens, num_heads, head_size_v]`` or ``[num_tokens, hidden]``.
            output_scale: See `attnmux.quant.output_quant_key`.
            output_block_scale: See `attnmux.quant.output_quant_key`.

        Raises:
            ValueError: An argument does not fit; nothing was written.
        """
        raise NotImplementedError

    def forward_with_lse(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: T,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and return (output, log-sum-exp) (an addition to the original interface).

        The log-sum-exp is float32 ``[num_tokens, num_heads]``, includes the sink, is -inf for a row
        that sees nothing, and is a natural logarithm unless `lse_base_on_e` is False. Only where
        the backend's `supports_lse` is True.
        """
        raise NotImplementedError

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values into the cache, where `forward` does not.

        Args:
            layer: The layer's scales.
            key: ``[num_tokens, num_kv_heads, head_size]``.
            value: ``[num_tokens, num_kv_heads, head_size_v]``.
            kv_cache: As in `forward`.
            slot_mapping: ``[n]``, n at most num_tokens: ``block * block_size + offset``; -1 skips.
        """
        raise NotImplementedError

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Whether `forward` can quantise its output this way."""
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        """Whether `do_qk_norm_rope_kvcache_update` is there."""
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether `do_rope_and_kv_cache_update` is there."""
        return False

    def do_qk_norm_rope_kvcache_update(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        q_out: torch.Tensor,
        k_out: torch.Tensor,
        positions: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        rms_norm_eps: float,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Normalise queries and keys head by head, rotate them, and write keys and values.

        Args:
            layer: The layer's scales.
            qkv: ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_size]``.
            q_out: Written: ``[num_tokens, num_heads * head_size]`` or with heads apart.
            k_out: Written: ``[num_tokens, num_kv_heads * head_size]`` or with heads apart.
            positions: ``[num_tokens]``: row of `cos_sin_cache` for each token.
            q_weight: ``[head_size]``: weight of the root-mean-square norm of queries.
            k_weight: ``[head_size]``: the same for keys.
            rms_norm_eps: Added to the mean square.
            cos_sin_cache: ``[max_position, rotary_dim]``: cosines, then sines.
            is_neox: True: halves are rotated against each other. False: neighbours are.
            kv_cache: As in `forward`.
            layer_slot_mapping: As in `do_kv_cache_update`.
        """
        raise NotImplementedError

    def do_rope_and_kv_cache_update(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate `query` and `key` in place and write keys and values; arguments as above."""
        raise NotImplementedError
