"""Names a backend that cannot say what it can do."""

from __future__ import annotations

from attnmux.plugins import BackendInfo, hookimpl


@hookimpl
def attnmux_backends():
    """Answer a backend that would be chosen first if it could answer."""
    return [
        BackendInfo(
            name="THROWING_ATTN",
            class_path="hostile_throws_in_supports.backend:ThrowingBackend",
            priority=10_000,
        )
    ]
