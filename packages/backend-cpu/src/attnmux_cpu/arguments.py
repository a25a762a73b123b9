"""What a layer's call is given, checked once and brought to one form; no kernel checks again."""

from __future__ import annotations

import torch

from attnmux.checks import bad_argument, check_index_dtype, check_tensor
from attnmux.quant import FP4_DTYPE, output_quant_key
from attnmux_cpu.kernels.output import OutputWriter
from attnmux_cpu.kernels.schedule import Schedule
from attnmux_cpu.kernels.tiles import HeadShape

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def heads_apart(name: str, tensor: object, heads: int, size: int) -> torch.Tensor:
    """Return ``[tokens, heads, size]`` of a tensor of that shape or ``[tokens, heads * size]``.

    Raises:
        ValueError: Another shape or device, or a dtype that is not float32, bfloat16 or float16.
    """
    check_tensor(name, tensor, dtype=FLOAT_DTYPES, device="cpu")
    assert isinstance(tensor, torch.Tensor)
    if tensor.dim() == 2:
        check_tensor(name, tensor, shape=("num_tokens", heads * size))
        return tensor.view(tensor.shape[0], heads, size)
    check_tensor(name, tensor, shape=("num_tokens", heads, size))
    return tensor


def check_rows(name: str, tensor: torch.Tensor, rows: int) -> None:
    """Raise `ValueError` unless `tensor` has at least `rows` rows."""
    if tensor.shape[0] < rows:
        raise bad_argument(f"{name}.shape[0]", tensor.shape[0], f"at least {rows} tokens")


def check_same_dtype(name: str, tensor: torch.Tensor, of: str, dtype: torch.dtype) -> None:
    """Raise `ValueError` unless `tensor` has the dtype of the argument called `of`."""
    if tensor.dtype != dtype:
        raise bad_argument(f"{name}.dtype", tensor.dtype, f"{dtype}, as {of}")


def check_cache(
    kv_cache: object, num_kv_heads: int, content: int, dtype: torch.dtype, block_size: int | None
) -> torch.Tensor:
    """Return the cache view ``[num_blocks, num_kv_heads, block_size, content]``.

    Raises:
        ValueError: Another shape, dtype or device, or a row that is not contiguous.
    """
    shape = ("num_blocks", num_kv_heads, block_size or "block_size", content)
    check_tensor("kv_cache", kv_cache, shape=shape, dtype=dtype, device="cpu")
    check_tensor("kv_cache", kv_cache, last_dim_contiguous=True)
    assert isinstance(kv_cache, torch.Tensor)
    check_own_memory("kv_cache", kv_cache)
    return kv_cache


def check_own_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` where elements share memory, as `expand` makes them."""
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise bad_argument(f"{name}.stride()", list(tensor.stride()), "no step of 0")


def check_blocks(schedule: Schedule, num_blocks: int) -> None:
    """Raise `ValueError` unless every block that will be read is in the cache."""
    low, high = schedule.lowest_block, schedule.highest_block
    if high >= low and (low < 0 or high >= num_blocks):
        raise bad_argument(
            "block_table", low if low < 0 else high, f"blocks 0 to {num_blocks - 1} where read"
        )


def written_slots(
    slot_mapping: object, num_rows: int, num_slots: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return which rows are written (None: the first ones, all of them) and their slots, int64.

    Args:
        slot_mapping: ``[n]``: slots; -1 for a row that is not written.
        num_rows: Rows that there are; slots past them must be -1.
        num_slots: Slots of the cache.

    Raises:
        ValueError: Another shape, dtype or device, a slot outside of the cache, more
            slots than rows.
    """
    check_tensor("slot_mapping", slot_mapping, shape=("num_tokens",), device="cpu")
    assert isinstance(slot_mapping, torch.Tensor)
    check_index_dtype("slot_mapping", slot_mapping)
    slots = slot_mapping.long()
    if not slots.numel():
        return None, slots
    low, high = (int(end) for end in slots.aminmax())
    if low < -1 or high >= num_slots:
        raise bad_argument("slot_mapping", low if low < -1 else high, f"-1 to {num_slots - 1}")
    if slots.shape[0] > num_rows:
        if int(slots[num_rows:].max()) >= 0:
            raise bad_argument(
                "slot_mapping.shape", list(slots.shape), f"at most {num_rows}, as many as keys"
            )
        slots = slots[:num_rows]
    if low >= 0:
        return None, slots
    rows = (slots >= 0).nonzero().squeeze(-1)
    return rows, slots[rows]


def cache_scale(name: str, layer: object, num_kv_heads: int) -> torch.Tensor:
    """Return the layer's scale `name`, float32 ``[1]`` or ``[num_kv_heads]``.

    Raises:
        ValueError: The layer has none, or one of another dtype or number.
    """
    scale = getattr(layer, name, None)
    check_tensor(f"layer.{name}", scale, dtype=torch.float32, device="cpu")
    assert isinstance(scale, torch.Tensor)
    if scale.numel() not in (1, num_kv_heads):
        raise bad_argument(
            f"layer.{name}.shape", list(scale.shape), f"one element | [{num_kv_heads}]"
        )
    return scale.reshape(-1)


def check_output(
    results: tuple[object, torch.Tensor | None, torch.Tensor | None],
    heads: HeadShape,
    dtype: torch.dtype,
    num_tokens: int,
    lse: torch.Tensor | None,
) -> OutputWriter:
    """Return what writes into the output and the log-sum-exp.

    Args:
        results: Output, scale and block scale, as `attnmux.quant.output_quant_key` takes them. The
            output is ``[n, num_heads, value_size]`` or ``[n, num_heads * value_size]``.
        heads: The layer's heads.
        dtype: The query's; also the output's, unless it is quantised.
        num_tokens: Rows that will be written.
        lse: float32 ``[num_tokens, num_heads]``; None: not asked for.

    Raises:
        ValueError: The three do not go together, or do not fit the layer.
    """
    output, scale, block_scale = results
    check_tensor("output", output, device="cpu")
    assert isinstance(output, torch.Tensor)
    packed = 2 if output.dtype == FP4_DTYPE else 1
    hidden = heads.num_heads * heads.value_size // packed
    if output.dim() == 3:
        shape = ("num_tokens", heads.num_heads, heads.value_size // packed)
        check_tensor("output", output, shape=shape)
    else:
        check_tensor("output", output, shape=("num_tokens", hidden))
    check_rows("output", output, num_tokens)
    check_own_memory("output", output)
    key = output_quant_key(output, scale, block_scale)
    if key is None:
        check_same_dtype("output", output, "query", dtype)
        apart = output.view(output.shape[0], heads.num_heads, heads.value_size)
    else:
        apart = output.unsqueeze(1) if output.dim() == 2 else output
    return OutputWriter(apart, lse, key, scale, block_scale)
