"""The engine: requests share it, and what happens to one does not happen to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from naive_backend import NAME, NaiveBuilder, NaiveImpl
from tiny_models import MAX_LEN, VOCAB, eager_greedy, make_model, make_prompts
from transformers import PreTrainedModel

from attnmux_transformers import Engine, GenerationResult, SamplingParams
from attnmux_transformers.scheduler import Chunk

GREEDY = SamplingParams(max_new_tokens=6)


class LetterTokenizer:
    """A token is a letter; unlike a real one, it leaves an empty text empty."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 31 for letter in text]}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token + 31) for token in tokens)


@pytest.fixture
def llama(model: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return model("llama")


def make_engine(model: PreTrainedModel, **options: Any) -> Engine:
    return Engine(model, **{"backend": NAME, "block_size": 4, "num_blocks": 32, **options})


def run(engine: Engine, prompts: Sequence[Any], params: Any = GREEDY) -> list[GenerationResult]:
    results = [event.result for event in engine.stream(prompts, params) if event.result]
    assert engine.allocator.num_free == engine.allocator.num_blocks, "all blocks came back"
    return sorted(results, key=lambda result: result.index)


# Sharing ----------------------------------------------------------------------------------------


def test_blocks_are_used_again_and_old_contents_do_not_matter(llama: PreTrainedModel) -> None:
    engine = make_engine(llama, num_blocks=6)
    for seed in range(4):
        prompts = make_prompts([9, 3, 14], seed)
        results = run(engine, prompts)
        assert [r.token_ids for r in results] == [eager_greedy(llama, p, 6) for p in prompts]


def test_requests_that_lost_their_blocks_are_computed_again(llama: PreTrainedModel) -> None:
    engine = make_engine(llama, num_blocks=7)
    prompts = make_prompts([7, 6, 7])
    results = run(engine, prompts, SamplingParams(max_new_tokens=12))
    assert sum(result.num_preemptions for result in results) > 0
    assert [r.token_ids for r in results] == [eager_greedy(llama, p, 12) for p in prompts]


def test_more_prompts_than_run_at_once(llama: PreTrainedModel) -> None:
    prompts = make_prompts([5, 2, 8, 1, 3, 11, 4])
    results = run(make_engine(llama, max_num_seqs=2), prompts)
    assert [r.token_ids for r in results] == [eager_greedy(llama, p, 6) for p in prompts]
    assert {r.finish_reason for r in results} == {"length"}


def test_a_step_never_has_more_tokens_than_the_budget(llama: PreTrainedModel) -> None:
    engine = make_engine(llama, max_num_batched_tokens=6)
    run(engine, make_prompts([9, 3, 14]))
    sizes = [batch.num_actual_tokens for batch in NaiveBuilder.built]
    assert max(sizes) == 6


def test_metadata_is_made_anew_for_each_batch(llama: PreTrainedModel) -> None:
    """Also after an idle time, and when the next batch has another size."""
    engine = make_engine(llama)
    assert run(engine, []) == []
    assert NaiveBuilder.built == []
    run(engine, make_prompts([3, 4]), SamplingParams(max_new_tokens=1))
    run(engine, make_prompts([5]), SamplingParams(max_new_tokens=2))
    # Two layers, one builder.
    shapes = [(b.num_reqs, b.num_actual_tokens, b.max_seq_len) for b in NaiveBuilder.built]
    assert shapes == [(2, 7, 4), (1, 5, 5), (1, 1, 6)]


def test_decodes_stand_before_prefills_in_a_batch(llama: PreTrainedModel) -> None:
    engine = make_engine(llama, max_num_batched_tokens=8)
    run(engine, make_prompts([2, 12, 3]))
    for batch in NaiveBuilder.built:
        lengths = batch.query_start_loc.diff()
        assert batch.is_prefilling is not None
        decodes = ~batch.is_prefilling
        assert not (decodes[1:] & ~decodes[:-1]).any(), "no decode follows a prefill"
        assert bool((lengths[decodes] == 1).all())


def test_one_builder_serves_the_layers_that_share_a_cache_format(
    model: Callable[[str], PreTrainedModel],
) -> None:
    run(make_engine(model("gemma2")), [[5, 6]], SamplingParams(max_new_tokens=1))
    assert len(NaiveBuilder.built) == 2, "windowed layers, and the others"


# Choosing tokens --------------------------------------------------------------------------------


def test_sampled_tokens_do_not_depend_on_the_batch(llama: PreTrainedModel) -> None:
    prompts = make_prompts([5, 9, 2])
    params = [SamplingParams(8, temperature=1.5, top_k=20, top_p=0.9, seed=n) for n in range(3)]
    together = run(make_engine(llama), prompts, params)
    for index, result in enumerate(together):
        alone = run(make_engine(llama), [prompts[index]], params[index])
        assert alone[0].token_ids == result.token_ids
    again = run(make_engine(llama), prompts, [SamplingParams(8, 1.5, seed=9)] * 3)
    assert [r.token_ids for r in again] != [r.token_ids for r in together]


def test_stop_tokens_end_a_request_and_the_models_own_can_be_ignored() -> None:
    model = make_model("llama")
    prompt = make_prompts([5])[0]
    tokens = eager_greedy(model, prompt, 6)
    stop = tokens[2]
    expected = tokens[: tokens.index(stop) + 1]
    result = run(make_engine(model), [prompt], SamplingParams(6, stop_token_ids=(stop,)))[0]
    assert (result.token_ids, result.finish_reason) == (expected, "stop")
    model.generation_config.eos_token_id = [stop, VOCAB - 1]
    result = run(make_engine(model), [prompt])[0]
    assert (result.token_ids, result.finish_reason) == (expected, "stop")
    result = run(make_engine(model), [prompt], SamplingParams(6, ignore_eos=True))[0]
    assert (result.token_ids, result.finish_reason) == (tokens, "length")


# Events -----------------------------------------------------------------------------------------


def test_events_tell_every_token_once_and_end_with_the_result(llama: PreTrainedModel) -> None:
    engine = make_engine(llama, tokenizer=LetterTokenizer())
    events = list(engine.stream(["hello", "a", ""], GREEDY))
    for index in (0, 1):
        own = [event for event in events if event.index == index]
        result = own[-1].result
        assert [event.result for event in own[:-1]] == [None] * 5
        assert result is not None
        assert [event.token_id for event in own] == result.token_ids
        assert "".join(event.text for event in own) == result.text
        assert result.text == LetterTokenizer().decode(result.token_ids)
    assert [event.token_id for event in events if event.index == 2] == [None]
    order = [event.index for event in events if event.index != 2]
    assert order == [0, 1] * 6, "both grow at the same time"


def test_a_consumer_that_stops_early_leaves_nothing_behind(llama: PreTrainedModel) -> None:
    engine = make_engine(llama)
    for _event in engine.stream(make_prompts([9, 3])):
        break
    assert engine.allocator.num_free == 32
    assert llama.config._attn_implementation == "eager"
    assert len(run(engine, make_prompts([9, 3]))) == 2


def test_between_events_the_model_is_as_it_was(llama: PreTrainedModel) -> None:
    for _event in make_engine(llama).stream(make_prompts([9, 3]), GREEDY):
        assert llama.config._attn_implementation == "eager"


# Requests that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], "prompt: got no token; allowed: at least one token"),
        ("", "prompt: got an empty text; allowed: at least one token"),
        ([3, VOCAB], f"prompt: got the token {VOCAB}; allowed: tokens from 0 to {VOCAB - 1}"),
        ([-1], "prompt: got the token -1; allowed: tokens from 0 to"),
        ([1.5], "prompt: got [1.5]; allowed: a text, or a list of integers (tokens)"),
        (None, "prompt: got None; allowed: a text, or a list of integers (tokens)"),
        ([3] * 60, r"prompt: got 60 tokens, with max_new_tokens 6; allowed: prompt and answer of "
                   r"at most 49 tokens (the KV cache has 12 blocks of 4)"),
        ([3] * MAX_LEN, f"prompt: got {MAX_LEN} tokens, with max_new_tokens 6; allowed: prompt and "
                        f"answer of at most {MAX_LEN} tokens (max_model_len)"),
    ],
)  # fmt: skip
def test_a_bad_prompt_ends_with_its_error_and_the_others_go_on(
    prompt: Any, error: str, llama: PreTrainedModel
) -> None:
    engine = make_engine(llama, tokenizer=LetterTokenizer(), num_blocks=12)
    good = make_prompts([5, 8])
    first, bad, last = run(engine, [good[0], prompt, good[1]])
    assert bad.error is not None
    assert bad.error.startswith(error)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert [r.token_ids for r in (first, last)] == [eager_greedy(llama, p, 6) for p in good]


def test_a_text_without_a_tokenizer_is_an_error_of_that_prompt(llama: PreTrainedModel) -> None:
    text, tokens = run(make_engine(llama), ["hello", [5, 6]])
    assert text.error == "prompt: got a text; allowed: tokens, as the engine has no tokenizer"
    assert tokens.error is None


def test_a_step_that_fails_for_one_request_fails_only_that_one(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = make_prompts([5, 9, 3])
    attend = NaiveImpl._attend

    def fail_at_length_11(self: NaiveImpl, query: Any, keys: torch.Tensor, values: Any) -> Any:
        if len(keys) == 11:  # only the second prompt gets there: 9 tokens and its third
            raise RuntimeError("the kernel fell over")
        return attend(self, query, keys, values)

    monkeypatch.setattr(NaiveImpl, "_attend", fail_at_length_11)
    params = [SamplingParams(5), SamplingParams(8), SamplingParams(6)]
    first, bad, last = run(make_engine(llama), prompts, params)
    assert bad.error == "RuntimeError: the kernel fell over"
    assert "request 1 failed" in caplog.text
    assert "fail_at_length_11" in caplog.text, "the log has the traceback"
    assert bad.token_ids == eager_greedy(llama, prompts[1], 2), "what it had is told"
    assert first.token_ids == eager_greedy(llama, prompts[0], 5)
    assert last.token_ids == eager_greedy(llama, prompts[2], 6)


def test_logits_that_are_not_numbers_fail_only_their_request(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(llama)
    run_model = engine._runner.run

    def spoil(chunks: Sequence[Chunk]) -> list[torch.Tensor | None]:
        rows = run_model(chunks)
        return [
            torch.full_like(row, float("nan"))
            if row is not None and chunk.request.index == 0
            else row
            for chunk, row in zip(chunks, rows, strict=True)
        ]

    monkeypatch.setattr(engine._runner, "run", spoil)
    prompts = make_prompts([5, 9])
    bad, good = run(engine, prompts)
    assert bad.error == "logits: got a maximum of nan; allowed: finite numbers"
    assert good.token_ids == eager_greedy(llama, prompts[1], 6)


# Calls that fail --------------------------------------------------------------------------------


def test_wrong_calls_are_refused_by_name(llama: PreTrainedModel) -> None:
    engine = make_engine(llama)
    with pytest.raises(ValueError, match="prompts: got one text; allowed: a list of prompts"):
        engine.stream("hello")
    with pytest.raises(ValueError, match="params: got 2 params; allowed: one, or 1"):
        engine.stream([[1]], [GREEDY, GREEDY])
    events, others = engine.stream([[1]], GREEDY), engine.stream([[1]], GREEDY)
    next(events)
    with pytest.raises(ValueError, match="a second generation; allowed: one at a time"):
        next(others)
    with pytest.raises(ValueError, match="a second generation; allowed: one at a time"):
        engine.stream([[1]])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block_size": 0}, "block_size: got 0"),
        ({"num_blocks": 0}, "num_blocks: got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: got 0"),
        ({"max_model_len": 0}, "max_model_len: got 0"),
        ({"max_model_len": MAX_LEN + 1}, f"max_model_len: got {MAX_LEN + 1}; allowed: at most"),
        ({"kv_cache_dtype": "float7"}, "kv_cache_dtype not supported"),
        ({"backend": "NO_SUCH"}, "no backend of that name is installed"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    options: dict[str, Any], text: str, llama: PreTrainedModel
) -> None:
    with pytest.raises(ValueError, match=text):
        make_engine(llama, **options)


def test_the_name_of_a_model_is_refused_where_a_model_is_wanted() -> None:
    name: Any = "gpt2"
    with pytest.raises(ValueError, match="model: got 'gpt2'; allowed: a loaded model"):
        Engine(name)


def test_the_cache_is_as_large_as_needed_but_not_larger_than_its_limit(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = make_engine(llama, num_blocks=None, max_num_seqs=3, max_model_len=10)
    assert needed.allocator.num_blocks == 3 * 3
    # 2 layers of 2 heads, 8 elements of keys and of values, 4 bytes, 4 tokens: 1 KiB a block.
    monkeypatch.setattr("attnmux_transformers.engine._DEFAULT_CACHE_BYTES", 5 * 1024 + 1)
    assert make_engine(llama, num_blocks=None).allocator.num_blocks == 5


def test_the_report_names_the_layers_and_the_backend(
    model: Callable[[str], PreTrainedModel],
) -> None:
    report = make_engine(model("gemma2")).report()
    assert "1 layer: model.layers.0.self_attn" in report
    assert "1 layer: model.layers.1.self_attn" in report
    assert f"{NAME}, asked for by keyword" in report
