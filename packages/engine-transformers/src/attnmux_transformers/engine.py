"""The engine: a model, its paged cache, and the loop that generates."""

from __future__ import annotations

import logging
import operator
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from attnmux.checks import bad_argument, check_positive
from attnmux_transformers.attention import AttentionSwitch
from attnmux_transformers.block_allocator import BlockAllocator
from attnmux_transformers.detokenizer import Detokenizer
from attnmux_transformers.layer_plans import LayerPlan, describe_plans, plan_layers
from attnmux_transformers.layers import LayerStack
from attnmux_transformers.model_features import probe_model
from attnmux_transformers.model_limits import eos_tokens, longest_request, vocabulary_size
from attnmux_transformers.model_runner import ModelRunner
from attnmux_transformers.request import GenerationResult, Request, TokenEvent
from attnmux_transformers.sampling import SamplingParams
from attnmux_transformers.scheduler import Chunk, Scheduler

Prompt: TypeAlias = "str | Sequence[int]"
"""A text, for which the engine needs a tokenizer, or its tokens."""

_log = logging.getLogger(__name__)

_DEFAULT_CACHE_BYTES = 1 << 29


class Engine:
    """Generates from many prompts at once, every attention call through attnmux.

    While it generates, the model's attention implementation is attnmux; before and after, it is
    what it was. One generation runs at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        kv_cache_dtype: str = "auto",
        backend: str | None = None,
    ) -> None:
        """Look at the model's layers, choose their backends and allocate the cache.

        Args:
            model: A causal language model of transformers, in evaluation mode.
            tokenizer: Its tokenizer; None if prompts come as tokens and no text is wanted.
            block_size: Tokens in a block of the cache.
            num_blocks: Blocks of the cache, each with room in all layers. None: enough for
                `max_num_seqs` requests of `max_model_len`, but not more than 512 MiB.
            max_model_len: Longest request in tokens, prompt and answer. None: what the model's
                configuration says.
            max_num_seqs: Most requests that run at once.
            max_num_batched_tokens: Most tokens in one step; longer prompts are computed in chunks.
            kv_cache_dtype: Name of the cache dtype.
            backend: Name of the attention backend; None lets selection decide.

        Raises:
            UnsupportedModelError: The model's attention cannot go through the contract, or no
                backend can serve it; the text lists why.
            ValueError: An argument is out of range; the text names it.
        """
        check_positive("block_size", block_size)
        check_positive("max_num_seqs", max_num_seqs)
        check_positive("max_num_batched_tokens", max_num_batched_tokens)
        self.model = model
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.plans = plan_layers(
            probe_model(model),
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            device=model.device,
            backend=backend,
        )
        # After the model was looked at: one that cannot run here needs no advice about lengths.
        self.max_model_len = longest_request(model, max_model_len)
        if num_blocks is None:
            num_blocks = _default_num_blocks(self.plans, self.max_model_len, max_num_seqs)
        self.allocator = BlockAllocator(num_blocks)
        stack = LayerStack(
            self.plans,
            num_blocks=num_blocks,
            device=model.device,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self._switch = AttentionSwitch(model)
        self._runner = ModelRunner(model, stack, block_size)
        self._vocab_size = vocabulary_size(model)
        self._eos = eos_tokens(model)
        self._busy = False

    def report(self) -> str:
        """Return selection's report for each kind of layer, as text."""
        return describe_plans(self.plans)

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TokenEvent]:
        """Generate, and yield each token when it is chosen.

        Args:
            prompts: Any number, each with at least one token.
            params: For all prompts, or one for each; None is greedy, 64 tokens.

        Yields:
            An event for each token, and one for a request that fails. The last event of a request
            carries its result. A request that cannot run (an empty prompt, one that is too long, a
            token outside the vocabulary), or whose step fails, ends with an error in its result;
            the others go on.

        Raises:
            ValueError: `prompts` is not a list, the number of params differs from it, or the engine
                is already generating.
        """
        if isinstance(prompts, str):
            raise bad_argument("prompts", "one text", "a list of prompts")
        if isinstance(params, Sequence):
            each = list(params)
        else:
            each = [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise bad_argument("params", f"{len(each)} params", f"one, or {len(prompts)}")
        self._check_idle()
        return self._stream(list(prompts), each)

    def _stream(self, prompts: list[Prompt], params: list[SamplingParams]) -> Iterator[TokenEvent]:
        self._check_idle()  # again: two may have been asked for before one began
        scheduler = Scheduler(
            self.allocator, self.block_size, self.max_num_batched_tokens, self.max_num_seqs
        )
        texts = [Detokenizer(self.tokenizer) for _ in prompts]
        self._busy = True
        try:
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
                tokens: list[int] = []
                try:
                    tokens = self._tokens(prompt)
                    request = Request(index, tokens, each)
                    self._check_length(request)
                    scheduler.add(request)
                except ValueError as error:
                    yield self._failure(Request(index, tokens, each), texts[index], error)
            while scheduler.has_work:
                # Only around the step: whoever consumes the events may call the model meanwhile.
                with self._switch.on():
                    outcomes = self._step(scheduler)
                for request, outcome in outcomes:
                    text = texts[request.index]
                    if isinstance(outcome, Exception):
                        yield self._failure(request, text, outcome)
                    else:
                        yield self._event(request, outcome, text, scheduler)
        finally:
            # Also when the consumer stops early: no block stays taken.
            for request in [*scheduler.running, *scheduler.waiting]:
                scheduler.finish(request)
            self._busy = False

    def _check_idle(self) -> None:
        if self._busy:
            raise bad_argument("stream", "a second generation", "one at a time on an engine")

    def _step(self, scheduler: Scheduler) -> list[tuple[Request, int | Exception]]:
        """Run one step; return, for each request that got on, its token or what went wrong."""
        outcomes: list[tuple[Request, int | Exception]] = []
        for chunk, result in self._run(scheduler.schedule()):
            request = chunk.request
            outcome: int | Exception | None = None
            if isinstance(result, Exception):
                outcome = result
            else:
                request.num_computed += chunk.num_tokens
                if result is not None:
                    try:
                        outcome = request.sampler.choose(result)
                    except ValueError as error:
                        outcome = error
            if isinstance(outcome, Exception):
                scheduler.finish(request)
            if outcome is not None:
                outcomes.append((request, outcome))
        return outcomes

    def _run(self, chunks: list[Chunk]) -> list[tuple[Chunk, torch.Tensor | Exception | None]]:
        """Run the chunks together, or each alone if that fails, so that only the culprit fails.

        Running again is safe: the same keys and values go to the same places.
        """
        try:
            return list(zip(chunks, self._runner.run(chunks), strict=True))
        except Exception as error:
            if len(chunks) == 1:
                _log.error("request %d failed", chunks[0].request.index, exc_info=error)
                return [(chunks[0], error)]
            return [outcome for chunk in chunks for outcome in self._run([chunk])]

    def _event(
        self, request: Request, token: int, text: Detokenizer, scheduler: Scheduler
    ) -> TokenEvent:
        request.output.append(token)
        stops = token in request.params.stop_token_ids or (
            token in self._eos and not request.params.ignore_eos
        )
        full = len(request.output) == request.params.max_new_tokens
        piece = text.add(token, last=stops or full)
        if not (stops or full):
            return TokenEvent(request.index, token, piece)
        scheduler.finish(request)
        result = GenerationResult(
            index=request.index,
            prompt_token_ids=list(request.prompt),
            token_ids=list(request.output),
            text=None if self.tokenizer is None else text.text,
            finish_reason="stop" if stops else "length",
            num_preemptions=request.num_preemptions,
        )
        return TokenEvent(request.index, token, piece, result)

    def _failure(self, request: Request, text: Detokenizer, error: Exception) -> TokenEvent:
        # A ValueError says all in its text; others need their type beside it.
        told = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        result = GenerationResult(
            index=request.index,
            prompt_token_ids=list(request.prompt),
            token_ids=list(request.output),
            text=None if self.tokenizer is None else text.text,
            finish_reason="error",
            error=told,
            num_preemptions=request.num_preemptions,
        )
        return TokenEvent(request.index, None, result=result)

    def _tokens(self, prompt: Prompt) -> list[int]:
        given: Sequence[Any] = prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise bad_argument("prompt", "a text", "tokens, as the engine has no tokenizer")
            # Even where a tokenizer would put a first token of its own: nothing was asked.
            if not prompt:
                raise bad_argument("prompt", "an empty text", "at least one token")
            given = self.tokenizer(prompt)["input_ids"]
        try:
            tokens = [operator.index(token) for token in given]
        except TypeError:
            allowed = "a text, or a list of integers (tokens)"
            raise bad_argument("prompt", reprlib.repr(prompt), allowed) from None
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                allowed = f"tokens from 0 to {self._vocab_size - 1}"
                raise bad_argument("prompt", f"the token {token}", allowed)
        if not tokens:
            raise bad_argument("prompt", "no token", "at least one token")
        return tokens

    def _check_length(self, request: Request) -> None:
        wanted = len(request.prompt) + request.params.max_new_tokens
        if wanted > self.max_model_len:
            raise bad_argument(
                "prompt",
                f"{len(request.prompt)} tokens, with max_new_tokens "
                f"{request.params.max_new_tokens}",
                f"prompt and answer of at most {self.max_model_len} tokens (max_model_len)",
            )


def _default_num_blocks(plans: Sequence[LayerPlan], max_model_len: int, max_num_seqs: int) -> int:
    block_bytes = sum(plan.spec.page_size_bytes for plan in plans)
    block_size = plans[0].spec.block_size
    all_requests = max_num_seqs * -(-max_model_len // block_size)
    return max(1, min(all_requests, _DEFAULT_CACHE_BYTES // block_bytes))
