"""The oracle of latent attention (MLA), in float64 and by the plainest road.

Latent attention keeps one row per token, ``[kv_c | k_pe]``: a latent of ``kv_lora_rank`` values
that stands for all heads, and ``qk_rope_head_dim`` values that carry the position and are shared
by the heads. Keys and values of head ``h`` are linear in the latent::

    k_h = [kv_c @ W_uk_h.T | k_pe]        v_h = kv_c @ W_uv_h.T
    score = scale * q_h . k_h

(DeepSeek-V2, arXiv:2405.04434, section 2.1). Since the value is linear too, the up-projection may
be moved behind the softmax, and the one of the keys into the query: that is the absorbed ("mqa")
form, whose result is a weighted sum of latents. :func:`mla_reference` computes everything by the
uncompressed form and returns both results; :func:`mla_reference_absorbed` takes an absorbed query
as it is given to ``forward_mqa``, so that the rounding of that query is no part of the error.

Nothing here is fast, shares code with a backend, or reads memory that no token owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "MlaReference",
    "TermSizes",
    "absorb_query",
    "mla_reference",
    "mla_reference_absorbed",
    "split_kv_b_weight",
]


@dataclass(frozen=True)
class MlaReference:
    """What latent attention gives for each token, in float64.

    Attributes:
        output: ``[num_tokens, num_heads, v_head_dim]``, after the up-projection of the values;
            ``None`` when no up-projection was given.
        latent: ``[num_tokens, num_heads, kv_lora_rank]``, the weighted sum of latents, which is
            what ``forward_mqa`` returns.
        lse: ``[num_tokens, num_heads]``, natural logarithm of the sum of ``exp(score)``; -inf for
            a row that sees no key (its output is 0), and for tokens of no request.
        sizes: how large the terms of these sums are, for `attnmux.testing.mla.tolerances`.
    """

    output: torch.Tensor | None
    latent: torch.Tensor
    lse: torch.Tensor
    sizes: TermSizes


@dataclass(frozen=True)
class TermSizes:
    """What rounding errors grow with; each is float64 ``[num_tokens, num_heads]``.

    Attributes:
        score: largest over the visible keys of the sum of ``|scale * q_i * k_i|``.
        score_noise: the same for the root of the sum of squares.
        output_spread: largest element of the weighted sum of ``|value|``.
        latent_spread: the same for latents.
        num_keys: visible keys.
    """

    score: torch.Tensor
    score_noise: torch.Tensor
    output_spread: torch.Tensor
    latent_spread: torch.Tensor
    num_keys: torch.Tensor

    @classmethod
    def zeros(cls, num_tokens: int, num_heads: int) -> TermSizes:
        """Return the sizes of rows that see nothing."""
        shape = (num_tokens, num_heads)
        return cls(*(torch.zeros(shape, dtype=torch.float64) for _ in range(5)))


def split_kv_b_weight(
    weight: torch.Tensor, num_heads: int, qk_nope_head_dim: int, v_head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the weight of ``kv_b_proj`` into the parts for keys and for values.

    Args:
        weight: ``[num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]``, as in a linear
            layer: head-major, each head's key rows before its value rows.
        num_heads: number of query heads.
        qk_nope_head_dim: size of a key without its rotary part.
        v_head_dim: size of a value.

    Returns:
        ``(w_uk [num_heads, qk_nope_head_dim, rank], w_uv [num_heads, v_head_dim, rank])``, views.
    """
    per_head = weight.view(num_heads, qk_nope_head_dim + v_head_dim, weight.shape[-1])
    return per_head[:, :qk_nope_head_dim], per_head[:, qk_nope_head_dim:]


def absorb_query(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Move the up-projection of the keys into the query.

    Args:
        q_nope: ``[num_tokens, num_heads, qk_nope_head_dim]``.
        w_uk: ``[num_heads, qk_nope_head_dim, kv_lora_rank]``.

    Returns:
        ``[num_tokens, num_heads, kv_lora_rank]`` float64.
    """
    return torch.einsum("thn,hnr->thr", q_nope.double(), w_uk.double())


def mla_reference(
    q: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    w_kv_b: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor | Sequence[Sequence[int]],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    scale: float,
    causal: bool | Sequence[bool] = True,
    num_decodes: int = 0,
    topk_indices: torch.Tensor | None = None,
    cache_scale: float = 1.0,
) -> MlaReference:
    """Latent attention of a ragged batch by the uncompressed form.

    The first ``num_decodes`` requests take all their keys from the cache, as ``forward_mqa`` does.
    The others take their own tokens from ``kv_c`` and ``k_pe`` (not rounded to the cache's dtype)
    and only what came before from the cache, as ``forward_mha`` does.

    Args:
        q: ``[num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]``, rotary part last.
        kv_c: ``[num_tokens, kv_lora_rank]``, the normalised latents of the batch's own tokens.
        k_pe: ``[num_tokens, 1, qk_rope_head_dim]`` or without the 1, after rotation.
        w_kv_b: weight of ``kv_b_proj``, see :func:`split_kv_b_weight`.
        kv_cache: ``[num_blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim]``.
        block_table: per request the blocks of its tokens, in order; more entries are ignored.
        query_lens: tokens of each request in this batch; 0 for padding.
        seq_lens: tokens of each request so far, with those of this batch.
        scale: factor of the scores.
        causal: for all requests, or for each.
        num_decodes: number of leading requests that read everything from the cache.
        topk_indices: ``[num_tokens, k]`` positions within the request that each token may see;
            negative entries are padding. ``None`` for dense attention.
        cache_scale: factor that turns stored values into real ones.

    Returns:
        :class:`MlaReference` with every field set. Tokens past the last request have output 0 and
        log-sum-exp -inf.
    """
    num_heads, rope = q.shape[1], k_pe.shape[-1]
    nope = q.shape[2] - rope
    w_uk, w_uv = (
        part.double()
        for part in split_kv_b_weight(w_kv_b, num_heads, nope, w_kv_b.shape[0] // num_heads - nope)
    )
    own_rows = torch.cat([kv_c, k_pe.reshape(kv_c.shape[0], rope)], dim=-1).double()
    result = _empty_reference(q.shape[0], num_heads, kv_c.shape[1])
    output = torch.zeros(q.shape[0], num_heads, w_uv.shape[1], dtype=torch.float64)
    for request in _requests(query_lens, seq_lens, causal):
        rows = _cached_rows(kv_cache, block_table, request, cache_scale)
        if request.index >= num_decodes:
            first_own = max(request.seq_len - request.query_len, 0)
            num_own = request.seq_len - first_own
            rows[first_own:] = own_rows[request.tokens][request.query_len - num_own :]
        latents, rotary = rows[:, :-rope], rows[:, -rope:]
        keys = torch.cat(
            [
                torch.einsum("kr,hnr->hkn", latents, w_uk),
                rotary.expand(num_heads, *rotary.shape),
            ],
            dim=-1,
        )
        values = torch.einsum("kr,hvr->hkv", latents, w_uv)
        scores = scale * (q[request.tokens].double().transpose(0, 1) @ keys.transpose(1, 2))
        visible = _visible(request, topk_indices)
        weights, lse = _softmax(scores, visible)
        output[request.tokens] = (weights @ values).transpose(0, 1)
        result.latent[request.tokens] = (weights @ latents).transpose(0, 1)
        result.lse[request.tokens] = lse.transpose(0, 1)
        _note_sizes(result.sizes, request, q, keys, scale, visible)
        spread = (weights @ values.abs()).amax(dim=-1)
        result.sizes.output_spread[request.tokens] = spread.transpose(0, 1)
        spread = (weights @ latents.abs()).amax(dim=-1)
        result.sizes.latent_spread[request.tokens] = spread.transpose(0, 1)
    return MlaReference(output, result.latent, result.lse, result.sizes)


def mla_reference_absorbed(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor | Sequence[Sequence[int]],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    scale: float,
    causal: bool | Sequence[bool] = True,
    topk_indices: torch.Tensor | None = None,
    cache_scale: float = 1.0,
) -> MlaReference:
    """Latent attention of a ragged batch for an absorbed query, all keys from the cache.

    Args:
        q_latent: ``[num_tokens, num_heads, kv_lora_rank]``, see :func:`absorb_query`.
        q_pe: ``[num_tokens, num_heads, qk_rope_head_dim]``.
        kv_cache: as in :func:`mla_reference`, and so are the arguments after it.
        block_table: blocks of each request.
        query_lens: tokens of each request in this batch.
        seq_lens: tokens of each request so far.
        scale: factor of the scores (that of the uncompressed head).
        causal: for all requests, or for each.
        topk_indices: ``[num_tokens, k]`` or ``None``.
        cache_scale: factor that turns stored values into real ones.

    Returns:
        :class:`MlaReference` whose ``output`` is ``None``.
    """
    rank = q_latent.shape[-1]
    q = torch.cat([q_latent, q_pe], dim=-1).double()
    result = _empty_reference(q.shape[0], q.shape[1], rank)
    for request in _requests(query_lens, seq_lens, causal):
        rows = _cached_rows(kv_cache, block_table, request, cache_scale)
        scores = scale * (q[request.tokens].transpose(0, 1) @ rows.T)
        visible = _visible(request, topk_indices)
        weights, lse = _softmax(scores, visible)
        result.latent[request.tokens] = (weights @ rows[:, :rank]).transpose(0, 1)
        result.lse[request.tokens] = lse.transpose(0, 1)
        _note_sizes(result.sizes, request, q, rows[None], scale, visible)
        spread = (weights @ rows[:, :rank].abs()).amax(dim=-1)
        result.sizes.latent_spread[request.tokens] = spread.transpose(0, 1)
    return result


@dataclass(frozen=True)
class _Request:
    index: int
    tokens: slice
    seq_len: int
    causal: bool

    @property
    def query_len(self) -> int:
        return int(self.tokens.stop - self.tokens.start)


def _requests(
    query_lens: Sequence[int], seq_lens: Sequence[int], causal: bool | Sequence[bool]
) -> Iterator[_Request]:
    flags = [causal] * len(seq_lens) if isinstance(causal, bool) else causal
    start = 0
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        tokens = slice(start, start + int(query_len))
        start = tokens.stop
        if query_len:
            yield _Request(index, tokens, int(seq_len), bool(flags[index]))


def _cached_rows(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor | Sequence[Sequence[int]],
    request: _Request,
    cache_scale: float,
) -> torch.Tensor:
    """Rows of positions 0..seq_len-1, float64 [seq_len, rank + rope].

    A prefill's own positions may not be written yet, and then hold anything: the caller replaces
    these rows.
    """
    block_size = kv_cache.shape[2]
    num_blocks = -(-request.seq_len // block_size)
    blocks = [int(block) for block in block_table[request.index][:num_blocks]]
    rows = kv_cache[blocks, 0].double().reshape(-1, kv_cache.shape[-1])
    return rows[: request.seq_len] * cache_scale


def _visible(request: _Request, topk_indices: torch.Tensor | None) -> torch.Tensor:
    """Which key each query sees, bool [query_len, seq_len]."""
    key_pos = torch.arange(request.seq_len)
    query_pos = request.seq_len - request.query_len + torch.arange(request.query_len)
    visible = torch.ones(request.query_len, request.seq_len, dtype=torch.bool)
    if request.causal:
        visible = key_pos[None, :] <= query_pos[:, None]
    if topk_indices is not None:
        chosen = torch.zeros_like(visible)
        for row, indices in enumerate(topk_indices[request.tokens]):
            chosen[row, indices[indices >= 0].long()] = True
        visible = visible & chosen
    return visible


def _softmax(scores: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [heads, query_len, seq_len] (0 in rows that see nothing) and log-sum-exp."""
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    empty = lse == -torch.inf
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    return weights, lse


def _empty_reference(num_tokens: int, num_heads: int, rank: int) -> MlaReference:
    latent = torch.zeros(num_tokens, num_heads, rank, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64)
    return MlaReference(None, latent, lse, TermSizes.zeros(num_tokens, num_heads))


def _note_sizes(
    sizes: TermSizes,
    request: _Request,
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    visible: torch.Tensor,
) -> None:
    """Write the sizes of the scores; `keys` is ``[heads or 1, seq_len, width]``."""
    query = q[request.tokens].double().transpose(0, 1)
    absolute = scale * (query.abs() @ keys.abs().transpose(1, 2))
    noise = scale * (query.square() @ keys.square().transpose(1, 2)).sqrt()
    for target, values in ((sizes.score, absolute), (sizes.score_noise, noise)):
        if request.seq_len:
            largest = values.masked_fill(~visible, 0.0).amax(dim=-1)
            target[request.tokens] = largest.transpose(0, 1)
    sizes.num_keys[request.tokens] = visible.sum(dim=-1, keepdim=True).double()
