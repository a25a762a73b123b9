"""Once a step: who is a decode, who is a prefill, and in which pieces their keys are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from attnmux.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from attnmux.batch import BatchSplit, split_decodes_and_prefills
from attnmux.checks import bad_argument
from attnmux.config import EngineConfigLike
from attnmux_cpu.batch_checks import check_batch, check_table
from attnmux_cpu.kernels.mla_decode import DecodeSchedule, plan_decode
from attnmux_cpu.kernels.mla_prefill import PrefillRequest, PrefillSchedule, plan_prefill
from attnmux_cpu.options import CPUMLAOptions, check_options


@dataclass(frozen=True, kw_only=True)
class CPUMLAMetadata(AttentionMetadata):
    """What both latent backends need to know of a batch.

    Attributes:
        num_reqs: Requests, padding included.
        num_actual_tokens: Tokens, padding included.
        num_decodes: Leading requests that `forward_mqa` serves.
        num_prefills: The other requests.
        num_decode_tokens: Leading tokens that `forward_mqa` is given.
        num_prefill_tokens: The other tokens.
        query_start_loc: int64 ``[num_reqs + 1]``.
        seq_lens: int64 ``[num_reqs]``.
        num_cached: int64 ``[num_reqs]``: tokens that are read from the cache; 0 for padding.
        block_table: int64 ``[num_reqs, max_blocks]``.
        slot_mapping: As the batch brought it.
        fitting_caches: Blocks and block size of caches that the table was found to fit, so that it
            is looked through once a step and not once a layer.
    """

    num_reqs: int
    num_actual_tokens: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_cached: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    fitting_caches: set[tuple[int, int]] = field(default_factory=set, compare=False)


@dataclass(frozen=True, kw_only=True)
class CPUMLADenseMetadata(CPUMLAMetadata):
    """The schedules of both halves of the batch."""

    decode: DecodeSchedule
    prefill: PrefillSchedule


@dataclass(frozen=True, kw_only=True)
class CPUMLASparseMetadata(CPUMLAMetadata):
    """For each token of a request: int64 ``[query_start_loc[-1]]``.

    Attributes:
        token_requests: Its request.
        num_visible: Positions from 0 up to this may be listed for it.
    """

    token_requests: torch.Tensor
    num_visible: torch.Tensor


M = TypeVar("M", bound=CPUMLAMetadata)


class _LatentBuilder(AttentionMetadataBuilder[M]):
    """What both builders share."""

    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: EngineConfigLike,
        device: torch.device,
        options: CPUMLAOptions | None = None,
    ) -> None:
        """Keep the settings; `options` are those of the backend."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if torch.device(device).type != "cpu":
            raise bad_argument("device", device, "cpu")
        self.options = check_options(options, CPUMLAOptions)

    def update_block_table(
        self, metadata: M, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> M:
        """Return the same metadata over other blocks of the cache."""
        check_table("blk_table", blk_table, metadata.num_reqs)
        return replace(
            metadata,
            block_table=blk_table[: metadata.num_reqs].long(),
            slot_mapping=slot_mapping,
            fitting_caches=set(),
        )


class CPUMLABuilder(_LatentBuilder[CPUMLADenseMetadata]):
    """Builds for ``CPU_MLA``: requests of up to `reorder_batch_threshold` tokens come first."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: EngineConfigLike,
        device: torch.device,
        options: CPUMLAOptions | None = None,
    ) -> None:
        """Set the threshold: a token, and its drafts where the engine speculates."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, options)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUMLADenseMetadata:
        """Plan decodes and prefills.

        Raises:
            ValueError: A decode stands behind a prefill, or a tensor has a wrong shape or dtype.
        """
        batch = _read_batch(common_attn_metadata)
        threshold = self.reorder_batch_threshold or 1
        split = split_decodes_and_prefills(common_attn_metadata, decode_threshold=threshold)
        _check_decodes_first(common_attn_metadata, split, threshold)
        decodes = split.num_decodes
        context = (batch.seq_lens - batch.query_lens).clamp_min(0)
        is_prefill = torch.arange(batch.seq_lens.numel(), device="cpu") >= decodes
        num_cached = torch.where(is_prefill, context, batch.seq_lens)
        return CPUMLADenseMetadata(
            num_reqs=common_attn_metadata.num_reqs,
            num_actual_tokens=common_attn_metadata.num_actual_tokens,
            **split._asdict(),
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            num_cached=torch.where(batch.query_lens > 0, num_cached, 0),
            block_table=batch.block_table,
            slot_mapping=common_attn_metadata.slot_mapping,
            decode=plan_decode(
                batch.query_start_loc[: decodes + 1],
                batch.seq_lens[:decodes],
                batch.causal[:decodes],
            ),
            prefill=plan_prefill(_prefill_requests(batch, split), self.options.context_tokens),
        )


class CPUMLASparseBuilder(_LatentBuilder[CPUMLASparseMetadata]):
    """Builds for ``CPU_MLA_SPARSE``: every token goes to `forward_mqa`, in any order."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUMLASparseMetadata:
        """Find each token's request and what it may see.

        Raises:
            ValueError: A tensor has a wrong shape or dtype.
        """
        batch = _read_batch(common_attn_metadata)
        num_reqs = common_attn_metadata.num_reqs
        token_requests = torch.arange(num_reqs, device="cpu").repeat_interleave(batch.query_lens)
        places = (
            torch.arange(token_requests.numel(), device="cpu")
            - batch.query_start_loc[token_requests]
        )
        last = (batch.seq_lens - batch.query_lens)[token_requests] + places
        num_visible = torch.where(
            batch.causal[token_requests], last + 1, batch.seq_lens[token_requests]
        )
        return CPUMLASparseMetadata(
            num_reqs=num_reqs,
            num_actual_tokens=common_attn_metadata.num_actual_tokens,
            num_decodes=num_reqs,
            num_prefills=0,
            num_decode_tokens=common_attn_metadata.num_actual_tokens,
            num_prefill_tokens=0,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            num_cached=torch.where(batch.query_lens > 0, batch.seq_lens, 0),
            block_table=batch.block_table,
            slot_mapping=common_attn_metadata.slot_mapping,
            token_requests=token_requests,
            num_visible=num_visible.clamp_min(0),
        )


@dataclass(frozen=True)
class _Batch:
    query_start_loc: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    causal: torch.Tensor


def _read_batch(batch: CommonAttentionMetadata) -> _Batch:
    """Check the tensors that are read, and take them as int64.

    Raises:
        ValueError: A tensor or a length does not fit, or the batch brings what latent attention
            has not.
    """
    check_batch(batch)
    for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
        if getattr(batch, name) is not None and len(getattr(batch, name)):
            raise bad_argument(name, "values", "None: latent attention has no such feature here")
    reqs, causal = batch.num_reqs, batch.causal
    if isinstance(causal, bool):
        causal = torch.full((reqs,), causal, device="cpu")
    start = batch.query_start_loc[: reqs + 1].long()
    return _Batch(
        start,
        start.diff(),
        batch.seq_lens[:reqs].long(),
        batch.block_table_tensor[:reqs].long(),
        causal[:reqs],
    )


def _check_decodes_first(batch: CommonAttentionMetadata, split: BatchSplit, threshold: int) -> None:
    # Verification may shorten drafts on the device, never move the prefills that follow them.
    rows = slice(split.num_decodes, batch.num_reqs + 1)
    on_cpu = batch.query_start_loc_cpu[rows]
    if batch.query_start_loc[rows].tolist() != on_cpu.tolist():
        raise bad_argument(
            "query_start_loc",
            batch.query_start_loc.tolist(),
            f"{batch.query_start_loc_cpu.tolist()} from entry {split.num_decodes}, as the CPU copy",
        )
    query_lens = on_cpu.diff()
    misplaced = ((query_lens > 0) & (query_lens <= threshold)).nonzero().flatten()
    if misplaced.numel():
        request = int(misplaced[0])
        raise bad_argument(
            "common_attn_metadata",
            f"request {split.num_decodes + request} of {int(query_lens[request])} query tokens "
            f"behind request {split.num_decodes}, a prefill",
            f"requests of up to {threshold} query tokens first (attnmux.batch.reorder_batch)",
        )


def _prefill_requests(batch: _Batch, split: BatchSplit) -> list[PrefillRequest]:
    columns = zip(
        batch.query_start_loc.tolist(),
        batch.query_lens.tolist(),
        batch.seq_lens.tolist(),
        batch.causal.tolist(),
        strict=False,
    )
    return [
        PrefillRequest(
            index=index,
            first_row=start - split.num_decode_tokens,
            query_len=query_len,
            context_len=max(seq_len - query_len, 0),
            causal=causal,
            num_absent=max(query_len - seq_len, 0),
        )
        for index, (start, query_len, seq_len, causal) in enumerate(columns)
        if index >= split.num_decodes and query_len
    ]
