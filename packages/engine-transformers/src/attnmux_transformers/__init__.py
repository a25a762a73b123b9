"""Continuous-batching generation for transformers models, every attention call through attnmux."""

from __future__ import annotations

from attnmux_transformers._version import __version__
from attnmux_transformers.attention import UnsupportedModelError
from attnmux_transformers.encoder import Encoder
from attnmux_transformers.engine import Engine, Prompt
from attnmux_transformers.generate import generate
from attnmux_transformers.model_features import LayerFeatures, probe_model
from attnmux_transformers.request import GenerationResult, TokenEvent
from attnmux_transformers.sampling import SamplingParams

__all__ = [
    "Encoder",
    "Engine",
    "GenerationResult",
    "LayerFeatures",
    "Prompt",
    "SamplingParams",
    "TokenEvent",
    "UnsupportedModelError",
    "__version__",
    "generate",
    "probe_model",
]
