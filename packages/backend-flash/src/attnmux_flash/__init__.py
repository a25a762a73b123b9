"""Triton flash attention for attnmux: packaging only, no backend is in this release."""

from __future__ import annotations

from attnmux_flash._version import __version__

__all__ = ["__version__"]
