"""What of a batch a context-parallel rank keeps."""

from __future__ import annotations

import torch

from attnmux.checks import bad_argument, check_index_dtype, check_positive, check_tensor


def dcp_local_seq_lens(
    seq_lens: torch.Tensor, dcp_world_size: int, dcp_rank: int, interleave: int = 1
) -> torch.Tensor:
    """Return how many of the first `seq_lens` tokens a context-parallel rank keeps.

    Tokens are dealt to the ranks in runs of `interleave`. For several query tokens of one request,
    ask with each token's own visible length: local ends are not neighbours.

    Args:
        seq_lens: Lengths in tokens, of any shape, on any device.
        dcp_world_size: Number of ranks.
        dcp_rank: This rank.
        interleave: Tokens in a run.

    Raises:
        ValueError: A count below 1, or a rank that is not among the ranks.
    """
    check_positive("dcp_world_size", dcp_world_size)
    check_positive("interleave", interleave)
    check_tensor("seq_lens", seq_lens)
    check_index_dtype("seq_lens", seq_lens)
    if dcp_rank not in range(dcp_world_size):
        raise bad_argument("dcp_rank", dcp_rank, f"0 to {dcp_world_size - 1}")
    whole_rounds = seq_lens // (interleave * dcp_world_size)
    rest = seq_lens - whole_rounds * (interleave * dcp_world_size)
    return whole_rounds * interleave + (rest - dcp_rank * interleave).clamp(0, interleave)
