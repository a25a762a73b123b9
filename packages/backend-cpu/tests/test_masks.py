"""Ranges and shortcuts against the plain mask, position by position."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.testing.reference import visible_keys
from attnmux_cpu.kernels.masks import MaskRule, key_ranges, same_range, sees_all, visible

windows = st.none() | st.integers(1, 12)


@st.composite
def masks(draw):
    """A rule, a request, and some of its queries."""
    seq_len = draw(st.integers(1, 24))
    first = draw(st.integers(0, seq_len - 1))
    last = draw(st.integers(first, seq_len - 1))
    rule = MaskRule(draw(windows), draw(st.booleans()), draw(windows))
    causal = draw(st.booleans()) and not rule.symmetric
    bounds = sorted(draw(st.sets(st.integers(0, 26), max_size=4)))
    ranges = list(zip(bounds[0::2], bounds[1::2], strict=False))
    return rule, (first, last + 1), seq_len, causal, draw(st.integers(0, 24)), ranges


def _want(rule, queries, seq_len, causal, prefix_len, ranges):
    return visible_keys(
        torch.arange(*queries),
        torch.arange(seq_len),
        causal=causal,
        sliding_window=rule.window,
        two_sided=rule.symmetric,
        ranges=ranges,
        rswa_window=rule.rswa_window,
        rswa_prefix=prefix_len,
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(masks())
def test_the_mask_of_a_tile(mask):
    rule, queries, seq_len, causal, prefix_len, ranges = mask
    query_pos, key_pos = torch.arange(*queries).unsqueeze(1), torch.arange(seq_len)
    got = visible(rule, query_pos, key_pos, causal, prefix_len)
    if ranges:
        got |= same_range(query_pos, key_pos, ranges)
    assert torch.equal(got, _want(*mask))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(masks())
def test_key_ranges_are_exactly_the_keys_that_somebody_sees_or_lies_between(mask):
    rule, queries, seq_len, causal, prefix_len, ranges = mask
    got = key_ranges(rule, queries, seq_len, causal, prefix_len, ranges)
    covered = [key for low, high in got for key in range(low, high)]
    assert covered == sorted(set(covered))
    seen = _want(*mask).any(dim=0)
    assert set(seen.nonzero().flatten().tolist()) <= set(covered)
    # No range starts or ends with a key that nobody sees.
    assert all(seen[low] and seen[high - 1] for low, high in got)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(masks(), st.integers(0, 23), st.integers(1, 24))
def test_a_tile_without_a_mask_is_one_that_all_see(mask, low, size):
    rule, queries, seq_len, causal, prefix_len, _ = mask
    keys = (min(low, seq_len - 1), min(low + size, seq_len))
    if keys[0] >= keys[1]:
        return
    want = _want(rule, queries, seq_len, causal, prefix_len, [])[:, keys[0] : keys[1]]
    got = sees_all(rule, queries, keys, causal, prefix_len)
    # A window past the prefix may show all keys though none of the two shortcuts says so.
    assert got <= bool(want.all())
    if rule.rswa_window is None:
        assert got == bool(want.all())
