"""How far off latent attention may be, for each (row, head), from the sizes of its terms.

A budget holds what an honest kernel of a dtype rounds: scores in float32; the weights of the
softmax, the uncompressed or dequantised keys and values, and the result in the dtype of the model.
Roundings of keys and values are independent of each other and add up like a random walk.
"""

from __future__ import annotations

import torch

from attnmux.testing.mla.reference import MlaReference
from attnmux.testing.tolerances import FACTOR, Budget, unit_roundoff

_ACCUMULATION = 8.0  # float32 roundoffs that a score's sum and its scaling may cost
_SIGMAS = 3.0  # deviations of a random walk that cover a batch


def mla_budget(
    exact: MlaReference,
    dtype: torch.dtype,
    output_dtype: torch.dtype | None = None,
    *,
    uncompressed: bool,
    rounded_rows: bool = False,
) -> Budget:
    """Compute the budget of every (row, head).

    Args:
        exact: the right answer.
        dtype: of the model.
        output_dtype: of the result; the model's when None.
        uncompressed: the result is that of `forward_mha` (else that of `forward_mqa`), whose keys
            and values are rounded once they are up-projected.
        rounded_rows: rows of the cache may be rounded to `dtype` when they are read, as a
            quantised cache's are.

    Returns:
        Budgets of the output (or the latent result) and of the log-sum-exp.
    """
    half, single = unit_roundoff(dtype), unit_roundoff(torch.float32)
    sizes = exact.sizes
    spread = sizes.output_spread if uncompressed else sizes.latent_spread
    result = exact.output if uncompressed else exact.latent
    assert result is not None
    largest = result.abs().amax(dim=-1)
    roundings = int(uncompressed) + int(rounded_rows)
    score_error = _ACCUMULATION * single * sizes.score
    score_error = score_error + roundings * _SIGMAS * half * sizes.score_noise
    summing = single * (1.0 + sizes.num_keys).sqrt()
    output = (
        unit_roundoff(output_dtype or dtype) * largest
        + ((1 + roundings) * half + summing) * spread
        + score_error * (spread + largest)
    )
    size_of_lse = exact.lse.abs().masked_fill(exact.lse.isinf(), 0.0)
    lse = score_error + half + summing + _ACCUMULATION * single * (size_of_lse + 1.0)
    return Budget(FACTOR * output, FACTOR * lse)
