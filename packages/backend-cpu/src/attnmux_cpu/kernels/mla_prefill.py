"""Latent attention of prefills: keys and values are uncompressed, chunk by chunk.

First the context, read from the cache, then the batch's own tokens as they were given. Both come
in rounds of at most `workspace_tokens` tokens, which are up-projected together by ``kv_b_proj``;
a round is filled over requests in turn, and a request may end in one and go on in the next. Each
request's softmax runs on over all its pieces, so that the number of rounds does not show in the
result. Scores are made in tiles of ``TILE_Q`` x ``TILE_KV`` for all heads.

Scratch: one round's keys and values, one tile of scores, and the float32 result of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.checks import bad_argument, check_tensor
from attnmux_cpu.kernels.mla_cache import LatentCache
from attnmux_cpu.kernels.softmax import SoftmaxState

TILE_Q = 128
TILE_KV = 256
"""Large enough for the matrix products, small enough for their scores to stay in the cache."""


@dataclass(frozen=True)
class PrefillRequest:
    """One request with new tokens. Rows count from the first prefill token of the batch."""

    index: int  # in the batch: row of the block table
    first_row: int
    query_len: int
    context_len: int  # keys that are only in the cache
    causal: bool
    num_absent: int = 0  # leading tokens that stand before position 0: they are nobody's key


@dataclass(frozen=True)
class Piece:
    """Some consecutive keys of a request that are worked on in one round."""

    request: PrefillRequest
    start: int
    end: int


@dataclass(frozen=True)
class PrefillSchedule:
    """Rounds of context pieces (places in the context) and of own pieces (places in the query)."""

    context_rounds: Sequence[Sequence[Piece]]
    own_rounds: Sequence[Sequence[Piece]]


def plan_prefill(requests: Sequence[PrefillRequest], workspace_tokens: int) -> PrefillSchedule:
    """Share the workspace out: each round is full, but for the last one of either kind."""
    context = [Piece(request, 0, request.context_len) for request in requests]
    own = [Piece(request, request.num_absent, request.query_len) for request in requests]
    return PrefillSchedule(_fill(context, workspace_tokens), _fill(own, workspace_tokens))


def _fill(pieces: Sequence[Piece], workspace_tokens: int) -> list[list[Piece]]:
    rounds: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        start = piece.start
        while start < piece.end:
            if not room:
                rounds.append([])
                room = workspace_tokens
            end = min(piece.end, start + room)
            rounds[-1].append(Piece(piece.request, start, end))
            room -= end - start
            start = end
    return rounds


@dataclass(frozen=True)
class UpProjection:
    """``kv_b_proj`` with the sizes that its result is cut by."""

    project: Callable[[torch.Tensor], Any]
    num_heads: int
    qk_nope_head_dim: int
    v_head_dim: int

    def __call__(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys ``[n, heads, nope]`` and values ``[n, heads, v]`` of latents ``[n, rank]``.

        Raises:
            ValueError: ``kv_b_proj`` gives another shape than the layer's sizes ask for.
        """
        result = self.project(latents)
        if isinstance(result, (tuple, list)):
            result = result[0]
        check_tensor("kv_b_proj(kv_c_normed)", result)
        width = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        if list(result.shape) != [latents.shape[0], width]:
            raise bad_argument(
                "kv_b_proj(kv_c_normed).shape",
                list(result.shape),
                f"[{latents.shape[0]}, {width}]: num_heads * (qk_nope_head_dim + v_head_dim)",
            )
        heads = result.reshape(latents.shape[0], self.num_heads, -1)
        return heads[..., : self.qk_nope_head_dim], heads[..., self.qk_nope_head_dim :]


@dataclass(frozen=True)
class PrefillInputs:
    """What a layer brings.

    Attributes:
        query: ``[num_tokens, num_heads, qk_nope_head_dim + rope]``.
        kv_c: ``[num_tokens, rank]``: latents of these tokens.
        k_pe: ``[num_tokens, rope]``.
        cache: Only contexts are read.
        scale: Factor of the scores.
    """

    query: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    cache: LatentCache
    scale: float


def launch_prefill(
    inputs: PrefillInputs, schedule: PrefillSchedule, up_projection: UpProjection
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend.

    Returns:
        ``[num_heads, num_tokens, v_head_dim]`` and log-sum-exp ``[num_heads, num_tokens]``,
        float32; 0 and -inf for tokens that see nothing.
    """
    num_tokens, num_heads = inputs.query.shape[:2]
    # As large as the output: fresh memory, not the thread's workspace, which is kept for good.
    state = SoftmaxState(
        torch.full((num_heads, num_tokens, 1), -torch.inf, dtype=torch.float32, device="cpu"),
        torch.zeros(num_heads, num_tokens, 1, dtype=torch.float32, device="cpu"),
        torch.zeros(
            num_heads, num_tokens, up_projection.v_head_dim, dtype=torch.float32, device="cpu"
        ),
    )
    for pieces in schedule.context_rounds:
        latents, rotary = _read_context(inputs, pieces)
        _attend_round(inputs, pieces, up_projection(latents), rotary, state, own=False)
    for pieces in schedule.own_rounds:
        places = torch.cat(
            [
                torch.arange(piece.start, piece.end, device="cpu") + piece.request.first_row
                for piece in pieces
            ]
        )
        latents, rotary = inputs.kv_c[places], inputs.k_pe[places]
        _attend_round(inputs, pieces, up_projection(latents), rotary, state, own=True)
    return state.finish()


def _read_context(
    inputs: PrefillInputs, pieces: Sequence[Piece]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents ``[n, rank]`` and rotated parts ``[n, rope]`` of a round, in the query's dtype."""
    lengths = torch.tensor([piece.end - piece.start for piece in pieces], device="cpu")
    requests = torch.tensor(
        [piece.request.index for piece in pieces], device="cpu"
    ).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(piece.start, piece.end, device="cpu") for piece in pieces])
    rows = inputs.cache.read_stored(requests[None], positions[None])[0]
    if inputs.cache.scale != 1.0:
        rows = rows.float().mul_(inputs.cache.scale)
    rows = rows.to(inputs.query.dtype)
    rank = inputs.kv_c.shape[1]
    return rows[:, :rank], rows[:, rank:]


def _attend_round(
    inputs: PrefillInputs,
    pieces: Sequence[Piece],
    projected: tuple[torch.Tensor, torch.Tensor],
    rotary: torch.Tensor,
    state: SoftmaxState,
    *,
    own: bool,
) -> None:
    keys, values = projected
    start = 0
    for piece in pieces:
        end = start + piece.end - piece.start
        request = piece.request
        first, last = request.first_row, request.first_row + request.query_len
        _attend_piece(
            inputs.query[first:last],
            (keys[start:end], rotary[start:end], values[start:end]),
            _rows(state, first, last),
            inputs.scale,
            # Own token j stands at row j of the query; a context is before all of them.
            first_place=piece.start if own and request.causal else None,
        )
        start = end


def _attend_piece(
    query: torch.Tensor,
    keys_and_values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    state: SoftmaxState,
    scale: float,
    first_place: int | None,
) -> None:
    """Attend with all heads; with `first_place`, row i sees key j where j + first_place <= i."""
    keys, rotary, values = keys_and_values
    nope = keys.shape[-1]
    for kv_start in range(0, keys.shape[0], TILE_KV):
        tile = slice(kv_start, kv_start + TILE_KV)
        tile_keys = keys[tile].float().permute(1, 2, 0)  # [heads, nope, kv]
        tile_rotary = rotary[tile].float().T  # [rope, kv]
        tile_values = values[tile].float().transpose(0, 1)  # [heads, kv, v]
        place = None if first_place is None else first_place + kv_start
        # Rows before the tile's first key see none of it.
        for q_start in range(place or 0, query.shape[0], TILE_Q):
            q_end = min(q_start + TILE_Q, query.shape[0])
            rows = (query[q_start:q_end].float() * scale).transpose(0, 1)
            scores = torch.bmm(rows[..., :nope], tile_keys)  # [heads, q, kv]
            scores += rows[..., nope:] @ tile_rotary
            num_keys = scores.shape[-1]
            if place is not None and q_start < place + num_keys - 1:
                hidden = (
                    torch.arange(num_keys, device="cpu") + place
                    > torch.arange(q_start, q_end, device="cpu")[:, None]
                )
                scores.masked_fill_(hidden, -torch.inf)
            _rows(state, q_start, q_end).step(scores, tile_values)


def _rows(state: SoftmaxState, start: int, end: int) -> SoftmaxState:
    """The state of some rows of every head, sharing memory."""
    return SoftmaxState(
        state.running_max[:, start:end], state.running_sum[:, start:end], state.acc[:, start:end]
    )
