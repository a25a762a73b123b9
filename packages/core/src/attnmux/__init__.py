"""attnmux: one stable contract for attention backends over a paged KV cache.

Importing this package imports nothing else: each name below is looked up when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnmux._contract import CONTRACT_VERSION
from attnmux._version import __version__

if TYPE_CHECKING:
    from attnmux.create import create_builder, create_impl
    from attnmux.options import resolve_options
    from attnmux.report import SelectionError, SelectionReport
    from attnmux.request import AttentionRequest
    from attnmux.selection import explain, list_backends, select_backend, use_backend

__all__ = [
    "CONTRACT_VERSION",
    "AttentionRequest",
    "SelectionError",
    "SelectionReport",
    "__version__",
    "create_builder",
    "create_impl",
    "explain",
    "list_backends",
    "resolve_options",
    "select_backend",
    "use_backend",
]

_HOME = {
    "AttentionRequest": "request",
    "SelectionError": "report",
    "SelectionReport": "report",
    "create_builder": "create",
    "create_impl": "create",
    "explain": "selection",
    "list_backends": "selection",
    "resolve_options": "options",
    "select_backend": "selection",
    "use_backend": "selection",
}
"""The module in which each lazily exported name lives."""


def __getattr__(name: str) -> Any:
    """Import the module of an exported name at its first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
