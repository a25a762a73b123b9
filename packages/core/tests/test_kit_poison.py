"""Poison is poison in every dtype, and a watch sees every byte that changes."""

from __future__ import annotations

import pytest
import torch

from attnmux.testing.poison import PoisonedAllocations, Watch, guarded, poison_

FLOATS = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_poison_is_nan_in_every_dtype(dtype: torch.dtype) -> None:
    assert poison_(torch.zeros(7, dtype=dtype)).float().isnan().all()


def test_nan_poison_makes_the_scales_behind_int8_rows_nan() -> None:
    rows = poison_(torch.zeros(2, 16, dtype=torch.int8))
    assert rows.view(torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_poison_is_finite_and_large(dtype: torch.dtype) -> None:
    values = poison_(torch.zeros(7, dtype=dtype), "finite").double()
    assert values.isfinite().all()
    assert values.min() > 100


def test_poison_fills_what_a_view_does_not_show() -> None:
    buffer = torch.zeros(4, 6)
    poison_(buffer[1:3, ::2])
    assert buffer.isnan().all()


def test_guards_lie_around_the_view_and_between_its_rows() -> None:
    output = guarded((3, 2, 4), torch.float32, row_gap=5)
    watch = Watch.of("output", output, torch.ones_like(output, dtype=torch.bool))
    output.zero_()
    assert watch.complaint() is None
    for place in (-1, 8, 3 * 13):  # before the first row, behind it, behind the last
        output.as_strided((1,), (1,), output.storage_offset() + place).zero_()
        assert "output" in (watch.complaint() or "nothing")
        poison_(output.as_strided((1,), (1,), output.storage_offset() + place).clone())
        watch = Watch.of("output", output, torch.ones_like(output, dtype=torch.bool))


def test_watch_names_the_first_element_that_must_not_change() -> None:
    cache = torch.zeros(3, 2, 4, 5)
    writable = torch.zeros_like(cache, dtype=torch.bool)
    writable[1] = True
    watch = Watch.of("kv_cache", cache, writable)
    cache[1, 0, 2] = 7.0
    assert watch.complaint() is None
    cache[2, 1, 3, 4] = 7.0
    assert watch.complaint() == (
        "kv_cache: 1 elements changed that must not, the first at [2, 1, 3, 4]"
    )


def test_watch_sees_a_change_of_sign_of_zero() -> None:
    query = torch.zeros(3)
    watch = Watch.of("query", query)
    query[1] = -0.0
    assert watch.complaint() is not None


def test_allocations_are_poisoned_inside_and_real_outside() -> None:
    real = torch.empty
    with PoisonedAllocations():
        made = torch.empty(3), torch.empty_like(torch.zeros(2)), torch.zeros(1).new_empty(4)
        assert all(tensor.isnan().all() for tensor in made)
        assert torch.empty(2, dtype=torch.int32).dtype == torch.int32
    assert torch.empty is real


def test_fixture_of_the_pytest_plugin_poisons(poisoned_allocations: object) -> None:
    assert torch.empty(3).isnan().all()
