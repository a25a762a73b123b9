"""Generation in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from attnmux_transformers.engine import Engine, Prompt
from attnmux_transformers.request import GenerationResult, TokenEvent
from attnmux_transformers.sampling import SamplingParams


def generate(
    model: PreTrainedModel | Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Any = None,
    on_token: Callable[[TokenEvent], None] | None = None,
    progress: bool = False,
    **engine_options: Any,
) -> list[GenerationResult]:
    """Generate from `prompts` and return their results, in their order.

    Args:
        model: A model, for which an `Engine` is made, or an engine.
        prompts: Texts or lists of tokens.
        params: For all prompts, or one for each; None is greedy, 64 tokens.
        tokenizer: Of the model; an engine has its own.
        on_token: Called with each event of `Engine.stream`. What it raises ends the generation.
        progress: Show a progress bar (transformers' own switch can turn it off).
        **engine_options: Keywords of `Engine`.

    Returns:
        One result for each prompt; a prompt that failed has its `error` set.

    Raises:
        ValueError: As `Engine` and `Engine.stream`; also when an engine comes with a tokenizer or
            options, which it would not use.
    """
    if not isinstance(model, Engine):
        model = Engine(model, tokenizer, **engine_options)
    elif tokenizer is not None or engine_options:
        given = ["tokenizer"] * (tokenizer is not None) + sorted(engine_options)
        raise ValueError(f"{', '.join(given)}: got a value; allowed: none beside an Engine")
    results: dict[int, GenerationResult] = {}
    events = model.stream(prompts, params)
    num_tokens = 0
    with logging.tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:
        for event in events:
            num_tokens += event.token_id is not None
            if on_token is not None:
                on_token(event)
            if event.result is not None:
                results[event.index] = event.result
                bar.update()
            if progress:
                bar.set_postfix(tokens=num_tokens, refresh=False)
    return [results[index] for index in range(len(prompts))]
