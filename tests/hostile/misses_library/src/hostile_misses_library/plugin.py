"""Names a backend whose library is not there."""

from __future__ import annotations

from attnmux.plugins import BackendInfo, hookimpl


@hookimpl
def attnmux_backends():
    """Answer a backend that cannot be imported."""
    return [
        BackendInfo(
            name="LIBRARYLESS_ATTN",
            class_path="hostile_misses_library.backend:LibrarylessBackend",
            priority=10_000,
        )
    ]
