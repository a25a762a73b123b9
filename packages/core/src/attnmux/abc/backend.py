"""What a backend can do: questions that selection asks before anything is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attnmux.abc.attention_type import AttentionType

if TYPE_CHECKING:
    from attnmux.abc.builder import AttentionMetadataBuilder
    from attnmux.abc.impl import AttentionImplBase
    from attnmux.kv_cache import AttentionSpec, CacheDType, KVCacheLayout
    from attnmux.platform import DeviceCapability


class MultipleOf:
    """A block size that may be any multiple of `base`."""

    base: int

    def __init__(self, base: int):  # noqa: D107 - the class says it
        self.base = base

    def __repr__(self) -> str:  # noqa: D105
        return f"MultipleOf({self.base})"


class AttentionBackend(ABC):
    """A family of kernels: what it supports, and the classes that run it.

    It is never instantiated. Each question is a class method, so that it can be asked with no
    device and no kernel in sight. The answers must be true: the conformance kit proves what is
    declared and checks that what is declined is refused.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
    ]

    forward_includes_kv_cache_update: bool = True
    """True: `forward` writes the new keys and values. False: the engine calls `do_kv_cache_update`
    first."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Block sizes of the kernels: exact ones, or multiples of a base."""
        return [MultipleOf(1)]

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The name that users force and reports show, such as ``"CPU_ATTN"``."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        """The class that runs one layer."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """The class that prepares one step for all layers of a group."""
        raise NotImplementedError

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Module and qualified name of the class."""
        return (cls.__module__, cls.__qualname__)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes that are supported; empty means any."""
        return []

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether heads of this size are supported."""
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Whether queries of this dtype are supported."""
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | None) -> bool:
        """Whether a cache of this dtype is supported; None asks nothing."""
        if kv_cache_dtype is None or not cls.supported_kv_cache_dtypes:
            return True
        return kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether the engine may keep blocks of this size; None asks nothing.

        An engine's block may be cut into several of the kernel's, so a multiple of an exact size
        counts as supported.
        """
        sizes = cls.get_supported_kernel_block_sizes()
        if block_size is None or not sizes:
            return True
        return any(block_size % _base(size) == 0 for size in sizes)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Return the layer's cache spec as this backend's kernels want it packed."""
        return spec

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return `default_block_size` where it is supported, else the smallest supported one."""
        sizes = cls.get_supported_kernel_block_sizes()
        if not sizes or cls.supports_block_size(default_block_size):
            return default_block_size
        return min(_base(size) for size in sizes)

    @classmethod
    def is_mla(cls) -> bool:
        """Whether the backend serves latent attention (and nothing else)."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether a learned logit per head may join the denominator."""
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """Whether the square-root form of ALiBi is supported."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether multimodal ranges may attend in both directions inside a causal request."""
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        """Whether the backend attends to given top-k positions only."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Whether a quantised cache may have one scale for each KV head."""
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether a sliding window is supported."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether a decoder layer over the paged cache may attend in both directions.

        Encoder types are another matter (`supports_attn_type`): they are never causal.
        """
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether a request's bits are independent of what else is in the batch."""
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Whether cache blocks may be moved in and out by a connector."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Whether query lengths on the device may differ from their copy on the CPU.

        Adaptive verification shortens drafts on the device; totals, the split between decodes and
        prefills, and the lengths of prefills still agree. A backend that plans from the CPU copy
        answers False. State-space backends plan from it, so they do by default.
        """
        return not cls.is_ssm()

    @classmethod
    def supports_pcp(cls) -> bool:
        """Whether prefill context parallelism is supported, as the impl class says."""
        try:
            return cls.get_impl_cls().supports_pcp
        except NotImplementedError:
            return False

    @classmethod
    def supports_non_causal_dcp(cls) -> bool:
        """Whether non-causal steps of several tokens work under decode context parallelism."""
        builder_cls = cls.get_builder_cls()
        return bool(getattr(builder_cls, "supports_non_causal_multi_token_dcp", False))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether this `AttentionType` is supported; decoders only by default."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Whether a device of this capability is supported."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Return why these do not go together though each alone does, or None."""
        return None

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        use_per_head_quant_scales: bool,
        device_capability: DeviceCapability,
        attn_type: str,
        has_sliding_window: bool = False,
        use_non_causal: bool = False,
        use_batch_invariant: bool = False,
        use_kv_connector: bool = False,
        use_pcp: bool = False,
        use_adaptive_verification: bool = False,
        use_dcp: bool = False,
    ) -> list[str]:
        """Return every reason why this configuration is not supported; empty means it is.

        The wording and the order of the reasons are part of the contract.
        """
        checks: list[tuple[bool, str]] = [
            (cls.supports_head_size(head_size), "head_size not supported"),
            (cls.supports_dtype(dtype), "dtype not supported"),
            (cls.supports_kv_cache_dtype(kv_cache_dtype), "kv_cache_dtype not supported"),
            (cls.supports_block_size(block_size), "block_size not supported"),
            (
                not use_mm_prefix or cls.supports_mm_prefix(),
                "partial multimodal token full attention not supported",
            ),
            (
                use_mla == cls.is_mla(),
                "MLA not supported" if use_mla else "non-MLA not supported",
            ),
            (not has_sink or cls.supports_sink(), "attention sinks not supported"),
            (
                use_sparse == cls.is_sparse(),
                "sparse not supported" if use_sparse else "non-sparse not supported",
            ),
            (
                not use_per_head_quant_scales or cls.supports_per_head_quant_scales(),
                "per-head quant scales not supported",
            ),
            (
                cls.supports_compute_capability(device_capability),
                "compute capability not supported",
            ),
            (cls.supports_attn_type(attn_type), f"attention type {attn_type} not supported"),
            (
                not has_sliding_window or cls.supports_sliding_window(),
                "sliding window not supported",
            ),
            (
                not use_non_causal or cls.supports_non_causal(),
                "non-causal attention not supported",
            ),
            (
                not (use_mla and use_non_causal and use_dcp) or cls.supports_non_causal_dcp(),
                "non-causal MLA attention with DCP not supported",
            ),
            (
                not use_batch_invariant or cls.supports_batch_invariance(),
                "batch invariance not supported",
            ),
            (not use_kv_connector or cls.supports_kv_connector(), "KV connector not supported"),
            (not use_pcp or cls.supports_pcp(), "PCP not supported"),
            (
                not use_adaptive_verification or cls.supports_device_cpu_query_lens_mismatch(),
                "device-cpu query lens mismatch not supported, "
                "this is needed for adaptive verification",
            ),
        ]
        reasons = [reason for supported, reason in checks if not supported]
        combination_reason = cls.supports_combination(
            head_size,
            dtype,
            kv_cache_dtype,
            block_size,
            use_mla,
            has_sink,
            use_sparse,
            use_mm_prefix,
            device_capability,
        )
        if combination_reason is not None:
            reasons.append(combination_reason)
        return reasons

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """Layouts the kernels can read, best first; None means any, with no preference."""
        return None

    @classmethod
    def is_ssm(cls) -> bool:
        """Whether the backend runs a state-space layer."""
        return False

    # What follows was added here: features that reach an impl through its constructor or the batch,
    # and that selection must know of, so that none is dropped in silence. Each is False until said.

    @classmethod
    def supports_alibi(cls) -> bool:
        """Whether ALiBi slopes are supported (an addition to the original interface)."""
        return False

    @classmethod
    def supports_logits_soft_cap(cls) -> bool:
        """Whether scores may be capped by ``cap * tanh(s / cap)`` (an addition)."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """Whether reference sliding-window attention is supported (an addition)."""
        return False

    @classmethod
    def supports_per_request_causal(cls) -> bool:
        """Whether `CommonAttentionMetadata.causal` may be a tensor (an addition)."""
        return False

    @classmethod
    def supports_lse(cls) -> bool:
        """Whether log-sum-exp can be had (an addition).

        Standard impls have `forward_with_lse` then; latent ones return it from `forward_mqa`.
        """
        return False

    @classmethod
    def supports_kv_sharing(cls) -> bool:
        """Whether a layer may read another layer's cache and bring no keys (an addition)."""
        return False


def _base(size: int | MultipleOf) -> int:
    return size.base if isinstance(size, MultipleOf) else size


def subclass_attention_backend(
    name_prefix: str,
    attention_backend_cls: type[AttentionBackend],
    builder_cls: type[AttentionMetadataBuilder[Any]],
) -> type[AttentionBackend]:
    """Return a subclass of a backend that uses another builder; its name gets the prefix."""
    return subclass_attention_backend_with_overrides(
        name_prefix, attention_backend_cls, {"get_builder_cls": staticmethod(lambda: builder_cls)}
    )


def subclass_attention_backend_with_overrides(
    name_prefix: str,
    attention_backend_cls: type[AttentionBackend],
    overrides: dict[str, Any],
) -> type[AttentionBackend]:
    """Return a subclass of a backend with the given attributes; its name gets the prefix."""
    return type(name_prefix + attention_backend_cls.__name__, (attention_backend_cls,), overrides)
