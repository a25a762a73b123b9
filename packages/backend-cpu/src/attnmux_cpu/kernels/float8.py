"""8-bit floats to float32, many at a time.

torch converts float8 element by element, some forty times slower than float16. A float8 value is a
float16 value once its bits are in place, up to a power of two.
"""

from __future__ import annotations

import torch

from attnmux_cpu.kernels.workspace import Workspace

E4M3_TO_HALF = 256.0  # 2 ** (15 - 7): float16 has exponent bias 15, e4m3 has 7
E4M3_NAN = 0x7F


def copy_float8(source: torch.Tensor, target: torch.Tensor, workspace: Workspace) -> None:
    """Copy float8 e4m3fn or e5m2 values into a float32 tensor of the same shape.

    Exact for every byte: subnormal values and signed zeros stay what they are, NaN stays NaN.
    """
    bits = workspace.take("float8_bits", source.shape, torch.int16)
    bits.copy_(source.view(torch.int8))  # the sign fills the upper byte
    if source.dtype == torch.float8_e5m2:
        target.copy_(bits.bitwise_left_shift_(8).view(torch.float16))
        return
    # Sign, four bits of exponent and three of mantissa; the copy of the sign below it goes.
    target.copy_(bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16))
    target.mul_(E4M3_TO_HALF)
    magnitude = workspace.take("float8_magnitude", source.shape, torch.uint8)
    torch.bitwise_and(source.view(torch.uint8), E4M3_NAN, out=magnitude)
    if source.numel() and int(magnitude.max()) == E4M3_NAN:
        target.masked_fill_(magnitude == E4M3_NAN, float("nan"))
