"""One step's batch, shared by all layers and all backends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from typing_extensions import deprecated

from attnmux.errors import ContractError


class AttentionMetadata:
    """Base of what a builder makes of a batch for its own kernels."""


T = TypeVar("T", bound=AttentionMetadata)


@dataclass
class CommonAttentionMetadata:
    """One batch, as the engine describes it; builders turn it into their own metadata.

    Lengths and places are given on the device, and where the engine knows them also on the CPU. A
    batch may be padded: requests at the end have no query tokens, tokens at the end belong to no
    request.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    """``[num_reqs + 1]``: where each request's tokens begin in the flat query."""

    seq_lens: torch.Tensor
    """``[num_reqs]``: tokens of each request after this step, cached ones and new ones."""

    num_reqs: int
    """Requests in the batch."""
    num_actual_tokens: int
    """Tokens in the batch; may be padded."""
    max_query_len: int
    """Longest query in tokens."""
    max_seq_len: int
    """Longest sequence in tokens; may be an upper bound."""

    block_table_tensor: torch.Tensor
    """``[num_reqs, max_blocks]``: blocks of each request; entries past its length are void."""
    slot_mapping: torch.Tensor
    """``[num_actual_tokens]`` int64: ``block * block_size + offset`` of each token; -1: none."""

    causal: bool | torch.Tensor = True
    """Whether tokens see only earlier ones: for all requests, or ``[num_reqs]`` bool."""

    logits_indices_padded: torch.Tensor | None = None
    num_logits_indices: int | None = None
    max_logits_per_req: int | None = None
    """These three serve builders that compute prefills only where logits are needed."""

    encoder_seq_lens: torch.Tensor | None = None
    encoder_seq_lens_cpu: np.ndarray[Any, Any] | None = None
    """``[num_reqs]``: encoder tokens of each request, for cross-attention."""

    dcp_local_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens_cpu: torch.Tensor | None = None
    """``[num_reqs]``: tokens of each request kept by this rank under decode context parallelism."""

    positions: torch.Tensor | None = None
    """``[num_actual_tokens]``: place of each token in its request, where the engine has it."""

    is_prefilling: torch.Tensor | None = None
    """``[num_reqs]`` bool: the request's prompt is not yet computed, so that a short extend can be
    told from a decode."""

    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    """``[num_reqs]`` on the CPU: at least `seq_lens`. Exact but for decodes whose drafts are still
    being verified on the device, for which it assumes that all were accepted."""

    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    """Request index to inclusive (first, last) positions inside which tokens see each other in both
    directions. Ranges of one request do not overlap."""

    rswa_prefix_lens: torch.Tensor | None = None
    """``[num_reqs]``: tokens at the start of each request that stay visible to all later ones under
    reference sliding-window attention. The window itself is a setting of the model."""

    replayssm_decode_base_cpu: torch.Tensor | None = None
    """``[num_reqs]`` on the CPU: computed tokens at the last full write of a state-space layer's
    state, from which a replaying decode counts."""

    _seq_lens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cpu: torch.Tensor | None = None

    _num_computed_tokens_cache: torch.Tensor | None = None
    _token_to_req_indices_cache: torch.Tensor | None = None

    def batch_size(self) -> int:
        """Number of requests, padding included."""
        return self.seq_lens.shape[0]

    def naive_query_lens(self) -> torch.Tensor:
        """``[num_reqs]``: query lengths, if each query ends where the next begins."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    def replace(self, **kwargs: Any) -> CommonAttentionMetadata:
        """Return a copy with some fields changed; tensors are shared, caches are carried along."""
        return replace(self, **kwargs)

    @property
    @deprecated(
        "seq_lens_cpu waits for the device. Use seq_lens on the device, or seq_lens.cpu() where "
        "the wait is meant; this property goes away two minor releases after contract 1.0."
    )
    def seq_lens_cpu(self) -> torch.Tensor:
        """Deprecated: `seq_lens` on the CPU, copied at first use."""
        return self._read_seq_lens_cpu()

    @property
    @deprecated(
        "num_computed_tokens_cpu waits for the device. Derive it from query_start_loc_cpu and "
        "seq_lens; this property goes away two minor releases after contract 1.0."
    )
    def num_computed_tokens_cpu(self) -> torch.Tensor:
        """Deprecated: tokens of each request computed before this step, on the CPU."""
        if self._num_computed_tokens_cpu is None:
            query_lens = self.query_start_loc_cpu[1:] - self.query_start_loc_cpu[:-1]
            self._num_computed_tokens_cpu = self._read_seq_lens_cpu() - query_lens
        return self._num_computed_tokens_cpu

    def _read_seq_lens_cpu(self) -> torch.Tensor:
        if self._seq_lens_cpu is None:
            self._seq_lens_cpu = self.seq_lens.to("cpu")
        return self._seq_lens_cpu

    def compute_num_computed_tokens(self) -> torch.Tensor:
        """``[num_reqs]`` on the device: tokens computed before this step; kept after first use."""
        if self._num_computed_tokens_cache is None:
            self._num_computed_tokens_cache = self.seq_lens - self.naive_query_lens()
        return self._num_computed_tokens_cache

    def token_to_req_indices(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return ``[num_actual_tokens]`` int32: the request of each token; padding tokens get 0.

        It is computed once into `buffer` and reused afterwards, also when another buffer is given.
        Query lengths are read on the device, since adaptive verification may have changed them
        there; only their total is taken from the CPU.

        Args:
            buffer: int32 on the device of the batch, at least as long as the tokens.

        Raises:
            ContractError: The buffer is too short, or what was kept does not fit: another device,
                another dtype, fewer tokens.
        """
        num_tokens = self.num_actual_tokens
        kept = self._token_to_req_indices_cache
        if kept is not None:
            _require(kept.device == buffer.device, "buffer.device", buffer.device, kept.device)
            _require(kept.dtype == torch.int32, "kept indices' dtype", kept.dtype, torch.int32)
            _require(
                kept.shape[0] >= num_tokens,
                "num_actual_tokens",
                num_tokens,
                f"at most the {kept.shape[0]} tokens that were mapped",
            )
            return kept[:num_tokens]

        num_mapped = int(self.query_start_loc_cpu[-1])
        num_needed = max(num_mapped, num_tokens)
        _require(
            buffer.shape[0] >= num_needed,
            "buffer.shape[0]",
            buffer.shape[0],
            f"at least {num_needed}",
        )
        query_lens = self.naive_query_lens()
        req_indices = torch.arange(query_lens.shape[0], dtype=torch.int32, device=buffer.device)
        buffer[:num_mapped].copy_(
            torch.repeat_interleave(req_indices, query_lens, output_size=num_mapped)
        )
        buffer[num_mapped:num_needed].zero_()
        self._token_to_req_indices_cache = buffer[:num_needed]
        return self._token_to_req_indices_cache[:num_tokens]

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> CommonAttentionMetadata:
        """Return the batch without its padding: the first requests and tokens.

        Positions, ranges and bounds that padding does not lengthen are not carried over, nor are
        results kept from before.
        """

        def first_reqs(values: Any) -> Any:
            return None if values is None else values[:num_actual_reqs]

        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc[: num_actual_reqs + 1],
            query_start_loc_cpu=self.query_start_loc_cpu[: num_actual_reqs + 1],
            seq_lens=first_reqs(self.seq_lens),
            num_reqs=num_actual_reqs,
            num_actual_tokens=num_actual_tokens,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            block_table_tensor=first_reqs(self.block_table_tensor),
            slot_mapping=self.slot_mapping[:num_actual_tokens],
            causal=first_reqs(self.causal)
            if isinstance(self.causal, torch.Tensor)
            else self.causal,
            logits_indices_padded=self.logits_indices_padded,
            num_logits_indices=self.num_logits_indices,
            max_logits_per_req=self.max_logits_per_req,
            encoder_seq_lens=first_reqs(self.encoder_seq_lens),
            encoder_seq_lens_cpu=first_reqs(self.encoder_seq_lens_cpu),
            dcp_local_seq_lens=first_reqs(self.dcp_local_seq_lens),
            dcp_local_seq_lens_cpu=first_reqs(self.dcp_local_seq_lens_cpu),
            is_prefilling=first_reqs(self.is_prefilling),
            rswa_prefix_lens=first_reqs(self.rswa_prefix_lens),
            replayssm_decode_base_cpu=first_reqs(self.replayssm_decode_base_cpu),
            _seq_lens_cpu=first_reqs(self._seq_lens_cpu),
            _num_computed_tokens_cpu=first_reqs(self._num_computed_tokens_cpu),
        )


def _require(holds: bool, name: str, got: object, allowed: object) -> None:
    if not holds:
        raise ContractError(f"{name}: got {got}; allowed: {allowed}")
