"""Wrong answers that a backend may give, each with the words for it.

They serve twice. Before a run, each mistake of a scenario's features must change the answer
visibly, or the scenario is drawn again: a test that passes without the feature proves nothing.
After a failed run, the mistake whose answer is nearest names the likely kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attnmux.testing.problem import AttentionProblem
from attnmux.testing.reference import ReferenceResult, solve
from attnmux.testing.tolerances import VISIBLE, Budget, judge


@dataclass(frozen=True)
class Variant:
    """One mistake.

    Attributes:
        kind: ends the sentence "looks as if …".
        problem: whose right answer the mistake gives.
        must_show: whether a scenario is drawn again when this changes nothing visible.
    """

    kind: str
    problem: AttentionProblem
    must_show: bool = True


def variants_of(problem: AttentionProblem) -> Iterator[Variant]:
    """Yield every mistake that the features of `problem` allow."""
    yield from _window_mistakes(problem)
    yield from _score_mistakes(problem)
    yield from _causality_mistakes(problem)
    yield from _range_mistakes(problem)
    yield from _scale_mistakes(problem)


def invisible_variant(
    problem: AttentionProblem, exact: ReferenceResult, budget: Budget
) -> Variant | None:
    """Return a mistake that this scenario would not notice, None when all of them show."""
    for variant in variants_of(problem):
        if variant.must_show:
            wrong = solve(variant.problem)
            # NaN shows: the mistake reads memory that nobody wrote.
            if judge(wrong.output, exact.output, budget.output).ratio < VISIBLE:
                return variant
    return None


def likely_kind(
    got: torch.Tensor, problem: AttentionProblem, exact: ReferenceResult, budget: Budget
) -> str | None:
    """Name the mistake that explains an output, None when none does.

    Args:
        got: ``[num_tokens, num_heads, size]``, the rows that were judged.
        problem, exact, budget: what was asked and what is right; more rows than `got` are ignored.
    """
    rows = got.shape[0]
    best: tuple[float, str] | None = None
    for variant in variants_of(problem):
        wrong = solve(variant.problem).output[:rows]
        # A mistake's answer has a budget of its own size; four of the right one's are enough room
        # to recognise it and far too few to confuse two mistakes that both show.
        ratio = judge(got, wrong, budget.output[:rows]).ratio
        if ratio < VISIBLE and (best is None or ratio < best[0]):
            best = ratio, variant.kind
    return None if best is None else best[1]


def _window_mistakes(problem: AttentionProblem) -> Iterator[Variant]:
    window = problem.sliding_window
    if window is not None:
        yield Variant(
            "the window counts one key too many", replace(problem, sliding_window=window + 1)
        )
        if window > 1:
            yield Variant(
                "the window counts one key too few", replace(problem, sliding_window=window - 1)
            )
        yield Variant("the sliding window is ignored", replace(problem, sliding_window=None))
    rswa = problem.rswa_window
    if rswa is not None and problem.rswa_prefix_lens is not None:
        yield Variant("the reference window is ignored", replace(problem, rswa_window=None))
        yield Variant(
            "the reference window counts one key too many", replace(problem, rswa_window=rswa + 1)
        )
        none = torch.zeros_like(problem.rswa_prefix_lens)
        yield Variant(
            "the prefix of the reference window is windowed too",
            replace(problem, rswa_prefix_lens=none),
        )


def _score_mistakes(problem: AttentionProblem) -> Iterator[Variant]:
    if problem.sinks is not None:
        yield Variant("the sink is dropped", replace(problem, sinks=None))
        twice = problem.sinks.double() + math.log(2.0)
        yield Variant("the sink is counted twice", replace(problem, sinks=twice))
    if problem.logits_soft_cap:
        yield Variant("the soft cap is dropped", replace(problem, logits_soft_cap=None))
    if problem.alibi_slopes is not None:
        yield Variant("ALiBi is dropped", replace(problem, alibi_slopes=None))
        other = not problem.use_alibi_sqrt
        yield Variant("the other form of ALiBi is applied", replace(problem, use_alibi_sqrt=other))
    yield Variant(
        "the softmax scale is the default one, not the given one",
        replace(problem, scale=None),
        must_show=False,
    )


def _causality_mistakes(problem: AttentionProblem) -> Iterator[Variant]:
    if problem.type_name != "decoder":
        if problem.type_name != "encoder_decoder":
            yield Variant(
                "queries look back only, as a decoder's do",
                replace(problem, attn_type="decoder", causal=True, kv_cache=None),
            )
        return
    if isinstance(problem.causal, torch.Tensor):
        yield Variant("every request is causal", replace(problem, causal=True))
        yield Variant("no request is causal", replace(problem, causal=False))
    elif not problem.causal:
        yield Variant("attention is causal though it must not be", replace(problem, causal=True))
    else:
        yield Variant(
            "queries look ahead", replace(problem, causal=False), must_show=_looks_ahead(problem)
        )
    yield Variant(
        "queries are aligned to the first keys instead of the last",
        replace(problem, query_offsets=torch.zeros_like(problem.seq_lens)),
        must_show=False,
    )


def _looks_ahead(problem: AttentionProblem) -> bool:
    """Whether a request has several tokens that no range already connects."""
    lens = problem.query_start_loc.diff()
    return bool((lens > 1).any()) and not problem.mm_req_doc_ranges


def _range_mistakes(problem: AttentionProblem) -> Iterator[Variant]:
    ranges = problem.mm_req_doc_ranges
    if not ranges:
        return
    yield Variant("the multimodal ranges are ignored", replace(problem, mm_req_doc_ranges=None))
    shorter = {
        request: [(start, end - 1) for start, end in spans] for request, spans in ranges.items()
    }
    yield Variant(
        "the last position of a range is left out", replace(problem, mm_req_doc_ranges=shorter)
    )


def _scale_mistakes(problem: AttentionProblem) -> Iterator[Variant]:
    if isinstance(problem.k_scale, torch.Tensor) and problem.uses_cache:
        yield Variant("the scale of the cached keys is lost", replace(problem, k_scale=1.0))
        yield Variant("the scale of the cached values is lost", replace(problem, v_scale=1.0))
        if problem.k_scale.numel() > 1:
            first = problem.k_scale[:1]
            yield Variant("one head's scale serves all heads", replace(problem, k_scale=first))
