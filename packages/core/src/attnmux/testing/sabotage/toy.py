"""A small right backend over the oracle itself: what the broken ones are broken from.

It supports everything that the kit knows, is slow, and shows how little a backend needs. The
methods that hold one decision each (`problem`, `attend`, `write`) are what a saboteur overrides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnmux.abc.attention_type import AttentionType
from attnmux.abc.backend import AttentionBackend
from attnmux.abc.builder import AttentionMetadataBuilder
from attnmux.abc.impl import AttentionImpl, AttentionLayer
from attnmux.abc.metadata import AttentionMetadata, CommonAttentionMetadata
from attnmux.checks import (
    bad_argument,
    check_alibi_slopes,
    check_head_counts,
    check_in,
    check_index_dtype,
    check_sinks,
    check_sliding_window,
    check_tensor,
)
from attnmux.config import EngineConfigLike
from attnmux.kv_cache import KVCacheSpec
from attnmux.quant import OUTPUT_QUANT_KEYS, QuantKey, output_quant_key, quantize_output
from attnmux.testing.paged_read import KNOWN_CACHE_DTYPES, CacheContent
from attnmux.testing.paged_write import write_rows
from attnmux.testing.problem import AttentionProblem, split_heads
from attnmux.testing.reference import ReferenceResult, solve


@dataclass(frozen=True)
class ToyMetadata(AttentionMetadata):
    """The batch as it came, and the one setting that is not in it."""

    batch: CommonAttentionMetadata
    rswa_window: int | None


class ToyBuilder(AttentionMetadataBuilder[ToyMetadata]):
    """Keeps the batch."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: EngineConfigLike,
        device: torch.device,
    ) -> None:
        """Make the builder of a group of layers."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ToyMetadata:
        """Return the batch with the window of reference sliding-window attention."""
        window = getattr(self.vllm_config.model_config, "rswa_window", None)
        return ToyMetadata(common_attn_metadata, window)


class ToyImpl(AttentionImpl[ToyMetadata]):
    """One layer: checks, then asks the oracle."""

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
    ) -> None:
        """Check what the layer asks for, and keep it."""
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_head_counts(num_heads, self.num_kv_heads)
        check_sliding_window(sliding_window)
        check_in("kv_cache_dtype", kv_cache_dtype, KNOWN_CACHE_DTYPES)
        if alibi_slopes is not None:
            check_alibi_slopes(alibi_slopes, num_heads)
        if sinks is not None:
            check_sinks(sinks, num_heads)
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.alibi_slopes, self.use_alibi_sqrt = alibi_slopes, use_alibi_sqrt
        self.sinks, self.attn_type = sinks, str(getattr(attn_type, "value", attn_type))
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        if self.attn_type == "encoder_decoder" and (sliding_window or alibi_slopes):
            raise bad_argument("attn_type", "encoder_decoder with a window or ALiBi", "neither")

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Every key that the core defines."""
        return quant_key in OUTPUT_QUANT_KEYS

    def content(self, layer: AttentionLayer) -> CacheContent:
        """Return how this layer's cache rows are stored."""
        size, size_v = self.head_size, self.head_size_v
        return CacheContent(size, size_v, self.kv_cache_dtype, layer._k_scale, layer._v_scale)

    def problem(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: ToyMetadata,
    ) -> AttentionProblem:
        """Return what is asked."""
        batch, content = metadata.batch, self.content(layer)
        has_cache = kv_cache.numel() > 0 and self.attn_type in ("decoder", "encoder_decoder")
        return AttentionProblem(
            query=split_heads(query, self.head_size),
            key=key,
            value=value,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            scale=self.scale,
            kv_cache=kv_cache if has_cache else None,
            block_table=batch.block_table_tensor,
            kv_cache_dtype=content.kv_cache_dtype,
            k_scale=content.k_scale,
            v_scale=content.v_scale,
            head_size=content.head_size,
            head_size_v=content.head_size_v,
            attn_type=self.attn_type,
            causal=batch.causal,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            use_alibi_sqrt=self.use_alibi_sqrt,
            sinks=self.sinks,
            mm_req_doc_ranges=batch.mm_req_doc_ranges,
            rswa_window=metadata.rswa_window,
            rswa_prefix_lens=batch.rswa_prefix_lens,
            encoder_seq_lens=batch.encoder_seq_lens,
        )

    def attend(self, problem: AttentionProblem) -> ReferenceResult:
        """Answer it."""
        return solve(problem)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ToyMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend into `output`."""
        self.forward_with_lse(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )
        return output

    def forward_with_lse(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ToyMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend into `output`, and return it with the log-sum-exp."""
        self.check(query, key, kv_cache, output, attn_metadata)
        quant = output_quant_key(output, output_scale, output_block_scale)
        rows = attn_metadata.batch.num_actual_tokens
        answer = self.attend(self.problem(layer, query, key, value, kv_cache, attn_metadata))
        if quant is None:
            self.store(output, answer.output, rows)
        else:
            flat = answer.output[:rows].flatten(1).float()
            scales = None if output_block_scale is None else output_block_scale[:rows]
            quantize_output(flat, quant, output[:rows].flatten(1), output_scale, scales)
        return output, answer.lse.float()

    def store(self, output: torch.Tensor, answer: torch.Tensor, rows: int) -> None:
        """Write the first `rows` rows of the answer."""
        output[:rows] = answer[:rows].reshape(output[:rows].shape).to(output.dtype)

    def check(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: ToyMetadata,
    ) -> None:
        """Refuse what does not fit, before anything is written."""
        heads, sizes = self.num_heads, (self.head_size, self.head_size_v)
        for name, tensor, size in zip(("query", "output"), (query, output), sizes, strict=True):
            width = heads * size
            if tensor.dim() == 3:
                check_tensor(name, tensor, shape=("num_tokens", heads, size))
            elif list(tensor.shape[1:]) not in ([width], [width // 2]):
                raise bad_argument(f"{name}.shape", list(tensor.shape), f"[num_tokens, {width}]")
        if not query.dtype.is_floating_point:
            raise bad_argument("query.dtype", query.dtype, "a floating-point dtype")
        if output.dtype.is_floating_point and output.element_size() > 1:
            check_tensor("output", output, dtype=query.dtype)
        if key is not None:
            check_tensor("key", key, shape=("num_tokens", self.num_kv_heads, self.head_size))
            check_tensor("key", key, dtype=query.dtype)
        if kv_cache.numel():
            check_tensor("kv_cache", kv_cache, shape=("num_blocks", self.num_kv_heads, "n", "c"))
        needed = metadata.batch.num_actual_tokens
        for name, tensor in (("query", query), ("output", output)):
            if tensor.shape[0] < needed:
                raise bad_argument(f"{name}.shape[0]", tensor.shape[0], f"at least {needed}")

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new rows."""
        check_tensor("key", key, shape=("num_tokens", self.num_kv_heads, self.head_size))
        if not key.dtype.is_floating_point:
            raise bad_argument("key.dtype", key.dtype, "a floating-point dtype")
        check_index_dtype("slot_mapping", slot_mapping)
        self.write(kv_cache, slot_mapping, key, value, self.content(layer))

    def write(
        self,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        content: CacheContent,
    ) -> None:
        """Write row ``i`` to ``slots[i]``."""
        write_rows(kv_cache, slots, key, value, content)


class ToyBackend(AttentionBackend):
    """Supports everything, quickly for nobody."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KNOWN_CACHE_DTYPES)
    forward_includes_kv_cache_update = False
    impl_cls: ClassVar[type[Any]] = ToyImpl
    builder_cls: ClassVar[type[Any]] = ToyBuilder
    declined: ClassVar[Sequence[str]] = ()
    """Names of `supports_*` questions that are answered with no."""

    @staticmethod
    def get_name() -> str:
        """Return the name."""
        return "TOY"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the impl."""
        return ToyImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Return the builder."""
        return ToyBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Every type."""
        return attn_type in {kind.value for kind in AttentionType}


def _yes(cls: type[AttentionBackend]) -> bool:
    return True


SUPPORTED = (
    "supports_sink",
    "supports_alibi",
    "supports_alibi_sqrt",
    "supports_mm_prefix",
    "supports_per_head_quant_scales",
    "supports_sliding_window",
    "supports_non_causal",
    "supports_logits_soft_cap",
    "supports_rswa",
    "supports_per_request_causal",
    "supports_lse",
    "supports_kv_sharing",
)
for _question in SUPPORTED:
    setattr(ToyBackend, _question, classmethod(_yes))
