"""What the backend can do. Whatever is not declared here is refused at selection."""

from __future__ import annotations

from typing import ClassVar

import torch
from attnmux.backend import AttentionBackend, CacheDType, MultipleOf

from attnmux_hello.builder import HelloBuilder
from attnmux_hello.impl import HelloImpl


class HelloBackend(AttentionBackend):
    """Causal decoder attention over a paged cache of the model's dtype, on the CPU."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto"]
    # False: the engine calls impl.do_kv_cache_update first, then impl.forward.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the name that users select, the same as in `plugin.py`."""
        return "HELLO_ATTN"

    @staticmethod
    def get_impl_cls() -> type[HelloImpl]:
        """Return the class that computes one layer."""
        return HelloImpl

    @staticmethod
    def get_builder_cls() -> type[HelloBuilder]:
        """Return the class that prepares one step."""
        return HelloBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Return the sizes of a cache block; a multiple of 1 is any."""
        return [MultipleOf(1)]
