"""What one kind of layer asks of a backend."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from attnmux.abc.attention_type import AttentionType
from attnmux.checks import bad_argument, check_head_counts, check_in, check_positive
from attnmux.kv_cache import KVCacheLayout
from attnmux.platform import DeviceCapability


@dataclass(frozen=True)
class AttentionRequest:
    """Everything selection needs to know about a layer; hashable, so that choices are remembered.

    A flag that is True is a feature that must be applied: a backend that lacks it is not chosen.
    The first group of flags is what the contract's ``validate_configuration`` takes; the second
    is what selection checks beyond it.

    Attributes:
        head_size: elements of one query and key head (of the latent plus rope part for MLA).
        dtype: dtype of queries.
        kv_cache_dtype: name of a cache dtype, or None when there is no cache.
        block_size: tokens of one cache block, or None when it is left to the backend.
        use_mla: latent attention.
        has_sink: a learned logit per head joins the denominator.
        use_sparse: attention to given top-k positions only.
        use_mm_prefix: multimodal ranges attend in both directions.
        use_per_head_quant_scales: the quantised cache has a scale for each KV head.
        device_capability: of the device; None takes that of ``device``.
        attn_type: one of :class:`~attnmux.backend.AttentionType`.
        has_sliding_window: keys are limited to a window.
        use_non_causal: decoder layers attend in both directions.
        use_batch_invariant: a request's bits may not depend on its neighbours.
        use_kv_connector: cache blocks are moved by a connector.
        use_pcp: prefill context parallelism.
        use_adaptive_verification: drafts are shortened on the device.
        use_dcp: decode context parallelism.
        use_alibi: ALiBi slopes.
        use_alibi_sqrt: the square-root form of ALiBi; implies ``use_alibi``.
        has_logits_soft_cap: scores are capped.
        use_rswa: reference sliding-window attention.
        use_per_request_causal: ``causal`` is a tensor, one value for each request.
        needs_lse: the log-sum-exp of each row is wanted.
        use_kv_sharing: the layer reads another layer's cache.
        head_size_v: elements of one value head; None is ``head_size``.
        num_heads: query heads of this rank, or None.
        num_kv_heads: KV heads of this rank, or None.
        device: such as ``"cpu"`` or ``"cuda:0"``; a ``torch.device`` is taken too.
        kv_cache_layout: the layout the cache has already, or None when it is still open.

    Raises:
        ValueError: a field is outside what can exist, or two fields contradict each other; the
            text names the field, what came and what is allowed.
    """

    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str | None = "auto"
    block_size: int | None = None
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    device_capability: DeviceCapability | None = None
    attn_type: str = AttentionType.DECODER
    has_sliding_window: bool = False
    use_non_causal: bool = False
    use_batch_invariant: bool = False
    use_kv_connector: bool = False
    use_pcp: bool = False
    use_adaptive_verification: bool = False
    use_dcp: bool = False

    use_alibi: bool = False
    use_alibi_sqrt: bool = False
    has_logits_soft_cap: bool = False
    use_rswa: bool = False
    use_per_request_causal: bool = False
    needs_lse: bool = False
    use_kv_sharing: bool = False
    head_size_v: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    device: str = "cpu"
    kv_cache_layout: KVCacheLayout | None = None

    def __post_init__(self) -> None:
        """Check every field; bring device, capability and layout to one form."""
        check_positive("head_size", self.head_size)
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise bad_argument("dtype", repr(self.dtype), "a floating-point torch.dtype")
        if self.kv_cache_dtype is not None and not isinstance(self.kv_cache_dtype, str):
            raise bad_argument(
                "kv_cache_dtype", repr(self.kv_cache_dtype), "the name of a cache dtype, or None"
            )
        for name in ("block_size", "head_size_v", "num_heads", "num_kv_heads"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_in("attn_type", self.attn_type, [str(kind.value) for kind in AttentionType])
        self._check_flags()
        self._set("attn_type", str(AttentionType(self.attn_type).value))
        self._set("device", _device_text(self.device))
        if self.device_capability is not None:
            self._set("device_capability", _capability(self.device_capability))
        if self.kv_cache_layout is not None:
            self._set("kv_cache_layout", _layout(self.kv_cache_layout))
        if self.use_alibi_sqrt:
            self._set("use_alibi", True)

    def _check_flags(self) -> None:
        for name in FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise bad_argument(name, repr(value), "True or False")
        if self.num_heads is not None and self.num_kv_heads is not None:
            check_head_counts(self.num_heads, self.num_kv_heads)
        if self.use_mla and self.attn_type != AttentionType.DECODER:
            raise bad_argument("attn_type", repr(self.attn_type), "'decoder' where use_mla is True")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def device_type(self) -> str:
        """The type of :attr:`device`: ``"cuda"`` of ``"cuda:0"``."""
        return self.device.partition(":")[0]

    def asked_features(self) -> tuple[str, ...]:
        """Names of the flags that are True, in the order of the fields."""
        return tuple(name for name in FLAGS if getattr(self, name))

    def to_dict(self) -> dict[str, object]:
        """The request as plain values, ready for JSON; dtype without ``torch.``."""
        data: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        data["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.device_capability is not None:
            data["device_capability"] = list(self.device_capability)
        if self.kv_cache_layout is not None:
            data["kv_cache_layout"] = self.kv_cache_layout.name
        return data

    def __str__(self) -> str:
        """One line: sizes, dtypes, device, then the features asked for."""
        parts = [f"head_size {self.head_size}"]
        if self.head_size_v not in (None, self.head_size):
            parts.append(f"head_size_v {self.head_size_v}")
        if self.num_heads is not None:
            parts.append(f"{self.num_heads} query heads")
        if self.num_kv_heads is not None:
            parts.append(f"{self.num_kv_heads} KV head{'s' * (self.num_kv_heads > 1)}")
        parts.append(str(self.dtype).removeprefix("torch."))
        if self.kv_cache_dtype is None:
            parts.append("no cache")
        else:
            parts.append(f"cache {self.kv_cache_dtype}")
        if self.block_size is not None:
            parts.append(f"block size {self.block_size}")
        if self.kv_cache_layout is not None:
            parts.append(f"layout {self.kv_cache_layout.name}")
        if self.attn_type != AttentionType.DECODER:
            parts.append(f"type {self.attn_type}")
        parts.append(f"device {self.device}")
        if self.device_capability is not None:
            parts.append(f"capability {self.device_capability.as_version_str()}")
        return ", ".join([*parts, *(FLAGS[name] for name in self.asked_features())])


FLAGS: dict[str, str] = {
    "use_mla": "MLA",
    "has_sink": "attention sinks",
    "use_sparse": "sparse (top-k)",
    "use_mm_prefix": "multimodal prefix ranges",
    "use_per_head_quant_scales": "per-head quant scales",
    "has_sliding_window": "sliding window",
    "use_non_causal": "non-causal",
    "use_batch_invariant": "batch invariance",
    "use_kv_connector": "KV connector",
    "use_pcp": "prefill context parallelism",
    "use_adaptive_verification": "adaptive verification",
    "use_dcp": "decode context parallelism",
    "use_alibi": "ALiBi",
    "use_alibi_sqrt": "ALiBi (square root)",
    "has_logits_soft_cap": "logits soft cap",
    "use_rswa": "reference sliding window",
    "use_per_request_causal": "per-request causal",
    "needs_lse": "log-sum-exp out",
    "use_kv_sharing": "KV sharing",
}
"""The flags of a request, each with the words in which it is shown."""


def _device_text(device: object) -> str:
    try:
        if isinstance(device, str | torch.device):
            return str(torch.device(device))
    except RuntimeError:
        # A plugin may bring a device that torch has no name for; the text is taken as it is.
        if isinstance(device, str) and device.partition(":")[0].isidentifier():
            return device
    raise bad_argument("device", repr(device), "a device such as 'cpu' or 'cuda:0'")


def _capability(value: object) -> DeviceCapability:
    if (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(isinstance(part, int) and part >= 0 for part in value)
    ):
        return DeviceCapability(*value)
    raise bad_argument("device_capability", repr(value), "(major, minor), such as (9, 0)")


def _layout(value: object) -> KVCacheLayout:
    if isinstance(value, KVCacheLayout):
        return value
    if isinstance(value, str) and value in KVCacheLayout.__members__:
        return KVCacheLayout[value]
    raise bad_argument(
        "kv_cache_layout", repr(value), " | ".join(layout.name for layout in KVCacheLayout)
    )
