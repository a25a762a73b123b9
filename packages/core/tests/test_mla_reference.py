"""The oracle of latent attention, held against other ways to compute the same."""

from __future__ import annotations

import pytest
import torch

from attnmux.testing.mla.reference import (
    MlaReference,
    absorb_query,
    mla_reference,
    mla_reference_absorbed,
    split_kv_b_weight,
)
from attnmux.testing.reference import reference_attention

HEADS, RANK, NOPE, ROPE, VALUE, BLOCK = 3, 20, 12, 6, 10, 4
QUERY_LENS, SEQ_LENS = [1, 3, 7, 0], [9, 3, 12, 0]
TABLE = [[5, 0, 7], [2], [1, 6, 4], []]
SCALE = 0.21
EXACT = {"rtol": 0.0, "atol": 1e-12}  # float64 on both sides, sums of some tens of terms


class Layer:
    """A batch whose cache holds all its tokens, in float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        num_tokens = sum(QUERY_LENS)
        self.q = draw(num_tokens, HEADS, NOPE + ROPE)
        self.w_kv_b = draw(HEADS * (NOPE + VALUE), RANK) * 0.3
        self.cache = torch.full((8, 1, BLOCK, RANK + ROPE), torch.nan, dtype=torch.float64)
        own = []
        for query_len, seq_len, blocks in zip(QUERY_LENS, SEQ_LENS, TABLE, strict=True):
            rows = draw(seq_len, RANK + ROPE)
            for position, row in enumerate(rows):
                self.cache[blocks[position // BLOCK], 0, position % BLOCK] = row
            own.append(rows[seq_len - query_len :])
        self.own = torch.cat(own)

    def solve(self, **changes: object) -> MlaReference:
        arguments = {
            "q": self.q,
            "kv_c": self.own[:, :RANK],
            "k_pe": self.own[:, None, RANK:],
            "w_kv_b": self.w_kv_b,
            "kv_cache": self.cache,
            "block_table": TABLE,
            "query_lens": QUERY_LENS,
            "seq_lens": SEQ_LENS,
            "scale": SCALE,
        }
        return mla_reference(**{**arguments, **changes})

    def solve_absorbed(self, **changes: object) -> MlaReference:
        w_uk, _ = split_kv_b_weight(self.w_kv_b, HEADS, NOPE, VALUE)
        arguments = {
            "q_latent": absorb_query(self.q[..., :NOPE], w_uk),
            "q_pe": self.q[..., NOPE:],
            "kv_cache": self.cache,
            "block_table": TABLE,
            "query_lens": QUERY_LENS,
            "seq_lens": SEQ_LENS,
            "scale": SCALE,
        }
        return mla_reference_absorbed(**{**arguments, **changes})


@pytest.fixture
def layer() -> Layer:
    return Layer()


def lists_of_everything() -> torch.Tensor:
    lists = torch.full((sum(QUERY_LENS), max(SEQ_LENS)), -1)
    row = 0
    for query_len, seq_len in zip(QUERY_LENS, SEQ_LENS, strict=True):
        for place in range(query_len):
            visible = seq_len - query_len + place + 1
            lists[row, -visible:] = torch.arange(visible).flip(0)
            row += 1
    return lists


@pytest.mark.parametrize("causal", [True, False, [False, True, False, True]])
def test_absorbed_and_uncompressed_forms_agree(layer: Layer, causal: bool | list[bool]) -> None:
    whole, absorbed = layer.solve(causal=causal), layer.solve_absorbed(causal=causal)
    torch.testing.assert_close(absorbed.latent, whole.latent, **EXACT)
    torch.testing.assert_close(absorbed.lse, whole.lse, **EXACT)
    _, w_uv = split_kv_b_weight(layer.w_kv_b, HEADS, NOPE, VALUE)
    up_projected = torch.einsum("thr,hvr->thv", absorbed.latent, w_uv)
    torch.testing.assert_close(up_projected, whole.output, **EXACT)


def test_a_prefill_without_context_is_torch_attention_over_uncompressed_heads(
    layer: Layer,
) -> None:
    tokens = slice(1, 4)  # the second request: its query is its whole sequence
    per_head = (layer.own[tokens, :RANK] @ layer.w_kv_b.T).view(-1, HEADS, NOPE + VALUE)
    rotary = layer.own[tokens, None, RANK:].expand(-1, HEADS, -1)
    key = torch.cat([per_head[..., :NOPE], rotary], dim=-1)
    right = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (layer.q[tokens], key, per_head[..., NOPE:])),
        is_causal=True,
        scale=SCALE,
    )
    torch.testing.assert_close(layer.solve().output[tokens], right.transpose(0, 1), **EXACT)


def test_the_absorbed_form_is_ordinary_attention_with_one_kv_head(layer: Layer) -> None:
    ours = layer.solve_absorbed()
    w_uk, _ = split_kv_b_weight(layer.w_kv_b, HEADS, NOPE, VALUE)
    query = torch.cat([absorb_query(layer.q[..., :NOPE], w_uk), layer.q[..., NOPE:]], dim=-1)
    with_values = torch.cat([layer.cache, layer.cache[..., :RANK]], dim=-1)
    table = torch.tensor([[*blocks, 0, 0, 0][:3] for blocks in TABLE])
    ordinary = reference_attention(
        query,
        query_start_loc=torch.tensor([0, *QUERY_LENS]).cumsum(0),
        seq_lens=torch.tensor(SEQ_LENS),
        scale=SCALE,
        kv_cache=with_values,
        block_table=table,
        head_size=RANK + ROPE,
        head_size_v=RANK,
    )
    torch.testing.assert_close(ours.latent, ordinary.output, **EXACT)
    torch.testing.assert_close(ours.lse, ordinary.lse, **EXACT)


def test_a_list_of_all_visible_positions_is_dense_attention(layer: Layer) -> None:
    dense, listed = layer.solve(), layer.solve(topk_indices=lists_of_everything())
    torch.testing.assert_close(listed.output, dense.output, **EXACT)
    torch.testing.assert_close(listed.lse, dense.lse, **EXACT)


def test_a_list_of_one_position_gives_its_latent(layer: Layer) -> None:
    lists = torch.tensor([[-1, 0]]).expand(sum(QUERY_LENS), -1)
    latent = layer.solve_absorbed(topk_indices=lists).latent
    first_row = layer.cache[TABLE[0][0], 0, 0, :RANK]
    torch.testing.assert_close(latent[0], first_row.expand(HEADS, -1), **EXACT)


def test_a_prefill_takes_its_own_rows_from_the_arguments_and_a_decode_from_the_cache(
    layer: Layer,
) -> None:
    before = layer.solve()
    layer.cache[TABLE[0][2], 0, 0] += 1.0  # the newest row of the first request
    layer.cache[TABLE[2][2], 0, 3] += 1.0  # the newest row of the third
    torch.testing.assert_close(layer.solve().output, before.output, **EXACT)
    as_decode = layer.solve(num_decodes=1)
    assert (as_decode.output[0] - before.output[0]).abs().min() > 1e-3
    torch.testing.assert_close(as_decode.output[1:], before.output[1:], **EXACT)


def test_the_cache_scale_multiplies_what_is_stored(layer: Layer) -> None:
    right = layer.solve_absorbed()
    scaled = layer.solve_absorbed(kv_cache=layer.cache / 4, cache_scale=4.0)
    torch.testing.assert_close(scaled.latent, right.latent, **EXACT)


def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity(layer: Layer) -> None:
    # The first request has no token yet the batch has a query for it, as in a captured graph.
    result = layer.solve_absorbed(seq_lens=[0, *SEQ_LENS[1:]])
    assert torch.equal(result.latent[0], torch.zeros(HEADS, RANK, dtype=torch.float64))
    assert torch.isneginf(result.lse[0]).all()
    assert result.latent.isfinite().all()


def test_nothing_is_read_past_a_length(layer: Layer) -> None:
    wider = [[*blocks, 2**30] for blocks in TABLE]
    result = layer.solve(block_table=wider)
    torch.testing.assert_close(result.output, layer.solve().output, **EXACT)
    assert result.output.isfinite().all()
