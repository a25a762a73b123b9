"""The attention layers of a model, ready to run, and one step over them.

A builder is made for each group of layers that share a backend and a cache format, and metadata is
built once a step for each builder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnmux import create_builder, create_impl
from attnmux.backend import AttentionType, CommonAttentionMetadata
from attnmux.checks import bad_argument
from attnmux.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from attnmux.kv_cache import allocate, resolve_layout
from attnmux_transformers.attention import AttentionCall
from attnmux_transformers.layer_plans import LayerPlan


class LayerScales:
    """The layer as an impl reads it: scales of 1, since nothing is calibrated here."""

    def __init__(self, device: torch.device) -> None:
        """Make the scales on `device`, with copies on the host."""
        one = torch.ones(1, dtype=torch.float32, device=device)
        host = torch.ones(1, dtype=torch.float32)
        self._q_scale = self._k_scale = self._v_scale = self._prob_scale = one
        self._k_scale_cpu = self._v_scale_cpu = host
        self._q_scale_float = self._k_scale_float = self._v_scale_float = 1.0

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Not how layers are run here: the model calls the attention function instead."""
        raise bad_argument("layer.forward", "a call", "impl.forward, as the engine calls it")


@dataclass(frozen=True)
class _Layer:
    plan: LayerPlan
    impl: Any
    scales: LayerScales
    kv_cache: torch.Tensor
    group: int


class LayerStack:
    """All attention layers of a model, ready to run steps."""

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        *,
        num_blocks: int,
        device: torch.device,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        """Allocate the cache and make every impl and builder.

        Args:
            plans: One for each layer.
            num_blocks: Blocks in each layer's cache.
            device: Where the model and the cache are.
            max_model_len: Longest request in tokens.
            max_num_seqs: Most requests in a step.
            max_num_batched_tokens: Most tokens in a step.

        Raises:
            ValueError: The backends agree on no cache layout, or an impl refuses its layer.
        """
        self.plans = list(plans)
        layout = resolve_layout({plan.features.name: plan.backend for plan in plans})
        specs = {plan.features.name: plan.spec for plan in plans}
        self.cache = allocate(specs, num_blocks, layout, device)
        scales = LayerScales(device)
        groups: dict[tuple[object, ...], list[LayerPlan]] = {}
        for plan in plans:
            groups.setdefault(_group_key(plan), []).append(plan)
        self._layers: dict[str, _Layer] = {}
        self._builders = []
        for number, members in enumerate(groups.values()):
            config = _engine_config(
                members[0], num_blocks, max_model_len, max_num_seqs, max_num_batched_tokens
            )
            names = [plan.features.name for plan in members]
            first = members[0]
            self._builders.append(
                create_builder(first.backend, first.spec, names, config, device, first.options)
            )
            for plan in members:
                view = self.cache.views[plan.features.name]
                self._layers[plan.features.name] = _Layer(plan, _impl(plan), scales, view, number)

    @property
    def decode_threshold(self) -> int:
        """The most tokens that every builder that sorts its batch still takes for a decode."""
        thresholds = [
            builder.reorder_batch_threshold
            for builder in self._builders
            if builder.reorder_batch_threshold is not None
        ]
        return min(thresholds, default=1)

    def begin(
        self, batch: CommonAttentionMetadata, names: Mapping[torch.nn.Module, str]
    ) -> LayerStep:
        """Build the metadata of every group for this batch, and return the step.

        Args:
            batch: The step's batch.
            names: The name of each attention module.
        """
        metadata = [builder.build(0, batch) for builder in self._builders]
        return LayerStep(self._layers, names, metadata, batch)


class LayerStep:
    """One pass over the model: answers each layer's call with its impl."""

    def __init__(
        self,
        layers: Mapping[str, _Layer],
        names: Mapping[torch.nn.Module, str],
        metadata: Sequence[Any],
        batch: CommonAttentionMetadata,
    ) -> None:
        """Keep what the layers of this pass share."""
        self._layers = layers
        self._names = names
        self._metadata = metadata
        self._batch = batch

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the new keys and values where the impl does not, and attend.

        Returns:
            ``[num_tokens, num_heads, head_size_v]``.
        """
        layer = self._layers[self._names[call.module]]
        features = layer.plan.features
        if call.scale != features.scale or call.logits_soft_cap != features.logits_soft_cap:
            raise bad_argument(
                features.name,
                f"scale {call.scale}, soft cap {call.logits_soft_cap}",
                f"scale {features.scale}, soft cap {features.logits_soft_cap}, as when the model "
                "was probed (make a new Engine after changing a model)",
            )
        caches = features.attn_type == AttentionType.DECODER
        if caches and not layer.plan.backend.forward_includes_kv_cache_update:
            layer.impl.do_kv_cache_update(
                layer.scales, call.key, call.value, layer.kv_cache, self._batch.slot_mapping
            )
        num_tokens = call.query.shape[0]
        output = call.query.new_empty(num_tokens, features.num_heads, features.head_size_v)
        layer.impl.forward(
            layer.scales,
            call.query,
            call.key,
            call.value,
            layer.kv_cache,
            self._metadata[layer.group],
            output,
        )
        return output


def _group_key(plan: LayerPlan) -> tuple[object, ...]:
    features = plan.features
    return (plan.backend, plan.spec, features.num_heads, features.attn_type)


def _impl(plan: LayerPlan) -> Any:
    features, request = plan.features, plan.request
    return create_impl(
        plan.backend,
        num_heads=features.num_heads,
        head_size=features.head_size,
        scale=features.scale,
        num_kv_heads=features.num_kv_heads,
        sliding_window=features.sliding_window,
        kv_cache_dtype=request.kv_cache_dtype or "auto",
        logits_soft_cap=features.logits_soft_cap,
        attn_type=features.attn_type,
        head_size_v=request.head_size_v,
        sinks=features.sinks,
        options=plan.options,
    )


def _engine_config(
    plan: LayerPlan,
    num_blocks: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> EngineConfig:
    features = plan.features
    return EngineConfig(
        model_config=ModelConfig(
            dtype=features.dtype,
            max_model_len=max_model_len,
            num_heads=features.num_heads,
            num_kv_heads=features.num_kv_heads,
            head_size=features.head_size,
        ),
        scheduler_config=SchedulerConfig(max_num_seqs, max_num_batched_tokens),
        cache_config=CacheConfig(
            plan.spec.block_size, plan.request.kv_cache_dtype or "auto", num_blocks
        ),
    )
