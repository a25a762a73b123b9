"""Once a layer: check what came, then launch."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnmux.backend import AttentionImpl, AttentionLayer, AttentionType
from attnmux.checks import (
    bad_argument,
    check_alibi_slopes,
    check_head_counts,
    check_in,
    check_positive,
    check_scale,
    check_sinks,
    check_sliding_window,
    check_soft_cap,
    check_tensor,
)
from attnmux.kv_cache import cache_dtype_handler
from attnmux.quant import OUTPUT_QUANT_KEYS, QuantKey
from attnmux_cpu import arguments
from attnmux_cpu.builder import ENCODER_TYPES, CPUAttentionMetadata
from attnmux_cpu.cache_update import CacheUpdate, HeadNorm, Rotation
from attnmux_cpu.kernels import attention
from attnmux_cpu.kernels.masks import MaskRule
from attnmux_cpu.kernels.paging import PagedRows
from attnmux_cpu.kernels.planning import LayerKind
from attnmux_cpu.kernels.problem import DenseKeys, PagedKeys, Problem
from attnmux_cpu.kernels.scores import ScoreRule
from attnmux_cpu.kernels.tiles import HeadShape, TileShape
from attnmux_cpu.kernels.workspace import thread_workspace
from attnmux_cpu.options import CPUAttentionOptions, check_options

KV_CACHE_DTYPES = (
    "auto",
    "float32",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8_per_token_head",
    "fp8_per_token_head",
)


class CPUAttentionImpl(AttentionImpl[CPUAttentionMetadata]):
    """Attention of one layer on a CPU, in float32 whatever the dtype of its inputs."""

    can_return_lse_for_decode = True
    supports_dcp = False

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
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        head_size_v: int | None = None,
        options: CPUAttentionOptions | None = None,
    ) -> None:
        """Make the impl of one layer.

        Args:
            num_heads: Query heads.
            head_size: Size of a query and key head.
            scale: Factor of the scores.
            num_kv_heads: Key and value heads; None: as many as query heads.
            alibi_slopes: One a query head; None: no ALiBi.
            sliding_window: Tokens seen, the own one included; None: all.
            kv_cache_dtype: Name of the cache's dtype.
            logits_soft_cap: Bound of the scores; None or 0: none.
            attn_type: An `AttentionType`.
            kv_sharing_target_layer_name: The layer whose cache is read and not written; None: own.
            sinks: ``[num_heads]``: a logit of each head that joins the denominator; None: none.
            use_alibi_sqrt: The square-root form of ALiBi.
            head_size_v: Size of a value head; None: as `head_size`.
            options: What users may set.

        Raises:
            ValueError: An argument is out of range, or two do not go together.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_head_counts(num_heads, num_kv_heads)
        check_positive("head_size", head_size)
        if head_size_v is not None:
            check_positive("head_size_v", head_size_v)
        check_sliding_window(sliding_window)
        check_alibi_slopes(alibi_slopes, num_heads)
        check_sinks(sinks, num_heads)
        check_in("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
        check_in("attn_type", attn_type, [kind.value for kind in AttentionType])
        check_soft_cap(logits_soft_cap)
        if use_alibi_sqrt and alibi_slopes is None:
            raise bad_argument("alibi_slopes", None, "slopes, as use_alibi_sqrt is True")
        is_cross = attn_type == AttentionType.ENCODER_DECODER
        for name, given in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
            if isinstance(given, torch.Tensor):
                check_tensor(name, given, device="cpu")
        for name, value in (("sliding_window", sliding_window), ("alibi_slopes", alibi_slopes)):
            if is_cross and value is not None:
                raise bad_argument(name, value, f"None for attn_type {str(attn_type)!r}")
        for name in ("dcp_world_size", "pcp_world_size"):
            if getattr(self, name) > 1:
                raise bad_argument(name, getattr(self, name), "1")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.scale = head_size, check_scale(scale)
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, AttentionType(attn_type)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.options = check_options(options, CPUAttentionOptions)

        group = num_heads // num_kv_heads
        slopes = None
        if alibi_slopes is not None:
            slopes = torch.as_tensor(alibi_slopes, dtype=torch.float32, device="cpu")
            slopes = slopes.view(num_kv_heads, group, 1, 1)
        self._sinks = None if sinks is None else sinks.detach().float().view(num_kv_heads, group)
        self._masks = MaskRule(sliding_window, symmetric=self.attn_type in ENCODER_TYPES)
        self._scores = ScoreRule(self.scale, logits_soft_cap or None, slopes, use_alibi_sqrt)
        self._heads = HeadShape(num_heads, num_kv_heads, head_size, self.head_size_v)
        self._shape = TileShape(self._heads, self.options.workspace_bytes)
        self._cache = CacheUpdate(self._heads, cache_dtype_handler(kv_cache_dtype))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend and write the result into `output`; see `AttentionImpl.forward`.

        `key` and `value` are read by encoders and by cross-attention without a cache only; others
        read the cache, into which `do_kv_cache_update` has written.
        """
        self._attend(
            layer, query, key, value, kv_cache, attn_metadata,
            (output, output_scale, output_block_scale), lse=None,
        )  # fmt: skip
        return output

    def forward_with_lse(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and return output and natural log-sum-exp.

        The latter is float32 ``[num_tokens, num_heads]`` with as many rows as `query`; rows past
        the batch's tokens are -inf.
        """
        heads = self._heads
        rows = arguments.heads_apart("query", query, heads.num_heads, heads.head_size)
        lse = torch.full(
            (rows.shape[0], self.num_heads), float("-inf"), dtype=torch.float32, device="cpu"
        )
        self._attend(
            layer, query, key, value, kv_cache, attn_metadata,
            (output, output_scale, output_block_scale), lse,
        )  # fmt: skip
        return output, lse

    @torch.no_grad()
    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        metadata: CPUAttentionMetadata,
        results: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        lse: torch.Tensor | None,
    ) -> None:
        if not isinstance(metadata, CPUAttentionMetadata):
            raise bad_argument("attn_metadata", type(metadata).__name__, "CPUAttentionMetadata")
        heads, num_tokens = self._heads, metadata.num_actual_tokens
        rows = arguments.heads_apart("query", query, heads.num_heads, heads.head_size)
        arguments.check_rows("query", rows, num_tokens)
        writer = arguments.check_output(results, heads, rows.dtype, num_tokens, lse)
        has_cache = self._reads_cache(kv_cache)
        masks = self._masks
        if metadata.rswa_window is not None:
            masks = replace(masks, rswa_window=metadata.rswa_window)
        keys: PagedKeys | DenseKeys
        if has_cache:
            self._check_unread(key, value)
            keys = self._paged_keys(layer, kv_cache, rows.dtype, metadata.block_size)
        else:
            keys = self._dense_keys(key, value, rows.dtype, metadata)
        kind = LayerKind(masks, self._shape, self.options.max_grouped_queries)
        schedule = metadata.schedule(self.attn_type, has_cache, kind)
        if isinstance(keys, PagedKeys):
            arguments.check_blocks(schedule, keys.pages.num_blocks)
        problem = Problem(
            query=rows,
            keys=keys,
            masks=masks,
            scores=self._scores,
            sinks=self._sinks,
            shape=self._shape,
            writer=writer,
            workspace=thread_workspace(),
        )
        attention.run(problem, schedule)

    def _reads_cache(self, kv_cache: torch.Tensor | None) -> bool:
        if self.attn_type == AttentionType.ENCODER_DECODER:
            return kv_cache is not None and kv_cache.numel() > 0
        return self.attn_type == AttentionType.DECODER

    def _check_unread(self, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
        # The cache has them already, but a wrong shape here means a wrong shape there.
        heads = self._heads
        for name, rows, size in (("key", key, heads.head_size), ("value", value, heads.value_size)):
            if rows is not None:
                arguments.heads_apart(name, rows, heads.num_kv_heads, size)

    def _paged_keys(
        self,
        layer: AttentionLayer,
        kv_cache: torch.Tensor | None,
        dtype: torch.dtype,
        block_size: int,
    ) -> PagedKeys:
        row = self._cache.row_format(dtype)
        cache = self._cache.check(kv_cache, row, block_size)
        scales = self._cache.scales(layer, row)
        return PagedKeys(PagedRows(cache, self._shape.page(block_size)), row, *scales)

    def _dense_keys(
        self,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        dtype: torch.dtype,
        metadata: CPUAttentionMetadata,
    ) -> DenseKeys:
        heads, num_keys = self._heads, metadata.num_keys(self.attn_type)
        key = arguments.heads_apart("key", key, heads.num_kv_heads, heads.head_size)
        value = arguments.heads_apart("value", value, heads.num_kv_heads, heads.value_size)
        for name, rows in (("key", key), ("value", value)):
            arguments.check_same_dtype(name, rows, "query", dtype)
            arguments.check_rows(name, rows, num_keys)
        return DenseKeys(key, value)

    @torch.no_grad()
    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values; see `AttentionImpl.do_kv_cache_update`.

        Nothing is written for encoders, which have no cache, for a layer that reads another
        layer's cache, and for cross-attention without new encoder tokens (`key` None).
        """
        if self._writes_cache(key):
            self._cache.update(layer, key, value, kv_cache, slot_mapping)

    @torch.no_grad()
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
        """Rotate `query` and `key` in place, then write; see `AttentionImpl`."""
        rotation = Rotation(positions, cos_sin_cache, is_neox)
        if not self._writes_cache(key):
            self._cache.rotate(query, key, rotation)
            return
        self._cache.rotate_and_update(
            layer, query, key, value, rotation, kv_cache, layer_slot_mapping
        )

    @torch.no_grad()
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
        """Normalise and rotate into `q_out` and `k_out`, then write; see `AttentionImpl`."""
        self._cache.normalise_rotate_and_update(
            layer,
            qkv,
            q_out,
            k_out,
            HeadNorm(q_weight, k_weight, rms_norm_eps),
            Rotation(positions, cos_sin_cache, is_neox),
            kv_cache,
            layer_slot_mapping,
            writes=self._writes_cache(k_out),
        )

    def _writes_cache(self, key: torch.Tensor | None) -> bool:
        if self.attn_type in ENCODER_TYPES or self.kv_sharing_target_layer_name is not None:
            return False
        return key is not None or self.attn_type != AttentionType.ENCODER_DECODER

    def fused_rope_kvcache_supported(self) -> bool:
        """True: `do_rope_and_kv_cache_update` is there."""
        return True

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        """True: `do_qk_norm_rope_kvcache_update` is there."""
        return True

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Whether `forward` can write its output this way: all four named keys."""
        return quant_key in OUTPUT_QUANT_KEYS
