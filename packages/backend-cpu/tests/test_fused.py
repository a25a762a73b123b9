"""When torch's fused attention takes a request, and that it answers as the tiles do."""

from __future__ import annotations

import pytest
import torch

from attnmux_cpu.kernels import attention
from attnmux_cpu.options import CPUAttentionOptions

MIB = 1 << 20


@pytest.fixture
def fused(monkeypatch):
    """Key lengths of the requests that were run by torch's fused attention."""
    lengths = []
    run = attention.run_fused

    def note(problem, request):
        lengths.append(request.key_len)
        run(problem, request)

    monkeypatch.setattr(attention, "run_fused", note)
    return lengths


TAKEN = [
    ({}, [60, 90, 700]),
    ({"window": 30}, [60, 90, 700]),
    ({"causal": False}, [60, 90, 700]),
    ({"causal": [True, False, True, False]}, [60, 90, 700]),
    ({"cache_dtype": "fp8", "scales": ([0.3], [1.5])}, [60, 90, 700]),
    ({"dtype": torch.bfloat16}, [60, 90, 700]),
    ({"ranges": {2: [(50, 70)]}}, [60, 700]),
    ({"soft_cap": 2.0}, []),
    ({"alibi": "linear"}, []),
    ({"sinks": True}, []),
    ({"rswa_window": 9, "rswa_prefixes": [1, 2, 3, 4]}, []),
    ({"head_size_v": 16}, []),
]


@pytest.mark.parametrize(("fields", "taken"), TAKEN, ids=lambda value: str(value)[:40])
def test_what_it_takes_and_that_it_is_right(built, fused, fields, taken):
    step = built([1, 60, 40, 700], [50, 60, 90, 700], heads=(4, 2), **fields)
    step.update()
    step.compare(step.forward())
    assert fused == taken


def test_a_log_sum_exp_is_not_there(built, fused):
    step = built([60], [60])
    step.update()
    step.attend()
    assert fused == []


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_decoder"])
def test_keys_that_come_with_the_call(built, fused, attn_type):
    step = built([60, 3], [60, 3], attn_type=attn_type, cacheless=True)
    step.compare(step.forward())
    assert fused == [60, 3]


def test_a_request_that_does_not_fit_runs_in_tiles(built, fused):
    # 512 KiB for keys, of which each token takes twice 4 * (32 + 32) * 2 bytes.
    step = built(
        [40, 40], [512, 513], heads=(2, 2), options=CPUAttentionOptions(workspace_bytes=MIB)
    )
    step.update()
    step.compare(step.forward())
    assert fused == [512]


def test_queries_that_do_not_fit_are_cut(built, fused):
    # Keys of one head fit, queries of sixteen heads do not.
    options = CPUAttentionOptions(workspace_bytes=MIB)
    step = built([400], [500], heads=(16, 1), head_size=16, options=options, window=200)
    step.update()
    step.compare(step.forward())
    assert fused == [500]
