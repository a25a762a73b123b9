"""Declares a feature and drops it."""

from __future__ import annotations

from attnmux_hello.backend import HelloBackend
from attnmux_hello.impl import HelloImpl


class LyingImpl(HelloImpl):
    """Takes a window and forgets it."""

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
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """Hand everything on but the window."""
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            None,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
        )


class LyingBackend(HelloBackend):
    """Says that it has sliding windows."""

    @staticmethod
    def get_name() -> str:
        """Return its name."""
        return "LYING_ATTN"

    @staticmethod
    def get_impl_cls() -> type[LyingImpl]:
        """Return the class that forgets."""
        return LyingImpl

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Lie."""
        return True
