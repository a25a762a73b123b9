"""Six real models, explained: which backend of the CPU distribution serves each kind of layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnmux.cli import main

MODELS = Path(__file__).parent / "data" / "models"

# model -> for each kind of layer: how many, head size, query and KV heads, features, backend
EXPECTED = {
    "Llama-3-8B": [(32, 128, 32, 8, set(), "CPU_ATTN")],
    "Gemma-2-9b": [
        (21, 256, 16, 8, {"has_sliding_window", "has_logits_soft_cap"}, "CPU_ATTN"),
        (21, 256, 16, 8, {"has_logits_soft_cap"}, "CPU_ATTN"),
    ],
    "GPT-OSS-20b": [
        (12, 64, 64, 8, {"has_sliding_window", "has_sink"}, "CPU_ATTN"),
        (12, 64, 64, 8, {"has_sink"}, "CPU_ATTN"),
    ],
    "DeepSeek-V3": [(61, 576, 128, 1, {"use_mla"}, "CPU_MLA")],
    "Qwen3-8B": [(36, 128, 32, 8, set(), "CPU_ATTN")],
    "all-MiniLM-L6-v2": [(6, 32, 12, 12, set(), "CPU_ATTN")],
}


def explained(name: str, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        main, ["explain", "--config", str(MODELS / f"{name}.json"), *options]
    )
    return result.exit_code, result.stdout


def test_every_model_of_the_folder_is_expected() -> None:
    assert {path.stem for path in MODELS.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_kind_of_layer_is_served(name: str) -> None:
    code, output = explained(name, "--json")
    assert code == 0
    found = []
    for kind in json.loads(output)["kinds"]:
        request = kind["report"]["request"]
        features = {field for field, value in request.items() if value is True}
        found.append(
            (
                len(kind["layers"]),
                request["head_size"],
                request["num_heads"],
                request["num_kv_heads"],
                features,
                kind["report"]["chosen"],
            )
        )
    assert found == EXPECTED[name]


def test_the_text_names_each_kind_and_who_serves_it() -> None:
    code, output = explained("GPT-OSS-20b")
    assert code == 0
    summary = output.split("\n\n")[1].splitlines()
    assert summary[0].split() == ["KIND", "OF", "LAYER", "LAYERS", "SERVED", "BY", "WHY"]
    assert summary[1].startswith("sliding window of 128 tokens  12      CPU_ATTN")
    assert summary[2].startswith("full attention                12      CPU_ATTN")


def test_a_model_that_a_forced_backend_cannot_serve_is_told_why() -> None:
    code, output = explained("DeepSeek-V3", "--backend", "CPU_ATTN")
    assert code == 1
    assert "NOTHING" in output
    assert "MLA not supported" in output
    assert "could serve it: CPU_MLA" in " ".join(output.split())
