"""What exists. Every attnmux program imports this file, so it imports nothing heavy."""

from __future__ import annotations

from attnmux.plugins import BackendInfo, hookimpl


@hookimpl
def attnmux_backends() -> list[BackendInfo]:
    """Name the backends of this distribution; their modules are imported when first used."""
    return [
        BackendInfo(
            name="HELLO_ATTN",
            class_path="attnmux_hello.backend:HelloBackend",
            device_types=("cpu",),
            priority=-10,  # above 0 it would be chosen before backends that are tuned
            summary="decoder attention in plain torch",
            contract=(1, 0),  # the contract it was written for
        )
    ]
