"""Names contracts that no core of today serves."""

from __future__ import annotations

from attnmux.plugins import BackendInfo, hookimpl


@hookimpl
def attnmux_backends():
    """Answer a backend of the future and one of the past."""
    class_path = "hostile_wrong_contract.backend:Backend"
    return [
        BackendInfo(name="FUTURE_ATTN", class_path=class_path, priority=10_000, contract=(99, 0)),
        BackendInfo(name="PAST_ATTN", class_path=class_path, priority=10_000, contract=(0, 1)),
    ]
