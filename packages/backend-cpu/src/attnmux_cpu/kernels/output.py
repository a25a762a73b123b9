"""Writing results: into any strides, any rows, quantised where asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.quant import QuantKey, quantize_output
from attnmux_cpu.kernels.paging import as_bytes
from attnmux_cpu.kernels.schedule import Rows


@dataclass(frozen=True)
class OutputWriter:
    """Where the rows of a call go.

    Attributes:
        output: ``[tokens, num_heads, width]``, a view of what the caller gave.
        lse: float32 ``[tokens, num_heads]``; None: not asked for.
        key: How the output is quantised; None: not.
        scale: See `attnmux.quant.output_quant_key`.
        block_scale: See `attnmux.quant.output_quant_key`.
    """

    output: torch.Tensor
    lse: torch.Tensor | None = None
    key: QuantKey | None = None
    scale: torch.Tensor | None = None
    block_scale: torch.Tensor | None = None

    def write(self, rows: Rows, values: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Store float32 results of some tokens.

        Args:
            rows: The tokens.
            values: ``[n, num_heads, value_size]``, any strides.
            lse: ``[n, num_heads]``; None only where none was asked for.
        """
        if self.lse is not None and lse is not None:
            self.lse[rows] = lse
        if self.key is None:
            self.output[rows] = values.to(self.output.dtype)
            return
        tokens, heads, width = values.shape[0], self.output.shape[1], self.output.shape[2]
        packed = torch.empty((tokens, heads * width), dtype=self.output.dtype, device="cpu")
        scales = None
        if self.block_scale is not None:
            scales = torch.empty(
                (tokens, self.block_scale.shape[1]), dtype=self.block_scale.dtype, device="cpu"
            )
        quantize_output(values.flatten(1), self.key, packed, self.scale, scales)
        as_bytes(self.output)[rows] = as_bytes(packed).view(tokens, heads, width)
        if self.block_scale is not None and scales is not None:
            as_bytes(self.block_scale)[rows] = as_bytes(scales)
