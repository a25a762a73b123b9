"""Torch's default dtype and device are the engine's affair: no result and no dtype follows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attnmux.testing.mla.run import run_mla_scenario
from attnmux.testing.mla.scenarios import MlaScenario
from attnmux.testing.scenario import Request
from attnmux_cpu.mla_backend import CPUMLABackend, CPUMLASparseBackend
from attnmux_cpu.mla_base import LatentImpl
from attnmux_cpu.mla_builder import CPUMLABuilder, CPUMLASparseBuilder
from attnmux_cpu.mla_impl import CPUMLAImpl, CPUMLASparseImpl


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Any] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "another device": lambda: torch.device("meta"),
}

# Decodes that are grouped, a chunk in tiles, padding; masks, caches and types that have own paths.
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "features": {"window": 9, "sinks": True, "alibi": "sqrt", "soft_cap": 4.0},
    "ranges": {"ranges": {0: [(3, 20)], 2: [(2, 30)]}},
    "rswa": {"rswa_window": 4, "rswa_prefixes": [3, 2, 5, 1]},
    "fp8": {"cache_dtype": "fp8", "scales": ([0.3], [1.5])},
    "int8": {"cache_dtype": "int8_per_token_head"},
    "encoder": {"attn_type": "encoder_only"},
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("name", STEPS)
def test_attention_does_not_follow_torchs_defaults(built, default, name):
    lengths = [50, 9, 40, 3] if name != "encoder" else [1, 1, 20, 3]
    step = built([1, 1, 20, 3], lengths, pad_tokens=2, **STEPS[name])
    step.update()
    want, want_lse = step.attend()
    output, written = step.new_output(), step.cache.clone()
    with DEFAULTS[default]():
        metadata = step.builder.build(0, step.batch)
        step.update()
        _, lse = step.impl.forward_with_lse(
            step.layer, step.query, step.key, step.value, step.cache, metadata, output
        )
    assert lse.dtype == torch.float32
    assert lse.device == output.device
    assert torch.equal(output, want)
    assert torch.equal(lse, want_lse)
    assert torch.equal(step.cache.view(torch.uint8), written.view(torch.uint8))


CALLS = [
    (CPUMLABuilder, "build"),
    (CPUMLASparseBuilder, "build"),
    (CPUMLAImpl, "forward_mqa"),
    (CPUMLAImpl, "forward_mha"),
    (CPUMLASparseImpl, "forward_mqa"),
    (LatentImpl, "do_kv_cache_update"),
]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("backend", [CPUMLABackend, CPUMLASparseBackend])
def test_latent_attention_does_not_follow_torchs_defaults(monkeypatch, default, backend):
    def under_default(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with DEFAULTS[default]():
                return call(*args, **kwargs)

        return wrapped

    for owner, name in CALLS:
        monkeypatch.setattr(owner, name, under_default(getattr(owner, name)))
    requests = (Request(1, 30), Request(1, 3), Request(20, 45), Request(7, 7))
    topk = 8 if backend.is_sparse() else None
    for cache in ("auto", "fp8"):
        scenario = MlaScenario("mla.mixed.x", (), requests, topk=topk, kv_cache_dtype=cache)
        assert run_mla_scenario(backend, scenario) <= 1.0
