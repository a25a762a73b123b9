"""What the latent-attention backends can do."""

from __future__ import annotations

from typing import ClassVar

import torch

from attnmux.backend import AttentionBackend, CacheDType
from attnmux_cpu.mla_builder import CPUMLABuilder, CPUMLASparseBuilder
from attnmux_cpu.mla_impl import CPUMLAImpl, CPUMLASparseImpl


class CPUMLABackend(AttentionBackend):
    """Dense latent attention: prefills uncompressed, decodes absorbed, in plain PyTorch."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float32",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    ]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the name that users write."""
        return "CPU_MLA"

    @staticmethod
    def get_impl_cls() -> type[CPUMLAImpl]:
        """Return the impl."""
        return CPUMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CPUMLABuilder]:
        """Return the builder."""
        return CPUMLABuilder

    @classmethod
    def is_mla(cls) -> bool:
        """Return True: caches are latent."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_per_request_causal(cls) -> bool:
        """Return True: `causal` may be a tensor."""
        return True

    @classmethod
    def supports_lse(cls) -> bool:
        """Return True: `forward_mqa` returns it, natural."""
        return True


class CPUMLASparseBackend(CPUMLABackend):
    """Latent attention to the positions that an indexer lists for each token."""

    @staticmethod
    def get_name() -> str:
        """Return the name that users write."""
        return "CPU_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[CPUMLASparseImpl]:  # type: ignore[override]
        """Return the impl."""
        return CPUMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[CPUMLASparseBuilder]:  # type: ignore[override]
        """Return the builder."""
        return CPUMLASparseBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        """Return True: each token has a list of positions."""
        return True
