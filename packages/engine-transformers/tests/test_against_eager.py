"""The engine against transformers' own eager attention: same tokens, same logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from naive_backend import NAME, NaiveImpl
from tiny_models import CONFIGS, eager_greedy, eager_logits, make_prompts
from transformers import PreTrainedModel

from attnmux_transformers import Engine, SamplingParams
from attnmux_transformers.request import Request
from attnmux_transformers.scheduler import Chunk

# One token; shorter than the window; longer; more than a block of 16; longer than a chunk.
LENGTHS = [1, 4, 9, 21, 40]
NEW_TOKENS = 8
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)

# Rounding only: both sides compute in float32, in another order. A reduction here has at most 64
# terms, so it is off by at most 64 * 2**-24 of its largest term, and about ten of them follow each
# other; errors of both sides add up.
TOLERANCE = 2 * 10 * 64 * 2.0**-24


class LogitsKept:
    """An engine that remembers the logits from which each token was chosen."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.engine = Engine(model, **options)
        self.logits: dict[int, list[torch.Tensor]] = {}
        run = self.engine._runner.run

        def run_and_keep(chunks: Any) -> Any:
            results = run(chunks)
            for chunk, row in zip(chunks, results, strict=True):
                if row is not None:
                    self.logits.setdefault(chunk.request.index, []).append(row.clone())
            return results

        self.engine._runner.run = run_and_keep  # type: ignore[method-assign]

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        events = list(self.engine.stream(prompts, GREEDY))
        results = sorted((e.result for e in events if e.result), key=lambda r: r.index)
        assert [r.error for r in results] == [None] * len(prompts)
        return [r.token_ids for r in results]


def largest_error(model: PreTrainedModel, kept: LogitsKept, prompts: list[list[int]]) -> float:
    """Return the largest difference of any logit, in units of the largest logit of its row."""
    worst = 0.0
    for index, prompt in enumerate(prompts):
        rows = torch.stack(kept.logits[index])
        tokens = [*prompt, *(int(row.argmax()) for row in rows)]
        wanted = eager_logits(model, tokens[:-1])[len(prompt) - 1 :]
        error = (rows - wanted).abs().amax(-1) / wanted.abs().amax(-1)
        worst = max(worst, float(error.max()))
    return worst


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_batch_gives_the_tokens_and_logits_of_eager_attention(
    name: str, backend: str, model: Callable[[str], PreTrainedModel]
) -> None:
    prompts = make_prompts(LENGTHS)
    kept = LogitsKept(model(name), backend=backend, num_blocks=64)
    tokens = kept.greedy(prompts)
    assert largest_error(model(name), kept, prompts) < TOLERANCE
    assert tokens == [eager_greedy(model(name), prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 64])  # one token, odd pieces, a block, all
@pytest.mark.parametrize("block_size", [1, 3, 16])  # a block a token, an odd one, the usual one
def test_chunks_and_block_sizes_do_not_change_the_answer(
    block_size: int, budget: int, backend: str, model: Callable[[str], PreTrainedModel]
) -> None:
    prompts = make_prompts(LENGTHS)
    kept = LogitsKept(
        model("gemma2"),
        backend=backend,
        block_size=block_size,
        num_blocks=-(-320 // block_size),
        max_num_batched_tokens=budget,
    )
    kept.greedy(prompts)
    assert largest_error(model("gemma2"), kept, prompts) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [("mistral", "window", None), ("gemma2", "soft_cap", None), ("gemma2", "window", None),
     ("gpt_oss", "sinks", None), ("llama", "causal", False), ("gemma2", "scale", 0.25)],
)  # fmt: skip
def test_comparison_notices_a_dropped_feature(
    name: str,
    attribute: str,
    value: object,
    model: Callable[[str], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = NaiveImpl.__init__

    @functools.wraps(made)  # so that the signature stays, which says what the impl takes
    def without(self: NaiveImpl, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        setattr(self, attribute, value)

    monkeypatch.setattr(NaiveImpl, "__init__", without)
    prompts = make_prompts(LENGTHS)
    kept = LogitsKept(model(name), backend=NAME, num_blocks=64)
    kept.greedy(prompts)
    assert largest_error(model(name), kept, prompts) > 10 * TOLERANCE


def test_a_later_token_does_not_change_earlier_logits(
    backend: str, model: Callable[[str], PreTrainedModel]
) -> None:
    """Nothing sees the future, though no mask is built: the first rows stay bit for bit."""
    first, second = make_prompts([9, 4])
    changed = [*first[:-1], (first[-1] + 1) % 97]
    rows = [_all_logits(model("llama"), backend, [each, second]) for each in (first, changed)]
    assert torch.equal(rows[0][:8], rows[1][:8])
    assert not torch.equal(rows[0][8], rows[1][8])


def _all_logits(model: PreTrainedModel, backend: str, prompts: list[list[int]]) -> torch.Tensor:
    """Return the logits of every token of the first prompt, from one step over all prompts."""
    engine = Engine(model, backend=backend, num_blocks=8)
    engine._runner._keeps_logits = False  # logits of every row
    seen: list[torch.Tensor] = []
    head = model.get_output_embeddings().register_forward_hook(
        lambda _module, _inputs, output: seen.append(output[0].clone())
    )
    chunks = []
    for index, prompt in enumerate(prompts):
        request = Request(index, prompt, GREEDY, blocks=engine.allocator.take(1))
        chunks.append(Chunk(request, len(prompt)))
    with engine._switch.on():
        engine._runner.run(chunks)
    head.remove()
    return seen[0][: len(prompts[0])]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "storage", "rounding"),
    [
        # The relative rounding of what is stored, and so the scale of what the logits may lose.
        ("float16", torch.float16, 2.0**-11),
        ("bfloat16", torch.bfloat16, 2.0**-8),
        ("fp8_e4m3", torch.float8_e4m3fn, 2.0**-4),
        ("fp8_e5m2", torch.float8_e5m2, 2.0**-3),
        ("int8_per_token_head", torch.int8, 1 / 254),
    ],
)
def test_a_smaller_cache_loses_no_more_than_its_rounding(
    kv_cache_dtype: str,
    storage: torch.dtype,
    rounding: float,
    model: Callable[[str], PreTrainedModel],
) -> None:
    pytest.importorskip("attnmux_cpu", reason="needs the CPU backend: pip install attnmux-cpu")
    kept = LogitsKept(model("gemma2"), backend="CPU_ATTN", kv_cache_dtype=kv_cache_dtype)
    assert {view.dtype for view in kept.engine._runner.stack.cache.views.values()} == {storage}
    prompts = make_prompts(LENGTHS)
    kept.greedy(prompts)
    assert TOLERANCE < largest_error(model("gemma2"), kept, prompts) < 2 * rounding
