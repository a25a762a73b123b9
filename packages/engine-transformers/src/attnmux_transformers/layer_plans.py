"""From what layers ask for to the backends that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnmux import (
    AttentionRequest,
    SelectionError,
    SelectionReport,
    explain,
    resolve_options,
    select_backend,
)
from attnmux.backend import AttentionBackend, AttentionType
from attnmux.kv_cache import AttentionSpec, EncoderOnlyAttentionSpec, FullAttentionSpec
from attnmux_transformers.attention import UnsupportedModelError
from attnmux_transformers.model_features import LayerFeatures


@dataclass(frozen=True)
class LayerPlan:
    """One layer with the backend chosen for it.

    Attributes:
        features: What the layer asks for.
        request: The same, as selection was asked.
        report: What selection answered.
        backend: The backend's class.
        options: The backend's options, None where it has none.
        spec: The layer's cache, as the backend wants it.
    """

    features: LayerFeatures
    request: AttentionRequest
    report: SelectionReport
    backend: type[AttentionBackend]
    options: object | None
    spec: AttentionSpec


def plan_layers(
    features: Sequence[LayerFeatures],
    *,
    block_size: int,
    kv_cache_dtype: str = "auto",
    device: torch.device | str = "cpu",
    backend: str | None = None,
) -> list[LayerPlan]:
    """Choose a backend for each layer; equal layers are chosen for once.

    Args:
        features: As `probe_model` returned them.
        block_size: Tokens in a cache block; without meaning for encoders.
        kv_cache_dtype: Name of the cache dtype; without meaning for encoders.
        device: Where the model is.
        backend: Name of the backend to use for all layers; None lets selection decide.

    Raises:
        UnsupportedModelError: No backend can serve a layer; the text is selection's report.
    """
    requests = [_request(each, block_size, kv_cache_dtype, device) for each in features]
    layers_of: dict[AttentionRequest, list[str]] = {}
    for each, request in zip(features, requests, strict=True):
        layers_of.setdefault(request, []).append(each.name)
    chosen = {}
    for request, names in layers_of.items():
        try:
            cls = select_backend(request, backend=backend)
        except SelectionError as error:
            raise UnsupportedModelError(f"{_layer_list(names)}: {error}") from error
        report = explain(request, backend=backend)
        chosen[request] = (report, cls, resolve_options(cls.get_name()))
    return [
        LayerPlan(each, request, *chosen[request], _spec(each, request, chosen[request][1]))
        for each, request in zip(features, requests, strict=True)
    ]


def describe_plans(plans: Sequence[LayerPlan]) -> str:
    """Return selection's report for each kind of layer, headed by the layers of that kind."""
    names: dict[AttentionRequest, list[str]] = {}
    reports: dict[AttentionRequest, SelectionReport] = {}
    for plan in plans:
        names.setdefault(plan.request, []).append(plan.features.name)
        reports[plan.request] = plan.report
    return "\n\n".join(
        f"{_layer_list(names[request])}\n{report}" for request, report in reports.items()
    )


def _request(
    features: LayerFeatures, block_size: int, kv_cache_dtype: str, device: torch.device | str
) -> AttentionRequest:
    caches = features.attn_type == AttentionType.DECODER
    return AttentionRequest(
        head_size=features.head_size,
        head_size_v=None if features.head_size_v == features.head_size else features.head_size_v,
        dtype=features.dtype,
        kv_cache_dtype=kv_cache_dtype if caches else None,
        block_size=block_size if caches else None,
        attn_type=features.attn_type,
        has_sink=features.sinks is not None,
        has_sliding_window=features.sliding_window is not None,
        has_logits_soft_cap=features.logits_soft_cap is not None,
        num_heads=features.num_heads,
        num_kv_heads=features.num_kv_heads,
        device=str(device),
    )


def _spec(
    features: LayerFeatures, request: AttentionRequest, backend: type[AttentionBackend]
) -> AttentionSpec:
    sizes: dict[str, Any] = {
        "block_size": request.block_size or 1,
        "num_kv_heads": features.num_kv_heads,
        "head_size": features.head_size,
        "dtype": features.dtype,
        "kv_cache_dtype": request.kv_cache_dtype or "auto",
        "head_size_v": request.head_size_v,
    }
    if features.attn_type != AttentionType.DECODER:
        return backend.customize_spec(EncoderOnlyAttentionSpec.for_layer(**sizes))
    # A windowed layer keeps all its tokens: all layers share one table of blocks.
    return backend.customize_spec(
        FullAttentionSpec.for_layer(sliding_window=features.sliding_window, **sizes)
    )


def _layer_list(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"1 layer: {names[0]}"
    return f"{len(names)} layers: {names[0]} … {names[-1]}"
