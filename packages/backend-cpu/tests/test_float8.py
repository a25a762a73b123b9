"""Every byte of both float8 dtypes becomes the float32 value that torch gives it."""

from __future__ import annotations

import pytest
import torch

from attnmux_cpu.kernels.float8 import copy_float8
from attnmux_cpu.kernels.workspace import Workspace


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_all_bytes(dtype):
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    got, want = torch.empty(256), values.float()
    copy_float8(values, got, Workspace())
    number = ~want.isnan()
    assert torch.equal(got.isnan(), ~number)
    assert torch.equal(got[number].view(torch.int32), want[number].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_strided_sources_and_none_at_all(dtype):
    values = torch.randn(4, 6).to(dtype)
    got = torch.empty(4, 3)
    copy_float8(values[:, 1:4], got, Workspace())
    assert torch.equal(got, values.float()[:, 1:4])
    copy_float8(values[:0], torch.empty(0, 6), Workspace())
