"""From plain lengths and tables to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from attnmux.abc.metadata import CommonAttentionMetadata
from attnmux.batch.lengths import (
    LONGEST,
    Lengths,
    Table,
    check_table,
    host_lengths,
    integers,
    lengths_tensor,
    pad_rows,
    padded,
    table_tensor,
)
from attnmux.checks import bad_argument, check_index_dtype, check_positive, check_tensor

REQUEST_FIELDS = ("encoder_seq_lens", "dcp_local_seq_lens", "is_prefilling", "rswa_prefix_lens")
"""Tensors of a batch with one entry a request, beside lengths and tables."""
NO_SLOT = -1
"""Slot of a token that is not written to the cache."""


def make_metadata(
    query_lens: Sequence[int] | np.ndarray[Any, Any],
    seq_lens: Lengths,
    block_table: Table | None,
    block_size: int,
    *,
    device: torch.device | str = "cpu",
    causal: bool | torch.Tensor = True,
    slot_mapping: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    pad_num_reqs: int | None = None,
    pad_num_tokens: int | None = None,
    **fields: Any,
) -> CommonAttentionMetadata:
    """Describe one step's batch.

    Args:
        query_lens: New tokens of each request; 0 for a request that only fills a place.
        seq_lens: Tokens of each request after this step. A tensor on `device` is used as it is and
            not read; `max_seq_len` is needed then.
        block_table: Cache blocks of each request, in the order of its tokens; rows may differ in
            length. A tensor is used as it is. None: no cache. With `encoder_seq_lens` among the
            fields these are the blocks of the encoder's tokens.
        block_size: Tokens in a block.
        device: Where the batch is wanted.
        causal: For all requests, or bool ``[num_reqs]``; padding requests become causal.
        slot_mapping: Slots of the new tokens; None: those that the table gives, and no slot with
            `encoder_seq_lens`, as new tokens of a decoder are not encoder tokens.
        max_seq_len: At least the longest sequence; None: the longest of `seq_lens`.
        pad_num_reqs: Requests after padding with empty ones.
        pad_num_tokens: Tokens after padding with tokens of no request, which are not written.
        **fields: Further fields of `CommonAttentionMetadata`, taken as they are; tensors with an
            entry a request are padded with zeros to `pad_num_reqs`.

    Raises:
        ValueError: Lengths that do not go together, a row of the table that is too short, padding
            that is smaller than the batch.
    """
    check_positive("block_size", block_size)
    host_query = integers("query_lens", query_lens)
    if host_query.ndim != 1 or (host_query < 0).any():
        raise bad_argument("query_lens", query_lens, "one length of at least 0 a request")
    if int(host_query.sum()) > LONGEST:
        raise bad_argument("query_lens", query_lens, f"at most {LONGEST} tokens together")
    num_reqs = int(host_query.size)
    host_seq = host_lengths(seq_lens, host_query)
    if host_seq is None and max_seq_len is None:
        raise bad_argument("max_seq_len", None, "an upper bound, as seq_lens is on the device")

    device = torch.device(device)
    padded_reqs = padded("pad_num_reqs", pad_num_reqs, num_reqs)
    start = np.zeros(padded_reqs + 1, dtype=np.int32)
    start[1 : num_reqs + 1] = np.cumsum(host_query)
    start[num_reqs + 1 :] = start[num_reqs]
    num_tokens = int(start[-1])
    padded_tokens = padded("pad_num_tokens", pad_num_tokens, num_tokens)

    start_cpu = torch.from_numpy(start)
    start_device = start_cpu.to(device, non_blocking=True, copy=True)  # apart, on a CPU as well
    seq_device = pad_rows(lengths_tensor(seq_lens, device), padded_reqs)
    table = pad_rows(table_tensor(block_table, num_reqs, device), padded_reqs)
    for name in REQUEST_FIELDS:
        if fields.get(name) is not None:
            fields[name] = _padded_field(name, fields[name], num_reqs, padded_reqs)
    is_cross = fields.get("encoder_seq_lens") is not None
    host_keys = fields.get("encoder_seq_lens_cpu") if is_cross else host_seq
    if host_keys is not None and block_table is not None:
        check_table(block_table, np.asarray(host_keys)[:num_reqs], block_size)
    if slot_mapping is None:
        slot_mapping = (
            torch.full((num_tokens,), NO_SLOT, dtype=torch.int64, device=device)
            if block_table is None or is_cross
            else compute_slot_mapping(start_device, seq_device, table, block_size, num_tokens)
        )
        if not isinstance(block_table, torch.Tensor) and device.type == "cpu" and not is_cross:
            _check_new_blocks(slot_mapping, block_table)
    check_tensor("slot_mapping", slot_mapping, shape=("num_tokens",))
    check_index_dtype("slot_mapping", slot_mapping)
    if (missing := padded_tokens - slot_mapping.shape[0]) > 0:
        slot_mapping = torch.nn.functional.pad(slot_mapping, (0, missing), value=NO_SLOT)
    longest = 0 if host_seq is None else int(host_seq.max(initial=0))
    if max_seq_len is None:
        max_seq_len = longest
    elif max_seq_len < longest:
        raise bad_argument(
            "max_seq_len", max_seq_len, f"at least {longest}, the longest of seq_lens"
        )
    if host_seq is not None:
        bound = np.zeros(padded_reqs, dtype=np.int32)
        bound[:num_reqs] = host_seq
        fields.setdefault("seq_lens_cpu_upper_bound", torch.from_numpy(bound))
    return CommonAttentionMetadata(
        query_start_loc=start_device,
        query_start_loc_cpu=start_cpu,
        seq_lens=seq_device,
        num_reqs=padded_reqs,
        num_actual_tokens=padded_tokens,
        max_query_len=int(host_query.max(initial=0)),
        max_seq_len=max_seq_len,
        block_table_tensor=table,
        slot_mapping=slot_mapping,
        causal=_padded_causal(causal, num_reqs, padded_reqs),
        **fields,
    )


def _check_new_blocks(slot_mapping: torch.Tensor, block_table: Table | None) -> None:
    # A block that was freed behind a window may be named by anything, not one that is written now.
    if block_table is not None and (slot_mapping < 0).any():
        raise bad_argument("block_table", block_table, "blocks of at least 0 for new tokens")


def _padded_field(name: str, tensor: torch.Tensor, num_reqs: int, padded_reqs: int) -> torch.Tensor:
    check_tensor(name, tensor, shape=("num_reqs",))
    if tensor.shape[0] < num_reqs:
        raise bad_argument(f"{name}.shape", list(tensor.shape), f"[{num_reqs}]")
    return pad_rows(tensor, padded_reqs)


def _padded_causal(
    causal: bool | torch.Tensor, num_reqs: int, padded_reqs: int
) -> bool | torch.Tensor:
    if isinstance(causal, bool):
        return causal
    check_tensor("causal", causal, shape=("num_reqs",), dtype=torch.bool)
    if causal.shape[0] not in (num_reqs, padded_reqs):
        raise bad_argument("causal.shape", list(causal.shape), f"[{num_reqs}]")
    return torch.nn.functional.pad(causal, (0, padded_reqs - causal.shape[0]), value=True)


def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_tokens: int,
) -> torch.Tensor:
    """Return the slot of each new token: ``block * block_size + offset``.

    Args:
        query_start_loc: ``[num_reqs + 1]``.
        seq_lens: ``[num_reqs]``.
        block_table: ``[num_reqs, max_blocks]``.
        block_size: Tokens in a block.
        num_tokens: The last entry of `query_start_loc`, known on the host.

    Returns:
        int64 ``[num_tokens]`` on the device of the inputs. A request's tokens follow its blocks,
        which need not be neighbours.
    """
    check_positive("block_size", block_size)
    for name, tensor in (
        ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens),
        ("block_table", block_table),
    ):
        check_tensor(name, tensor)
        check_index_dtype(name, tensor)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    reqs = torch.arange(query_lens.shape[0], device=query_lens.device)
    req_of_token = torch.repeat_interleave(reqs, query_lens, output_size=num_tokens)
    token = torch.arange(num_tokens, device=query_lens.device)
    place_in_query = token - query_start_loc[:-1].long()[req_of_token]
    position = (seq_lens - query_lens).long()[req_of_token] + place_in_query
    block = block_table[req_of_token, position // block_size].long()
    return block * block_size + position % block_size
