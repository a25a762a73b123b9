"""The public road from a scenario to a running impl: request, spec, cache, impl, builder.

Exactly what an engine does, so that what the kit proves is what engines get.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnmux.abc.backend import AttentionBackend
from attnmux.abc.builder import AttentionMetadataBuilder
from attnmux.config import CacheConfig, EngineConfig, ModelConfig
from attnmux.create import create_builder, create_impl
from attnmux.kv_cache import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    SlidingWindowSpec,
    allocate,
)
from attnmux.request import AttentionRequest
from attnmux.selection import reasons_against
from attnmux.testing.declared import dtype_of
from attnmux.testing.rows import FAR_STRIDE
from attnmux.testing.scenario import Scenario

__all__ = [
    "LAYER_NAMES",
    "Layer",
    "allocate_cache",
    "make_builder",
    "make_impl",
    "reasons_against",
    "request_of",
    "spec_of",
]

LAYER_NAMES = ["layers.0", "layers.1", "layers.2"]
"""Three layers share the cache's buffer, so that one layer's view is not contiguous."""
_RUN_LAYER = LAYER_NAMES[1]


@dataclass(frozen=True)
class Layer:
    """The layer that an impl is called with: its scales and nothing else."""

    _q_scale: torch.Tensor
    _k_scale: torch.Tensor
    _k_scale_cpu: torch.Tensor
    _v_scale: torch.Tensor
    _v_scale_cpu: torch.Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float
    _prob_scale: torch.Tensor

    @classmethod
    def with_scales(
        cls, k_scale: torch.Tensor, v_scale: torch.Tensor, device: torch.device | str
    ) -> Layer:
        """Make a layer; the scales are float32 with one element, or one for each KV head."""
        one = torch.ones(1, dtype=torch.float32, device=device)
        return cls(
            one,
            k_scale.to(device),
            k_scale.cpu(),
            v_scale.to(device),
            v_scale.cpu(),
            1.0,
            float(k_scale.flatten()[0]),
            float(v_scale.flatten()[0]),
            one.clone(),
        )

    def forward(self, *arguments: Any) -> torch.Tensor:
        """Not part of what the kit proves."""
        raise NotImplementedError("the kit calls the impl, never the layer")


def request_of(
    scenario: Scenario, device: torch.device | str = "cpu", **changes: Any
) -> AttentionRequest:
    """Return what `scenario` asks of selection; `changes` are further fields of the request."""
    return AttentionRequest(
        head_size=scenario.head_size,
        dtype=dtype_of(scenario.dtype),
        kv_cache_dtype=scenario.kv_cache_dtype if scenario.uses_cache else None,
        block_size=scenario.block_size if scenario.uses_cache else None,
        has_sink=scenario.sinks,
        use_mm_prefix=scenario.has_ranges,
        use_per_head_quant_scales=scenario.per_head_scales,
        attn_type=scenario.attn_type,
        has_sliding_window=scenario.sliding_window is not None,
        use_non_causal=not scenario.causal or scenario.per_request_causal,
        use_alibi=bool(scenario.alibi),
        use_alibi_sqrt=scenario.alibi == "sqrt",
        has_logits_soft_cap=scenario.logits_soft_cap is not None,
        use_rswa=scenario.rswa_window is not None,
        use_per_request_causal=scenario.per_request_causal,
        use_kv_sharing=scenario.kv_sharing,
        num_heads=scenario.num_heads,
        num_kv_heads=scenario.num_kv_heads,
        head_size_v=scenario.head_size_v,
        device=str(device),
        kv_cache_layout=KVCacheLayout[scenario.layout] if scenario.uses_cache else None,
        **changes,
    )


def spec_of(scenario: Scenario, backend: type[AttentionBackend]) -> AttentionSpec:
    """Return the cache spec of the scenario's layer, as the backend wants it."""
    spec_cls: type[AttentionSpec] = FullAttentionSpec
    more: dict[str, Any] = {}
    if scenario.is_encoder:
        spec_cls = EncoderOnlyAttentionSpec
    elif scenario.is_cross:
        spec_cls = CrossAttentionSpec
    elif scenario.sliding_window is not None:
        spec_cls = SlidingWindowSpec
        more["sliding_window"] = scenario.sliding_window
    spec = spec_cls.for_layer(
        block_size=scenario.block_size,
        num_kv_heads=scenario.num_kv_heads,
        head_size=scenario.head_size,
        head_size_v=scenario.head_size_v,
        dtype=dtype_of(scenario.dtype),
        kv_cache_dtype=scenario.kv_cache_dtype,
        **more,
    )
    return backend.customize_spec(spec)


def allocate_cache(
    scenario: Scenario, spec: AttentionSpec, num_blocks: int, device: torch.device | str
) -> torch.Tensor:
    """Return the middle layer's view of a cache of three layers; empty where nothing is cached."""
    if not scenario.uses_cache:
        return torch.empty(0, dtype=dtype_of(scenario.dtype), device=device)
    if scenario.far_blocks:
        shape = (num_blocks, *spec.layer_shape)
        buffer = torch.empty(num_blocks * FAR_STRIDE, dtype=spec.dtype, device=device)
        strides = (FAR_STRIDE, shape[2] * shape[3], shape[3], 1)
        return buffer.as_strided(shape, strides)
    layout = KVCacheLayout[scenario.layout]
    allocation = allocate(dict.fromkeys(LAYER_NAMES, spec), num_blocks, layout, device)
    return allocation.views[_RUN_LAYER]


def make_builder(
    backend: type[AttentionBackend],
    scenario: Scenario,
    device: torch.device | str,
    options: object | None = None,
) -> AttentionMetadataBuilder[Any]:
    """Make the backend's builder for the scenario's layers."""
    config = EngineConfig(
        model_config=ModelConfig(
            dtype=dtype_of(scenario.dtype),
            num_heads=scenario.num_heads,
            num_kv_heads=scenario.num_kv_heads,
            head_size=scenario.head_size,
            rswa_window=scenario.rswa_window,
        ),
        cache_config=CacheConfig(
            block_size=scenario.block_size, cache_dtype=scenario.kv_cache_dtype
        ),
    )
    spec = spec_of(scenario, backend)
    return create_builder(backend, spec, LAYER_NAMES, config, device, options)


def make_impl(
    backend: type[AttentionBackend],
    scenario: Scenario,
    *,
    scale: float,
    alibi_slopes: list[float] | None,
    sinks: torch.Tensor | None,
    options: object | None = None,
) -> Any:
    """Make the backend's impl for the scenario's layer."""
    more: dict[str, Any] = {}
    if scenario.alibi == "sqrt":
        more["use_alibi_sqrt"] = True
    if sinks is not None:
        more["sinks"] = sinks
    if options is not None:
        more["options"] = options
    if scenario.head_size_v is not None:
        more["head_size_v"] = scenario.head_size_v
    return create_impl(
        backend,
        num_heads=scenario.num_heads,
        head_size=scenario.head_size,
        scale=scale,
        num_kv_heads=scenario.num_kv_heads,
        alibi_slopes=alibi_slopes,
        sliding_window=scenario.sliding_window,
        kv_cache_dtype=scenario.kv_cache_dtype,
        logits_soft_cap=scenario.logits_soft_cap,
        attn_type=scenario.attn_type,
        kv_sharing_target_layer_name=LAYER_NAMES[0] if scenario.kv_sharing else None,
        **more,
    )
