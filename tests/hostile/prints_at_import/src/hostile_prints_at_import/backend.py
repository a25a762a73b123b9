"""A backend that works, and prints."""

from __future__ import annotations

from attnmux_hello.backend import HelloBackend

print("*** LOUD_ATTN is being imported ***")


class LoudBackend(HelloBackend):
    """Computes as its parent does."""

    @staticmethod
    def get_name() -> str:
        """Return its name."""
        return "LOUD_ATTN"
