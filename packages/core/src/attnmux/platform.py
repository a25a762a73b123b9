"""The device in hand: what it is called and what it can do."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DeviceCapability(NamedTuple):
    """Compute capability of a device, ordered: ``(9, 0) > (8, 9)``. A CPU is ``(0, 0)``."""

    major: int
    minor: int

    def as_version_str(self) -> str:
        """Return ``"9.0"`` for ``(9, 0)``."""
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        """Return ``90`` for ``(9, 0)``; minor versions are one digit.

        Raises:
            ValueError: The minor version has more than one digit.
        """
        if not 0 <= self.minor < 10:
            raise ValueError(f"minor: got {self.minor}; allowed: 0 to 9")
        return self.major * 10 + self.minor


CPU_CAPABILITY = DeviceCapability(0, 0)
"""What stands for the capability of a device that has none."""


def device_capability(device: torch.device | str) -> DeviceCapability:
    """Return the capability of `device`; devices other than CUDA and ROCm have `CPU_CAPABILITY`.

    Raises:
        ValueError: The device is a GPU that this process cannot see.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return CPU_CAPABILITY
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(
            f"device: got {device}; allowed: a device that torch can see (it sees {count} GPUs); "
            "to ask about a GPU from afar, give device_capability as well"
        )
    return DeviceCapability(*torch.cuda.get_device_capability(device))


def default_device() -> torch.device:
    """Return the first GPU that torch can see, else the CPU."""
    return torch.device("cuda:0") if torch.cuda.is_available() else torch.device("cpu")
