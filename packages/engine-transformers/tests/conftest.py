"""Small models with random weights, and the backends that the engine's tests run on."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from attnmux.plugins import BackendInfo, get_registry

# Tests are imported by path, so that a module beside them has to be made findable.
sys.path.insert(0, str(Path(__file__).parent))

from naive_backend import NAME, NaiveBackend, NaiveBuilder
from tiny_models import make_model


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    # transformers logs (it does not warn) that tiny vocabularies lack the default special tokens.
    logging.set_verbosity_error()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def naive() -> Iterator[str]:
    """The name of the test backend; nothing of it is left after the test."""
    info = BackendInfo(NAME, "naive_backend:NaiveBackend", priority=-1000, summary="for tests")
    get_registry().register(info, NaiveBackend)
    NaiveBuilder.built.clear()
    yield NAME
    get_registry().unregister(NAME)


@pytest.fixture(params=[NAME, "CPU_ATTN"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn; the real one where it is installed."""
    name: str = request.param
    if name == "CPU_ATTN" and importlib.util.find_spec("attnmux_cpu") is None:
        pytest.skip("needs the CPU backend: pip install attnmux-cpu")
    return name


@pytest.fixture(scope="session")
def model() -> Callable[[str], PreTrainedModel]:
    """Make, or return again, the tiny model of that name. Tests must not change it."""
    made: dict[str, PreTrainedModel] = {}

    def get(name: str) -> PreTrainedModel:
        if name not in made:
            made[name] = make_model(name)
        return made[name]

    return get
