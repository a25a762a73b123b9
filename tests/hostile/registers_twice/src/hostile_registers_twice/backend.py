"""Backends that work; their plugin names them carelessly."""

from __future__ import annotations

from attnmux_hello.backend import HelloBackend


class TwiceBackend(HelloBackend):
    """Computes as its parent does."""

    @staticmethod
    def get_name() -> str:
        """Return its name."""
        return "TWICE_ATTN"


class OtherBackend(HelloBackend):
    """The second owner of one name."""

    @staticmethod
    def get_name() -> str:
        """Return its name."""
        return "TORN_ATTN"
