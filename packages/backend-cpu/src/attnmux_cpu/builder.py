"""Once a step: a batch becomes plain lengths and, at first use by a layer, its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from attnmux.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from attnmux.checks import bad_argument, check_positive
from attnmux.config import EngineConfigLike
from attnmux.kv_cache import KVCacheSpec
from attnmux_cpu.batch_checks import (
    check_batch,
    check_lengths,
    check_mm_ranges,
    check_table,
)
from attnmux_cpu.kernels.planning import LayerKind, make_schedule
from attnmux_cpu.kernels.schedule import BoolArray, IntArray, Lengths, Schedule
from attnmux_cpu.options import CPUAttentionOptions, check_options

ENCODER_TYPES = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclass
class CPUAttentionMetadata(AttentionMetadata):
    """One step, for all layers of a group. Tensors are those of the batch, unchanged.

    Attributes:
        num_reqs: Requests, padding included.
        num_actual_tokens: Query tokens, padding included.
        query_start_loc: ``[num_reqs + 1]``.
        seq_lens: ``[num_reqs]``.
        block_table: ``[num_reqs, max_blocks]``.
        slot_mapping: ``[num_actual_tokens]``.
        block_size: Tokens of a block.
        causal: For all requests, or bool ``[num_reqs]``.
        encoder_seq_lens: ``[num_reqs]``, or None where `seq_lens` counts encoder tokens.
        mm_ranges: Request index to inclusive ranges that see both ways.
        rswa_prefix_lens: ``[num_reqs]`` or None.
        rswa_window: Window past the prefix; None where there is none.
    """

    num_reqs: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    causal: bool | torch.Tensor
    encoder_seq_lens: torch.Tensor | None
    mm_ranges: Mapping[int, Sequence[tuple[int, int]]]
    rswa_prefix_lens: torch.Tensor | None
    rswa_window: int | None
    _schedules: dict[Any, Schedule] = field(default_factory=dict, repr=False)

    def schedule(self, attn_type: str, has_cache: bool, kind: LayerKind) -> Schedule:
        """Return the schedule of layers of one kind; made at first use, then kept.

        Args:
            attn_type: The layer's `AttentionType`.
            has_cache: Whether keys are read through the block table.
            kind: The layer's mask and shape.

        Raises:
            ValueError: Lengths that do not go together, or a table too narrow for them.
        """
        key = (attn_type, has_cache, kind)
        if key not in self._schedules:
            lengths = self._lengths(attn_type, has_cache)
            self._schedules[key] = make_schedule(lengths, kind, self.num_actual_tokens)
        return self._schedules[key]

    def num_keys(self, attn_type: str) -> int:
        """Keys of all requests together, for layers that do not read them from a cache."""
        return int(self._key_lens(attn_type).sum())

    def _key_lens(self, attn_type: str) -> torch.Tensor:
        if attn_type in ENCODER_TYPES:
            return self.query_start_loc.diff()
        if attn_type == AttentionType.ENCODER_DECODER and self.encoder_seq_lens is not None:
            return self.encoder_seq_lens
        return self.seq_lens

    def _lengths(self, attn_type: str, has_cache: bool) -> Lengths:
        is_decoder = attn_type == AttentionType.DECODER
        is_cross = attn_type == AttentionType.ENCODER_DECODER
        if is_cross and self.rswa_prefix_lens is not None:
            raise bad_argument("rswa_prefix_lens", "a tensor", "None for cross-attention")
        query_starts, key_lens = _numbers(self.query_start_loc), _numbers(self._key_lens(attn_type))
        query_lens = np.diff(query_starts)
        if is_decoder:
            _check_queries_fit(query_lens, key_lens)
        if has_cache:
            _check_table_width(
                self.block_table, np.where(query_lens > 0, key_lens, 0), self.block_size
            )
        return Lengths(
            query_starts=query_starts,
            key_lens=key_lens,
            causal=self._causal_flags() if is_decoder else np.zeros(self.num_reqs, dtype=np.bool_),
            prefix_lens=np.zeros_like(key_lens)
            if self.rswa_prefix_lens is None
            else _numbers(self.rswa_prefix_lens),
            mm_ranges={} if is_cross else self.mm_ranges,  # all is seen anyway
            block_table=self.block_table.long() if has_cache else None,
            block_size=self.block_size,
        )

    def _causal_flags(self) -> BoolArray:
        if isinstance(self.causal, torch.Tensor):
            flags: BoolArray = self.causal.numpy()
            return flags
        return np.full(self.num_reqs, self.causal)


class CPUAttentionMetadataBuilder(AttentionMetadataBuilder[CPUAttentionMetadata]):
    """Builder of ``CPU_ATTN``. It reads the device's lengths, never their CPU copies."""

    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: EngineConfigLike,
        device: torch.device,
        options: CPUAttentionOptions | None = None,
    ) -> None:
        """Keep what a step needs.

        Args:
            kv_cache_spec: Format of the layers' cache.
            layer_names: The layers.
            vllm_config: The engine's settings; ``model_config.rswa_window`` is read.
            device: A CPU device.
            options: Taken so that impl and builder are made alike; the impl acts on them.

        Raises:
            ValueError: Another device; a spec that asks for attention inside chunks.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if torch.device(device).type != "cpu":
            raise bad_argument("device", device, "cpu")
        if getattr(kv_cache_spec, "attention_chunk_size", None) is not None:
            raise bad_argument("kv_cache_spec.attention_chunk_size", "a size", None)
        self.options = check_options(options, CPUAttentionOptions)
        self._rswa_window = getattr(vllm_config.model_config, "rswa_window", None)
        if self._rswa_window is not None:
            check_positive("model_config.rswa_window", self._rswa_window)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Check the batch and wrap it; schedules are made when the first layer asks.

        Args:
            common_prefix_len: Not used: a shared prefix is read once for each request.
            common_attn_metadata: The batch; not changed.
            fast_build: Not used: one way serves both.

        Raises:
            ValueError: A tensor or a length of the batch does not fit.
        """
        batch = common_attn_metadata
        check_batch(batch)
        for name in ("encoder_seq_lens", "rswa_prefix_lens"):
            tensor = getattr(batch, name)
            if tensor is not None:
                check_lengths(name, tensor, batch.num_reqs)
        check_mm_ranges(batch.mm_req_doc_ranges or {}, batch.num_reqs)
        if batch.rswa_prefix_lens is not None and self._rswa_window is None:
            raise bad_argument(
                "rswa_prefix_lens", "a tensor", "None where model_config.rswa_window is None"
            )
        reqs = batch.num_reqs
        causal = batch.causal
        return CPUAttentionMetadata(
            num_reqs=reqs,
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=batch.query_start_loc[: reqs + 1],
            seq_lens=batch.seq_lens[:reqs],
            block_table=batch.block_table_tensor[:reqs],
            slot_mapping=batch.slot_mapping,
            block_size=self.kernel_block_size or self.kv_cache_spec.block_size,
            causal=causal[:reqs] if isinstance(causal, torch.Tensor) else causal,
            encoder_seq_lens=_first(batch.encoder_seq_lens, reqs),
            mm_ranges=batch.mm_req_doc_ranges or {},
            rswa_prefix_lens=_first(batch.rswa_prefix_lens, reqs),
            rswa_window=self._rswa_window if batch.rswa_prefix_lens is not None else None,
        )

    def update_block_table(
        self,
        metadata: CPUAttentionMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> CPUAttentionMetadata:
        """Return the same batch in other blocks; `metadata` is not changed."""
        check_table("blk_table", blk_table, metadata.num_reqs)
        return replace(
            metadata,
            block_table=blk_table[: metadata.num_reqs],
            slot_mapping=slot_mapping,
            _schedules={},
        )


def _first(tensor: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:count]


def _numbers(tensor: torch.Tensor) -> IntArray:
    numbers: IntArray = tensor.to(torch.int64).numpy()
    return numbers


def _check_queries_fit(query_lens: IntArray, key_lens: IntArray) -> None:
    # A request without any token at all may still have query rows: it is padding of a graph.
    bad = np.flatnonzero((key_lens < query_lens) & (key_lens > 0))
    if bad.size:
        request = int(bad[0])
        raise bad_argument(
            f"seq_lens[{request}]",
            int(key_lens[request]),
            f"at least the {query_lens[request]} query tokens",
        )


def _check_table_width(table: torch.Tensor, key_lens: IntArray, block_size: int) -> None:
    longest = int(key_lens.max(initial=0))
    needed = -(-longest // block_size)
    if table.shape[1] < needed:
        raise bad_argument(
            "block_table.shape",
            list(table.shape),
            f"[num_reqs, {needed} or more] for {longest} tokens in blocks of {block_size}",
        )
