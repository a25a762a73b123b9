"""From logits to the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attnmux.checks import bad_argument, check_positive


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        max_new_tokens: Most tokens generated; at least 1.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: Keep the likeliest `top_k` tokens; 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose probabilities reach `top_p`, in
            (0, 1]; 1 keeps all.
        seed: Of the request's own random numbers: they do not depend on the rest of the batch.
        stop_token_ids: Tokens that end the request, besides the model's own.
        ignore_eos: Go on after the model's end token.

    Raises:
        ValueError: On construction, naming the field.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_positive("max_new_tokens", self.max_new_tokens)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise bad_argument("temperature", self.temperature, "0 or more, finite")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise bad_argument("top_k", self.top_k, "0 (all tokens) or a positive integer")
        if not 0 < self.top_p <= 1:
            raise bad_argument("top_p", self.top_p, "more than 0, at most 1")


class Sampler:
    """Chooses the tokens of one request."""

    def __init__(self, params: SamplingParams) -> None:
        """Start the request's random numbers at its seed."""
        self.params = params
        self._generator = torch.Generator().manual_seed(params.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token.

        Args:
            logits: ``[vocabulary]``, any floating dtype, any device.

        Raises:
            ValueError: If no logit is finite, or one is NaN or +inf: then there is no distribution.
        """
        scores = logits.detach().to(device="cpu", dtype=torch.float32)
        highest = scores.max()
        if not torch.isfinite(highest):
            raise bad_argument("logits", f"a maximum of {highest.item()}", "finite numbers")
        if self.params.temperature == 0:
            return int(scores.argmax())
        probabilities, tokens = _kept(scores, self.params)
        drawn = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(tokens[drawn])


def _kept(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of the tokens that may be drawn, and those tokens, likeliest first.

    Ties are kept in the order of the vocabulary, so that a seed means the same everywhere.
    """
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scaled = (scores - scores.max()) / params.temperature
    ordered, tokens = scaled.sort(descending=True, stable=True)
    if params.top_k:
        ordered, tokens = ordered[: params.top_k], tokens[: params.top_k]
    probabilities = ordered.softmax(dim=0)
    before = probabilities.cumsum(dim=0) - probabilities
    kept = before < params.top_p
    kept[0] = True
    return probabilities[kept], tokens[kept]
