"""Lengths and tables as they come from an engine: checked, and brought to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from attnmux.checks import bad_argument, check_index_dtype, check_positive

LONGEST = 2**31 - 1
"""Largest length or block that plain lists may bring: they are kept as int32."""

Lengths: TypeAlias = "Sequence[int] | np.ndarray[Any, Any] | torch.Tensor"
Table: TypeAlias = "Sequence[Sequence[int]] | torch.Tensor"


def integers(name: str, values: Any) -> np.ndarray[Any, Any]:
    """Return integers on the host; a `ValueError` names what is not integers."""
    host = on_host(name, values)
    if host.size and host.dtype.kind not in "iu":
        raise bad_argument(name, values, "integers")
    return host.astype(np.int64)


def _array(values: Any, name: str) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(values)
    except ValueError as ragged:
        raise bad_argument(name, values, "integers") from ragged


def host_lengths(
    seq_lens: Lengths, query_lens: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any] | None:
    """Return sequence lengths on the host, checked against the queries; None: on a device."""
    if isinstance(seq_lens, torch.Tensor) and seq_lens.device.type != "cpu":
        _check_one_a_request(tuple(seq_lens.shape), query_lens.size)
        return None
    host = integers("seq_lens", seq_lens)
    _check_one_a_request(host.shape, query_lens.size)
    if host.size and int(host.max()) > LONGEST:
        raise bad_argument("seq_lens", int(host.max()), f"at most {LONGEST}")
    short = np.flatnonzero(host < query_lens)
    if short.size:
        req = int(short[0])
        raise bad_argument(
            f"seq_lens[{req}]", int(host[req]), f"at least its {int(query_lens[req])} query tokens"
        )
    return host


def _check_one_a_request(shape: tuple[int, ...], num_reqs: int) -> None:
    if shape != (num_reqs,):
        got = f"{shape[0]} lengths" if len(shape) == 1 else f"shape {list(shape)}"
        raise bad_argument("seq_lens", got, f"{num_reqs}, one a request")


def lengths_tensor(seq_lens: Lengths, device: torch.device) -> torch.Tensor:
    """Return lengths on the device: a tensor as it is, others as int32."""
    if isinstance(seq_lens, torch.Tensor):
        check_index_dtype("seq_lens", seq_lens)
        return seq_lens.to(device, non_blocking=True)
    host = torch.from_numpy(np.array(seq_lens, dtype=np.int32))
    return host.to(device, non_blocking=True)


def table_tensor(table: Table | None, num_reqs: int, device: torch.device) -> torch.Tensor:
    """Return ``[num_reqs, max_blocks]`` on the device; short rows are filled with block 0."""
    if table is None:
        return torch.zeros(num_reqs, 0, dtype=torch.int32, device=device)
    if isinstance(table, torch.Tensor):
        check_index_dtype("block_table", table)
        host_or_device = table
    else:
        rows = _table_rows(table)
        width = max((row.size for row in rows), default=0)
        padded = np.zeros((len(rows), width), dtype=np.int32)
        for req, row in enumerate(rows):
            padded[req, : row.size] = row
        host_or_device = torch.from_numpy(padded)
    if host_or_device.ndim != 2 or host_or_device.shape[0] != num_reqs:
        raise bad_argument(
            "block_table", list(host_or_device.shape), f"[{num_reqs}, max_blocks], a row a request"
        )
    return host_or_device.to(device, non_blocking=True)


def _table_rows(table: Sequence[Sequence[int]]) -> list[np.ndarray[Any, Any]]:
    if isinstance(table, str) or not hasattr(table, "__len__"):
        raise bad_argument(
            "block_table", repr(table), "None | a tensor | a row of blocks a request"
        )
    rows = [integers("block_table", row) for row in table]
    for req, row in enumerate(rows):
        if row.ndim != 1:
            raise bad_argument(f"block_table[{req}]", table[req], "a row of blocks")
        if row.size and int(row.max()) > LONGEST:
            raise bad_argument(f"block_table[{req}]", int(row.max()), f"at most {LONGEST}")
    return rows


def check_table(table: Table, seq_lens: np.ndarray[Any, Any], block_size: int) -> None:
    """Raise `ValueError` unless each row has the blocks that its tokens need."""
    check_positive("block_size", block_size)
    needed = -(-seq_lens // block_size)
    width: Any = table.shape[-1] if isinstance(table, torch.Tensor) else [len(row) for row in table]
    short = np.flatnonzero(needed > width)
    if short.size:
        req = int(short[0])
        raise bad_argument(
            f"block_table[{req}]",
            f"{np.broadcast_to(width, needed.shape)[req]} blocks",
            f"at least {needed[req]} for {seq_lens[req]} tokens in blocks of {block_size}",
        )


def pad_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return `tensor` with rows of zeros up to `num_rows`."""
    missing = num_rows - tensor.shape[0]
    if missing <= 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def padded(name: str, wanted: int | None, have: int) -> int:
    """Return the size after padding; a `ValueError` if it is below the size before."""
    if wanted is not None and not (isinstance(wanted, int) and wanted >= have):
        raise bad_argument(name, wanted, f"at least {have}")
    return have if wanted is None else wanted


def on_host(name: str, values: Any) -> np.ndarray[Any, Any]:
    """Return values on the host; a `ValueError` if they would have to be fetched from a device."""
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise bad_argument(name, f"a tensor on {values.device}", "values on the host")
    return _array(values, name)
