"""The sentence of every bad argument: its name, what came, what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnmux import checks
from attnmux.checks import bad_argument
from attnmux.errors import ContractError

FLOATS = torch.zeros(4, 8, dtype=torch.float16)

# The call, and its sentence; None where the argument is good.
CASES: dict[str, tuple[Callable[[], None], str | None]] = {
    "in": (lambda: checks.check_in("scheme", "b", ("a", "b")), None),
    "not in": (
        lambda: checks.check_in("scheme", "c", ("a", "b")),
        "scheme: got 'c'; allowed: a | b",
    ),
    "in an iterator": (lambda: checks.check_in("size", 3, iter([1, 2, 3])), None),
    "positive": (lambda: checks.check_positive("block_size", 1), None),
    "zero": (
        lambda: checks.check_positive("block_size", 0),
        "block_size: got 0; allowed: an integer of at least 1",
    ),
    "a float": (
        lambda: checks.check_positive("block_size", 16.0),
        "block_size: got 16.0; allowed: an integer of at least 1",
    ),
    "True is no number": (
        lambda: checks.check_positive("block_size", True),
        "block_size: got True; allowed: an integer of at least 1",
    ),
    "divisible": (lambda: checks.check_divisible("hidden", 64, "num_heads", 8), None),
    "not divisible": (
        lambda: checks.check_divisible("hidden", 65, "num_heads", 8),
        "hidden: got 65; allowed: a multiple of num_heads (8)",
    ),
    "heads": (lambda: checks.check_head_counts(32, 8), None),
    "3 heads on 2": (  # B51
        lambda: checks.check_head_counts(3, 2),
        "num_heads: got 3; allowed: a multiple of num_kv_heads (2)",
    ),
    "33 heads on 2": (  # B51
        lambda: checks.check_head_counts(33, 2),
        "num_heads: got 33; allowed: a multiple of num_kv_heads (2)",
    ),
    "fewer heads than KV heads": (
        lambda: checks.check_head_counts(2, 4),
        "num_heads: got 2; allowed: a multiple of num_kv_heads (4)",
    ),
    "no KV heads": (
        lambda: checks.check_head_counts(4, 0),
        "num_kv_heads: got 0; allowed: an integer of at least 1",
    ),
    "no window": (lambda: checks.check_sliding_window(None), None),
    "window of itself": (lambda: checks.check_sliding_window(1), None),
    "window 0": (
        lambda: checks.check_sliding_window(0),
        "sliding_window: got 0; allowed: None (no window) or an integer of at least 1",
    ),
    "window -1": (
        lambda: checks.check_sliding_window(-1),
        "sliding_window: got -1; allowed: None (no window) or an integer of at least 1",
    ),
    "scale": (lambda: checks.check_scale(0), None),
    "scale not finite": (
        lambda: checks.check_scale(float("nan")),
        "scale: got nan; allowed: a finite number",
    ),
    "no scale": (lambda: checks.check_scale(None), "scale: got None; allowed: a finite number"),
    "no cap": (lambda: checks.check_soft_cap(0), None),
    "cap of infinity": (
        lambda: checks.check_soft_cap(float("inf")),
        "logits_soft_cap: got inf; allowed: None, 0 or a finite positive number",
    ),
    "cap as text": (
        lambda: checks.check_soft_cap("30"),
        "logits_soft_cap: got '30'; allowed: None, 0 or a finite positive number",
    ),
    "one slope for all": (
        lambda: checks.check_alibi_slopes(0.5, 4),  # type: ignore[arg-type]
        "alibi_slopes: got 0.5; allowed: one for each of 4 query heads",
    ),
    "slopes of two dimensions": (
        lambda: checks.check_alibi_slopes(torch.ones(4, 2), 4),
        "alibi_slopes.shape: got [4, 2]; allowed: [4]",
    ),
    "no slopes": (lambda: checks.check_alibi_slopes(None, 8), None),
    "slopes": (lambda: checks.check_alibi_slopes([0.5] * 4, 4), None),
    "slopes as a tensor": (lambda: checks.check_alibi_slopes(torch.ones(4), 4), None),
    "slopes of all ranks": (  # B22
        lambda: checks.check_alibi_slopes([0.5] * 8, 4),
        "alibi_slopes: got 8 slopes; allowed: one for each of 4 query heads",
    ),
    "no sinks": (lambda: checks.check_sinks(None, 8), None),
    "sinks": (lambda: checks.check_sinks(torch.zeros(8, dtype=torch.bfloat16), 8), None),
    "sinks of another count": (
        lambda: checks.check_sinks(torch.zeros(4), 8),
        "sinks.shape: got [4]; allowed: [8]",
    ),
    "sinks of integers": (
        lambda: checks.check_sinks(torch.zeros(8, dtype=torch.int32), 8),
        "sinks.dtype: got torch.int32; allowed: a floating-point dtype",
    ),
    "int32 lengths": (lambda: checks.check_index_dtype("seq_lens", FLOATS.int()), None),
    "int64 lengths": (lambda: checks.check_index_dtype("seq_lens", FLOATS.long()), None),
    "int16 lengths": (  # B58
        lambda: checks.check_index_dtype("seq_lens", FLOATS.short()),
        "seq_lens.dtype: got torch.int16; allowed: torch.int32 | torch.int64",
    ),
    "tensor": (
        lambda: checks.check_tensor(
            "query",
            FLOATS,
            shape=("num_tokens", 8),
            dtype=(torch.float16, torch.bfloat16),
            device="cpu",
            last_dim_contiguous=True,
        ),
        None,
    ),
    "not a tensor": (
        lambda: checks.check_tensor("query", [1.0]),
        "query: got list; allowed: a torch.Tensor",
    ),
    "shape": (
        lambda: checks.check_tensor("query", FLOATS, shape=("num_tokens", 16)),
        "query.shape: got [4, 8]; allowed: [num_tokens, 16]",
    ),
    "number of dimensions": (
        lambda: checks.check_tensor("query", FLOATS, shape=("num_tokens", "num_heads", 8)),
        "query.shape: got [4, 8]; allowed: [num_tokens, num_heads, 8]",
    ),
    "a tensor without dimensions": (
        lambda: checks.check_tensor("scale", torch.tensor(1.0), shape=()),
        None,
    ),
    "dtype": (
        lambda: checks.check_tensor("query", FLOATS, dtype=torch.float32),
        "query.dtype: got torch.float16; allowed: torch.float32",
    ),
    "dtypes": (
        lambda: checks.check_tensor("query", FLOATS, dtype=[torch.float32, torch.bfloat16]),
        "query.dtype: got torch.float16; allowed: torch.float32 | torch.bfloat16",
    ),
    "device": (
        lambda: checks.check_tensor("key", FLOATS.to("meta"), device="cpu"),
        "key.device: got meta; allowed: cpu",
    ),
    "last dimension": (
        lambda: checks.check_tensor("key", FLOATS.t(), last_dim_contiguous=True),
        "key.stride(-1): got 8; allowed: 1",
    ),
    "last dimension of one entry": (
        lambda: checks.check_tensor("key", FLOATS[:, ::8], last_dim_contiguous=True),
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_names_argument_value_and_what_is_allowed(case: str) -> None:
    check, sentence = CASES[case]
    if sentence is None:
        check()
        return
    with pytest.raises(ValueError, match=": got ") as caught:
        check()
    assert str(caught.value) == sentence


def test_every_check_is_in_the_table() -> None:
    names = {name for name in vars(checks) if name.startswith("check_")}
    used = {name for check, _ in CASES.values() for name in check.__code__.co_names}
    assert names <= used


def test_a_device_without_an_index_stands_for_all_of_its_type() -> None:
    class OnSecondGpu(torch.Tensor):
        device = torch.device("cuda:1")

    tensor: Any = torch.zeros(1).as_subclass(OnSecondGpu)
    checks.check_tensor("key", tensor, device="cuda")
    checks.check_tensor("key", tensor, device="cuda:1")
    with pytest.raises(ValueError, match=r"key.device: got cuda:1; allowed: cuda:0"):
        checks.check_tensor("key", tensor, device="cuda:0")


def test_checks_never_read_values() -> None:
    meta = torch.zeros(4, 8, device="meta")
    checks.check_tensor("query", meta, shape=(4, 8), dtype=torch.float32, last_dim_contiguous=True)
    checks.check_index_dtype("seq_lens", meta.long())
    checks.check_sinks(meta[:, 0], 4)
    checks.check_alibi_slopes(meta[:, 0], 4)


def test_the_error_is_returned_for_the_caller_to_raise() -> None:
    error = bad_argument("head_size", 7, "a multiple of 8")
    assert type(error) is ValueError
    assert str(error) == "head_size: got 7; allowed: a multiple of 8"


def test_a_broken_contract_is_a_value_error_and_a_failed_assertion() -> None:
    assert issubclass(ContractError, ValueError)
    assert issubclass(ContractError, AssertionError)
