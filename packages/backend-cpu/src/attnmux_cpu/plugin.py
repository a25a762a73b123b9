"""What this distribution offers to attnmux. Light: nothing of torch is imported."""

from __future__ import annotations

from attnmux.plugins import BackendInfo, hookimpl


@hookimpl
def attnmux_backends() -> list[BackendInfo]:
    """Return the backends for CPUs."""
    return [
        BackendInfo(
            name="CPU_ATTN",
            class_path="attnmux_cpu.backend:CPUAttentionBackend",
            device_types=("cpu",),
            summary="paged attention in PyTorch: every feature, head size, block size and layout",
            options="attnmux_cpu.options:CPUAttentionOptions",
        ),
        BackendInfo(
            name="CPU_MLA",
            class_path="attnmux_cpu.mla_backend:CPUMLABackend",
            device_types=("cpu",),
            summary="latent attention in PyTorch",
            options="attnmux_cpu.options:CPUMLAOptions",
        ),
        BackendInfo(
            name="CPU_MLA_SPARSE",
            class_path="attnmux_cpu.mla_backend:CPUMLASparseBackend",
            device_types=("cpu",),
            summary="latent attention in PyTorch over the top-k tokens of an indexer",
            options="attnmux_cpu.options:CPUMLAOptions",
        ),
    ]
