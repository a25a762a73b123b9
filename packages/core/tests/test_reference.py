"""The oracle against loops over single numbers, and against facts that hold for any attention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from attnmux.testing import reference_attention
from attnmux.testing.case import make_case
from attnmux.testing.declared import Declared
from attnmux.testing.kit import solve
from attnmux.testing.paged_read import CacheContent, read_rows
from attnmux.testing.paged_write import write_rows
from attnmux.testing.problem import AttentionProblem
from attnmux.testing.road import spec_of
from attnmux.testing.sabotage import ToyBackend
from attnmux.testing.scenario import Scenario
from attnmux.testing.strategies import scenarios

# Small sizes: the loops below visit every (query, key, element) one at a time.
SMALL = replace(Declared.by(ToyBackend), head_sizes=(2, 3), block_sizes=(4, 1, 3))


def brute_force(problem: AttentionProblem, keys: dict[tuple[int, int, int], tuple[list, list]]):
    """Attention by the formula in the reference's docstring, one number at a time."""
    starts = problem.query_start_loc.tolist()
    heads = problem.queries.shape[1]
    for request in range(len(starts) - 1):
        length = starts[request + 1] - starts[request]
        num_keys = problem.num_keys(request, length)
        group = heads // max(1, 1 + max((h for r, _, h in keys if r == request), default=0))
        for token in range(length):
            q_pos = problem.first_position(request, length) + token
            for head in range(heads):
                query = problem.queries[starts[request] + token, head].double().tolist()
                scores, values = [], []
                for k_pos in range(num_keys):
                    if not _sees(problem, request, q_pos, k_pos):
                        continue
                    key, value = keys[request, k_pos, head // group]
                    dot = sum(a * b for a, b in zip(query, key, strict=True))
                    scores.append(_score(problem, dot, head, q_pos, k_pos))
                    values.append(value)
                if problem.sinks is not None:
                    scores.append(float(problem.sinks[head]))
                    values.append([0.0] * problem.size_v)
                yield starts[request] + token, head, scores, values


def _sees(problem: AttentionProblem, request: int, q: int, k: int) -> bool:
    for start, end in (problem.mm_req_doc_ranges or {}).get(request, ()):
        if start <= q <= end and start <= k <= end:
            return True
    if problem.is_causal(request) and k > q:
        return False
    window = problem.sliding_window
    two_sided = problem.type_name in ("encoder", "encoder_only")
    if window is not None and (abs(q - k) if two_sided else q - k) >= window:
        return False
    if problem.rswa_window is not None and problem.rswa_prefix_lens is not None:
        return k < int(problem.rswa_prefix_lens[request]) or q - k < problem.rswa_window
    return True


def _score(problem: AttentionProblem, dot: float, head: int, q: int, k: int) -> float:
    score = dot * problem.scale_factor
    if problem.logits_soft_cap:
        score = problem.logits_soft_cap * math.tanh(score / problem.logits_soft_cap)
    if problem.alibi_slopes is not None:
        slope = problem.alibi_slopes[head]
        score += -slope * math.sqrt(max(q - k, 0)) if problem.use_alibi_sqrt else slope * (k - q)
    return score


def _stored(problem: AttentionProblem) -> dict[tuple[int, int, int], tuple[list, list]]:
    """Every key and value by (request, position, KV head), looked up one row at a time."""
    found, row = {}, 0
    lengths = problem.query_start_loc.diff().tolist()
    for request, length in enumerate(lengths):
        for position in range(problem.num_keys(request, length)):
            if problem.uses_cache:
                block_size = problem.kv_cache.shape[2]
                block = int(problem.block_table[request, position // block_size])
                content = CacheContent(
                    problem.size,
                    problem.size_v,
                    problem.kv_cache_dtype,
                    problem.k_scale,
                    problem.v_scale,
                )
                places = torch.tensor([block]), torch.tensor([position % block_size])
                key, value = (x[0] for x in read_rows(problem.kv_cache, *places, content))
            else:
                key, value = problem.key[row].double(), problem.value[row].double()
                row += 1
            for head in range(key.shape[0]):
                found[request, position, head] = key[head].tolist(), value[head].tolist()
    return found


@given(scenario=scenarios(SMALL))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_reference_equals_loops_over_single_numbers(scenario: Scenario) -> None:
    problem = make_case(scenario, spec_of(scenario, ToyBackend)).problem
    output, lse = solve(problem)
    for row, head, scores, values in brute_force(problem, _stored(problem)):
        total = math.fsum(math.exp(s) for s in scores)
        for dim in range(problem.size_v):
            weighted = math.fsum(math.exp(s) * v[dim] for s, v in zip(scores, values, strict=True))
            right = weighted / total if total else 0.0
            assert float(output[row, head, dim]) == pytest.approx(right, rel=1e-9, abs=1e-12)
        right = math.log(total) if total else -math.inf
        assert float(lse[row, head]) == pytest.approx(right, rel=1e-9, abs=1e-12)


def _one_request(query_len: int, seq_len: int, **features):
    torch.manual_seed(0)
    query = torch.randn(query_len, 2, 4)
    cache = torch.randn(8, 1, 4, 8)
    return reference_attention(
        query,
        query_start_loc=torch.tensor([0, query_len]),
        seq_lens=torch.tensor([seq_len]),
        kv_cache=cache,
        block_table=torch.tensor([[5, 2, 7, 0, 2**30]]),
        **features,
    )


def test_row_without_keys_is_zero_with_lse_minus_infinity() -> None:
    output, lse = _one_request(1, 0)
    assert output.eq(0).all()
    assert torch.isneginf(lse).all()


def test_row_with_a_sink_and_no_key_is_zero_with_the_sink_as_lse() -> None:
    output, lse = _one_request(1, 0, sinks=torch.tensor([0.5, -3.0]))
    assert output.eq(0).all()
    assert lse.tolist() == [[0.5, -3.0]]


def test_rows_of_no_request_are_zero() -> None:
    output, lse = reference_attention(
        torch.full((3, 1, 2), float("nan")),
        torch.ones(3, 1, 2),
        torch.ones(3, 1, 2),
        query_start_loc=torch.tensor([0, 0]),
        seq_lens=torch.tensor([0]),
    )
    assert output.eq(0).all()
    assert torch.isneginf(lse).all()


def test_window_of_one_sees_only_itself() -> None:
    output, _ = _one_request(3, 9, sliding_window=1)
    torch.manual_seed(0)
    torch.randn(3, 2, 4)
    values = torch.randn(8, 1, 4, 8)[..., 4:]
    own = [values[2, 0, 2], values[2, 0, 3], values[7, 0, 0]]  # positions 6, 7 and 8
    for row, value in enumerate(own):
        assert torch.allclose(output[row], value.double().expand(2, 4))


def test_sink_of_a_far_negative_logit_changes_nothing() -> None:
    plain = _one_request(4, 13)
    with_sink = _one_request(4, 13, sinks=torch.tensor([-1e4, -1e4]))
    assert torch.equal(plain.output, with_sink.output)


def test_entries_past_the_length_are_not_looked_at() -> None:
    assert _one_request(2, 12).output.isfinite().all()  # the fifth entry is no block


def test_keys_that_no_query_sees_may_be_nan() -> None:
    cache = torch.randn(3, 1, 4, 8)
    cache[1] = float("nan")  # the first block, outside the window
    output, _ = reference_attention(
        torch.randn(1, 2, 4),
        query_start_loc=torch.tensor([0, 1]),
        seq_lens=torch.tensor([8]),
        kv_cache=cache,
        block_table=torch.tensor([[1, 2]]),
        sliding_window=4,
    )
    assert output.isfinite().all()


def test_long_context_in_pieces_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _one_request(9, 13)
    monkeypatch.setattr("attnmux.testing.reference._SCORES_AT_ONCE", 30)
    pieces = _one_request(9, 13)
    # Products of other shapes may add up in another order: a few units of float64 rounding.
    torch.testing.assert_close(whole.output, pieces.output, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(whole.lse, pieces.lse, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"attn_type": "decode"}, "attn_type"),
        ({"attn_type": "encoder_decoder", "sliding_window": 3}, "attn_type"),
        ({"attn_type": "encoder_decoder", "alibi_slopes": [0.5, 0.5]}, "attn_type"),
        ({"alibi_slopes": [0.5]}, "alibi_slopes"),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype"),
        ({"block_table": None}, "block_table"),
    ],
)
def test_what_has_no_meaning_is_an_error_that_names_it(features: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        _one_request_with(features)


def _one_request_with(features: dict) -> None:
    arguments = {
        "query_start_loc": torch.tensor([0, 1]),
        "seq_lens": torch.tensor([3]),
        "kv_cache": torch.randn(2, 1, 4, 8),
        "block_table": torch.tensor([[1]]),
        **features,
    }
    reference_attention(torch.randn(1, 2, 4), **arguments)


@pytest.mark.parametrize(
    ("name", "dtype", "row_size", "largest_error"),
    [
        # Half a step of the format at the largest value of the row below, 2.5.
        ("fp8_e4m3", torch.float8_e4m3fn, 8, 0.125),
        ("fp8_e5m2", torch.float8_e5m2, 8, 0.25),
        ("int8_per_token_head", torch.int8, 16, 0.5 * 2.5 / 127),
        ("fp8_per_token_head", torch.float8_e4m3fn, 16, 0.125),
    ],
)
def test_quantised_rows_come_back(
    name: str, dtype: torch.dtype, row_size: int, largest_error: float
) -> None:
    cache = torch.zeros(2, 1, 4, row_size, dtype=torch.uint8).view(dtype)
    key, value = torch.tensor([[[2.5, -1.0, 0.3, 0.0]]]), torch.tensor([[[0.0, 1.1, -2.0, 0.5]]])
    content = CacheContent(4, 4, name)
    write_rows(cache, torch.tensor([6]), key, value, content)
    got = read_rows(cache, torch.tensor([1]), torch.tensor([2]), content)
    for stored, exact in zip(got, (key, value), strict=True):
        assert (stored - exact.double()).abs().max() <= largest_error
        assert (stored != 0).sum() == 3
