"""One prompt on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from attnmux_transformers.sampling import Sampler, SamplingParams


@dataclass(frozen=True)
class GenerationResult:
    """What became of one prompt.

    Attributes:
        index: Its place in the list of prompts.
        prompt_token_ids: The prompt as tokens; empty if it could not be tokenised.
        token_ids: The generated tokens, a stop token included.
        text: The generated text, None without a tokenizer.
        finish_reason: "stop" (a stop token), "length" (`max_new_tokens` reached) or "error".
        error: Why it failed, None if it did not.
        num_preemptions: How often its blocks were taken for an older request, and its keys and
            values computed again.
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    error: str | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """One step of one request, as `Engine.stream` yields it.

    Attributes:
        index: The request's place in the list of prompts.
        token_id: The token that was chosen; None in the event of a request that failed.
        text: The text that became readable with it, "" if none did or without a tokenizer.
        result: The whole result, with the request's last event; None before.
    """

    index: int
    token_id: int | None
    text: str = ""
    result: GenerationResult | None = None


@dataclass(eq=False)
class Request:
    """The state of a prompt while it is worked on.

    Attributes:
        index: Its place in the list of prompts.
        prompt: The prompt's tokens, at least one.
        params: How its tokens are chosen.
        output: Tokens chosen so far.
        blocks: Blocks of the KV cache that it holds, in the order of its positions.
        num_computed: How many of its tokens have their keys and values in those blocks.
    """

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_preemptions: int = 0
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        """Start its random numbers."""
        self.sampler = Sampler(self.params)

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.prompt) + len(self.output)

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are still to be computed; at least 1 until it ends."""
        return self.num_tokens - self.num_computed

    @property
    def max_num_tokens(self) -> int:
        """The most positions it can ever need in the cache.

        The last token is chosen, but never computed, hence the 1.
        """
        return len(self.prompt) + self.params.max_new_tokens - 1

    def pending(self, count: int) -> list[int]:
        """Return the next `count` tokens to compute."""
        tokens = [*self.prompt, *self.output]
        return tokens[self.num_computed : self.num_computed + count]
