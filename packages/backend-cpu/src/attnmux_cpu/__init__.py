"""Attention on CPUs for attnmux. The backends are found through the entry point, see `plugin`."""

from __future__ import annotations

from attnmux_cpu._version import __version__

__all__ = ["__version__"]
