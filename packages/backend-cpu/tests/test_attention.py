"""Every feature of CPU_ATTN against the reference, alone and where pairs meet in one expression."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmux.kv_cache import KVCacheLayout

# A decode of one token, one of several blocks, a request without queries, two extends that group,
# a longer extend, a prefill.
MIXED = ([1, 1, 0, 3, 3, 12, 20], [1, 50, 9, 40, 7, 45, 20])

MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "window_one": {"window": 1},
    "not_causal": {"causal": False},
    "some_causal": {"causal": [True, False, True, False, True, False, False]},
    "ranges": {"ranges": {3: [(30, 38)], 5: [(2, 9), (36, 40)], 6: [(0, 3), (4, 17)]}},
    "rswa": {"rswa_window": 4, "rswa_prefixes": [0, 20, 3, 18, 2, 5, 6]},
}
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft_cap": {"soft_cap": 1.5, "size": 2.0},
    "alibi": {"alibi": "linear"},
    "alibi_sqrt": {"alibi": "sqrt"},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("masks", MASKS)
def test_masks_and_scores_in_pairs(built, masks, scores):
    built(*MIXED, **MASKS[masks], **SCORES[scores]).check()


@pytest.mark.parametrize(
    "fields",
    [
        {"window": 7, "causal": False},
        {"window": 7, "ranges": {3: [(25, 39)], 6: [(1, 17)]}},
        {"window": 30, "rswa_window": 4, "rswa_prefixes": [0, 30, 3, 18, 2, 5, 6]},
        {"rswa_window": 4, "rswa_prefixes": [0, 20, 3, 18, 2, 5, 6], "causal": False},
        {"soft_cap": 1.5, "alibi": "linear", "sinks": True, "window": 9, "size": 2.0},
    ],
    ids=["window+not_causal", "window+ranges", "window+rswa", "rswa+not_causal", "many"],
)
def test_features_that_meet_in_one_mask(built, fields):
    built(*MIXED, **fields).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (9, 3)], ids=str)
def test_head_counts_and_dtypes(built, heads, dtype):
    built(*MIXED, heads=heads, dtype=dtype).check()


# Odd, no power of two, larger than a vector, and values narrower or wider than keys.
@pytest.mark.parametrize(
    "sizes", [(3, None), (40, None), (80, None), (96, None), (192, 128), (16, 40)], ids=str
)
def test_head_sizes(built, sizes):
    size, size_v = sizes
    built(*MIXED, head_size=size, head_size_v=size_v).check()


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_layouts(built, layout, cache_dtype):
    built(*MIXED, layout=layout, cache_dtype=cache_dtype, window=20).check()


# One token, no power of two, larger than a tile, prime and larger than a tile.
@pytest.mark.parametrize("block_size", [1, 12, 48, 528, 257])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.BHLNC], ids=str)
def test_block_sizes(built, block_size, layout):
    built([1, 2, 30, 1], [600, 2, 300, 529], block_size=block_size, layout=layout).check()


@pytest.mark.parametrize("window", range(1, 20))
def test_windows_see_exactly_their_keys_across_block_edges(built, window):
    built([1, 1, 1, 1, 4, 17], [9, 16, 17, 40, 35, 40], window=window, block_size=8).check()


def test_window_of_a_decode_counts_its_keys(built):
    # With equal scores the log-sum-exp is the logarithm of the number of keys that are seen.
    step = built([1] * 32, list(range(9, 41)), window=12, block_size=8)
    step.query.zero_()
    step.update()
    lse = step.attend()[1]
    seen = torch.tensor([min(12, seq_len) for seq_len in range(9, 41)])
    assert torch.equal(lse.exp().round().long(), seen.unsqueeze(1).expand(-1, 4))


def test_causality_is_aligned_to_the_last_keys(built):
    step = built([3, 1], [8, 8])
    step.query.zero_()
    step.update()
    lse = step.attend()[1]
    assert lse[:, 0].exp().round().tolist() == [6, 7, 8, 8]


ENCODERS = ([5, 0, 1, 30, 300], [5, 0, 1, 30, 300])


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"window": 8}, {"alibi": "linear"}, {"alibi": "sqrt"}, {"sinks": True, "soft_cap": 2.0}],
    ids=lambda fields: "+".join(fields) or "plain",
)
def test_encoders_see_both_ways(built, attn_type, fields):
    built(*ENCODERS, attn_type=attn_type, **fields).check()


@pytest.mark.parametrize("cacheless", [False, True])
@pytest.mark.parametrize("fields", [{}, {"sinks": True}, {"soft_cap": 2.0}], ids=str)
def test_cross_attention_over_encoder_tokens(built, cacheless, fields):
    lens = {"encoder_lens": [7, 0, 40, 1, 16, 33]}
    step = built(
        [1, 1, 5, 1, 20, 0], [3, 9, 9, 30, 20, 1], attn_type="encoder_decoder",
        cacheless=cacheless, **lens, **fields,
    )  # fmt: skip
    step.check()


def test_cross_attention_without_encoder_lengths_counts_seq_lens(built):
    built([1, 4], [20, 3], attn_type="encoder_decoder").check()


def test_requests_that_see_nothing_give_zero_and_minus_infinity(built):
    step = built([1, 1, 1, 0], [0, 7, 0, 0], pad_tokens=3)
    output, lse = step.check()
    assert torch.equal(output[[0, 2, 3, 4, 5]], torch.zeros(5, 4, 32))
    assert (lse[[0, 2, 3, 4, 5]] == float("-inf")).all()


def test_a_row_without_keys_has_the_sink_as_its_log_sum_exp(built):
    step = built([1, 1], [0, 7], sinks=True, pad_tokens=1)
    output, lse = step.check()
    assert torch.equal(lse[0], step.problem.sinks)
    assert (lse[2] == float("-inf")).all()
    assert torch.equal(output[0], torch.zeros(4, 32))


def test_rows_past_the_batch_are_not_touched(built):
    step = built([2], [5])
    step.query = torch.cat([step.query, step.query])
    output, lse = step.check()
    assert output[2:].isnan().all()
    assert (lse[2:] == float("-inf")).all()


@pytest.mark.parametrize("soft_cap", [None, 50.0])
@pytest.mark.parametrize("size", [3000.0, -9000.0])
def test_scores_of_thousands_stay_exact(built, soft_cap, size):
    built(*MIXED, size=size, soft_cap=soft_cap).check()


@pytest.mark.parametrize("size", [6e4, -6e4])
def test_float16_at_the_end_of_its_range(built, size):
    step = built(*MIXED, dtype=torch.float16)
    step.query.fill_(size)
    step.update()
    output, lse = step.attend()
    assert torch.isfinite(output).all()
    assert torch.isfinite(lse).all()


def test_several_tiles_of_queries_and_keys(built):
    # More than one tile each way, over an uneven rest, with and without a context.
    built([700, 600], [700, 900], heads=(4, 1), head_size=8).check()


def test_several_tiles_with_window_and_alibi(built):
    built([500], [900], heads=(2, 1), head_size=8, window=300, alibi="linear").check()


@pytest.mark.parametrize("lens", [[300] * 12, [2000, 3, 40, 900, 1, 17]], ids=["even", "ragged"])
def test_groups_larger_than_a_tile(built, lens):
    options = {"heads": (8, 4), "head_size": 64}
    built([1] * len(lens), lens, **options).check()
    built([2] * len(lens), [length + 2 for length in lens], window=50, **options).check()


def _one_token_view(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(tensor.shape[0], 3, *tensor.shape[1:], dtype=tensor.dtype)
    wide[:, 1] = tensor
    return wide[:, 1]


ARRANGEMENTS = {
    "rows of a fused buffer": _one_token_view,
    "heads first": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
    "size first": lambda tensor: tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("attn_type", ["decoder", "encoder"])
@pytest.mark.parametrize("lens", [([1], [1]), ([1, 12], [1, 12])], ids=["one", "several"])
def test_strides_of_inputs_are_honoured(built, arrangement, attn_type, lens):
    step = built(*lens, attn_type=attn_type, arrange=ARRANGEMENTS[arrangement])
    step.check()


def test_outputs_may_be_flat_or_strided(built):
    step = built(*MIXED)
    step.update()
    want = step.forward()
    metadata = step.builder.build(0, step.batch)
    arguments = (step.layer, step.query.flatten(1), step.key, step.value, step.cache, metadata)
    flat = torch.empty(want.shape[0], 128)
    assert step.impl.forward(*arguments, flat) is flat
    assert torch.equal(flat.view_as(want), want)
    wide = torch.full((want.shape[0], 4, 2, 32), 7.0)
    step.impl.forward(*arguments, wide[:, :, 0])
    assert torch.equal(wide[:, :, 0], want)
    assert (wide[:, :, 1] == 7.0).all()


def test_inference_mode_and_autograd_both_work(built):
    step = built(*MIXED)
    with torch.inference_mode():
        step.check()
    query, step.query = step.query, step.query.clone().requires_grad_()
    step.update()
    output, lse = step.attend()
    assert not output.requires_grad
    step.query = query
    step.compare(output, lse)
