"""Generation in one call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from naive_backend import NAME
from tiny_models import eager_greedy, make_prompts
from transformers import PreTrainedModel

from attnmux_transformers import Engine, SamplingParams, TokenEvent, generate

GREEDY = SamplingParams(max_new_tokens=4)


def test_results_come_in_the_order_of_the_prompts(model: Callable[[str], PreTrainedModel]) -> None:
    prompts = [*make_prompts([9, 2]), [], *make_prompts([5])]
    params = [SamplingParams(6), SamplingParams(2), GREEDY, GREEDY]
    results = generate(model("llama"), prompts, params, backend=NAME, num_blocks=16)
    assert [result.index for result in results] == [0, 1, 2, 3]
    assert [len(result.token_ids) for result in results] == [6, 2, 0, 4]
    assert results[0].token_ids == eager_greedy(model("llama"), prompts[0], 6)
    assert [result.finish_reason for result in results] == ["length", "length", "error", "length"]


def test_each_event_is_handed_over(model: Callable[[str], PreTrainedModel]) -> None:
    seen: list[TokenEvent] = []
    engine = Engine(model("llama"), backend=NAME, num_blocks=16)
    results = generate(engine, make_prompts([3, 7]), GREEDY, on_token=seen.append)
    for result in results:
        assert [e.token_id for e in seen if e.index == result.index] == result.token_ids


def test_what_the_callback_raises_ends_the_generation_and_frees_the_engine(
    model: Callable[[str], PreTrainedModel],
) -> None:
    engine = Engine(model("llama"), backend=NAME, num_blocks=16)

    def stop(event: TokenEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(engine, make_prompts([3, 7]), GREEDY, on_token=stop)
    assert engine.allocator.num_free == 16
    assert generate(engine, make_prompts([3]), GREEDY)[0].error is None


@pytest.mark.parametrize("progress", [True, False])
def test_the_progress_bar_is_there_when_asked_for(
    progress: bool,
    model: Callable[[str], PreTrainedModel],
    capsys: pytest.CaptureFixture[str],
) -> None:
    generate(
        model("llama"), make_prompts([3, 7]), GREEDY, backend=NAME, num_blocks=16, progress=progress
    )
    shown = capsys.readouterr().err
    assert ("2/2" in shown) is progress
    assert ("tokens=8" in shown) is progress


def test_options_beside_an_engine_are_refused(model: Callable[[str], PreTrainedModel]) -> None:
    engine = Engine(model("llama"), backend=NAME, num_blocks=16)
    with pytest.raises(ValueError, match="tokenizer, block_size: got a value; allowed: none"):
        generate(engine, [[1]], tokenizer=object(), block_size=8)
