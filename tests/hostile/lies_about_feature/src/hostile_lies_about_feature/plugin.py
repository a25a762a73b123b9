"""Names a backend that claims more than it does."""

from __future__ import annotations

from attnmux.plugins import BackendInfo, hookimpl


@hookimpl
def attnmux_backends():
    """Answer the liar; its priority lets every honest backend go first."""
    return [
        BackendInfo(
            name="LYING_ATTN",
            class_path="hostile_lies_about_feature.backend:LyingBackend",
            priority=-100,
        )
    ]
