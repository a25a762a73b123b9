"""Encoders: sequences of different lengths in one row, each as if it were alone."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, make_model, make_prompts
from transformers import AlbertConfig, AutoModel, BertConfig, PreTrainedConfig, PreTrainedModel

from attnmux_transformers import Encoder, Engine, UnsupportedModelError

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
CONFIGS = {
    "bert": BertConfig(**SIZES),
    # three layers that are one module, called three times
    "albert": AlbertConfig(**SIZES, embedding_size=16),
}

# As in test_against_eager.py, for three layers; the states are normalised to about 1.
TOLERANCE = 2 * 15 * 64 * 2.0**-24


def make_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_states_agree_with_the_models_own_attention(name: str, backend: str) -> None:
    model = make_encoder(CONFIGS[name])
    sequences = make_prompts([1, 7, 64, 18])
    states = Encoder(model, backend=backend).hidden_states(sequences)
    assert model.config._attn_implementation == "eager"
    for sequence, got in zip(sequences, states, strict=True):
        with torch.inference_mode():
            wanted = model(input_ids=torch.tensor([sequence])).last_hidden_state[0]
        assert float((got - wanted).abs().max()) < TOLERANCE * float(wanted.abs().max())


def test_every_token_sees_the_last_one(naive: str) -> None:
    encoder = Encoder(make_encoder(CONFIGS["bert"]), backend=naive)
    sequence = make_prompts([9])[0]
    changed = [*sequence[:-1], (sequence[-1] + 1) % VOCAB]
    first, second = encoder.hidden_states([sequence, changed])
    assert bool(((first - second).abs().amax(dim=1) > 1e-3).all())


def test_a_decoder_is_no_encoder_and_an_encoder_no_decoder(naive: str) -> None:
    with pytest.raises(UnsupportedModelError, match="its mask is causal, where both ways is"):
        Encoder(make_model("llama"), backend=naive)
    with pytest.raises(UnsupportedModelError, match="its mask is both ways, where causal is"):
        Engine(make_encoder(CONFIGS["bert"]), backend=naive)


@pytest.mark.parametrize(
    ("sequences", "text"),
    [
        ([], r"sequences: got lengths \[\]; allowed: one or more sequences of 1 to 64 tokens"),
        ([[3], []], r"sequences: got lengths \[1, 0\]"),
        ([[3] * 65], r"sequences: got lengths \[65\]"),
        ([[VOCAB]], f"sequences: got tokens up to {VOCAB}; allowed: tokens from 0 to {VOCAB - 1}"),
    ],
)
def test_bad_sequences_are_refused(sequences: list[list[int]], text: str, naive: str) -> None:
    encoder = Encoder(make_encoder(CONFIGS["bert"]), backend=naive)
    with pytest.raises(ValueError, match=text):
        encoder.hidden_states(sequences)


def test_the_report_names_the_kind_of_attention(naive: str) -> None:
    report = Encoder(make_encoder(CONFIGS["bert"]), backend=naive).report()
    assert "3 layers: encoder.layer.0.attention.self … " in report
    assert "type encoder_only" in report
    assert "no cache" in report
