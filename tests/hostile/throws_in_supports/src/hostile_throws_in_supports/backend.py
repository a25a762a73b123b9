"""Raises when asked."""

from __future__ import annotations

from attnmux_hello.backend import HelloBackend


class ThrowingBackend(HelloBackend):
    """Computes as its parent does, if only it could be chosen."""

    @staticmethod
    def get_name() -> str:
        """Return its name."""
        return "THROWING_ATTN"

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Divide by zero."""
        return head_size // 0 == 0
