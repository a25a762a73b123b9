"""Ten plugins that misbehave, each installed beside a good one: nobody else is hurt by them.

`tests/hostile/` has a folder for each; its README says what must happen. The good one is
HELLO_ATTN of docs/examples/hello-backend, with the CPU backend where that is installed.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = ROOT / "tests" / "hostile"
HELLO = ROOT / "docs" / "examples" / "hello-backend"
GOOD = {"HELLO_ATTN", "CPU_ATTN"}

# Writes to a file, not to stdout: the plugin that prints would be read as the answer.
PROBE = """
import json, sys
import torch
import attnmux

request = attnmux.AttentionRequest(head_size=64, dtype=torch.float32, block_size=16)
report = attnmux.explain(request)
answer = {
    "listed": attnmux.list_backends(),
    "selected": attnmux.select_backend(request).get_name(),
    "report": report.to_dict(),
    "text": str(report),
    "imported": [name for name in sys.modules if name.startswith("hostile_")],
}
with open(sys.argv[1], "w") as file:
    json.dump(answer, file)
"""
COMMAND = "from attnmux.cli import main; main()"


@dataclass(frozen=True)
class Refusal:
    """One row of the report: who, and words that its reasons and its way out must hold."""

    name: str
    why: tuple[str, ...]
    way_out: str


REFUSALS = {
    "raises_at_import": [
        Refusal(
            "raises_at_import",
            ("RuntimeError: the driver of the quantum card is asleep",),
            "ATTNMUX_DISABLE=raises_at_import",
        )
    ],
    "hangs": [
        Refusal("hangs", ("did not answer within 1 s",), "ATTNMUX_PLUGIN_TIMEOUT=SECONDS"),
    ],
    "returns_garbage": [
        Refusal("NOWHERE_ATTN", ("'not a path at all'",), "ATTNMUX_DISABLE=returns_garbage"),
        Refusal("NO_CLASS_ATTN", ("hookimpl", "subclass of AttentionBackend"), "report it"),
    ],
    "registers_twice": [
        Refusal(
            "TORN_ATTN",
            ("TwiceBackend", "OtherBackend"),
            "authors of attnmux-hostile-registers-twice 6.6.6",
        ),
    ],
    "takes_builtin_name": [
        Refusal(
            "CPU_ATTN",
            ("belongs to attnmux-cpu", "attnmux-hostile-takes-builtin-name 6.6.6"),
            "pip uninstall attnmux-hostile-takes-builtin-name",
        )
    ],
    "misses_library": [
        Refusal(
            "LIBRARYLESS_ATTN",
            ("needs a library that is not installed", "flux_capacitor_kernels"),
            "pip install flux_capacitor_kernels",
        )
    ],
    "wrong_contract": [
        Refusal("FUTURE_ATTN", ("contract 99.0", "1.0"), "pip install --upgrade attnmux"),
        Refusal(
            "PAST_ATTN",
            ("contract 0.1", "1.0"),
            "pip install --upgrade attnmux-hostile-wrong-contract",
        ),
    ],
    "throws_in_supports": [
        Refusal(
            "THROWING_ATTN",
            ("ZeroDivisionError",),
            "attnmux-hostile-throws-in-supports",
        )
    ],
    "lies_about_feature": [],
    "prints_at_import": [],
}
"""For each folder, what the report must say. The last two cannot be known without being run."""

# What each plugin imports at most: whoever is refused beforehand must never be imported.
NEVER_IMPORTED = ("hostile_takes_builtin_name.backend", "hostile_wrong_contract.backend")

SERVES = {
    "registers_twice": "TWICE_ATTN",
    "lies_about_feature": "LYING_ATTN",
    "prints_at_import": "LOUD_ATTN",
}
"""Backends of hostile plugins that work all the same, or that nobody can refuse beforehand."""


@pytest.fixture(scope="module")
def folders(unpack_plugins: Callable[..., dict[str, Path]]) -> dict[str, Path]:
    return unpack_plugins(HELLO, *(HOSTILE / name for name in sorted(REFUSALS)))


@pytest.fixture(scope="module")
def probe(
    folders: dict[str, Path],
    run_with_plugins: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., dict[str, Any]]:
    """Select in a fresh process that has hello and these plugins; one process for each set."""
    answers: dict[tuple[str, ...], dict[str, Any]] = {}

    def ask(*names: str) -> dict[str, Any]:
        if names not in answers:
            answer = tmp_path_factory.mktemp("answer") / "answer.json"
            done = run_with_plugins(
                "-c",
                PROBE,
                str(answer),
                plugins=[folders["hello-backend"], *(folders[name] for name in names)],
                ATTNMUX_PLUGIN_TIMEOUT="1",
            )
            assert done.returncode == 0, done.stderr
            answers[names] = json.loads(answer.read_text()) | {"stdout": done.stdout}
        return answers[names]

    return ask


def rows_of(answer: dict[str, Any], name: str, folder: str) -> list[dict[str, Any]]:
    distribution = f"attnmux-hostile-{folder.replace('_', '-')}"
    return [
        row
        for row in answer["report"]["verdicts"]
        if row["name"] == name and row["distribution"] == distribution
    ]


def test_each_folder_is_a_plugin_with_a_line_that_says_what_must_happen() -> None:
    assert sorted(path.name for path in HOSTILE.iterdir()) == sorted(REFUSALS)
    for name in REFUSALS:
        lines = (HOSTILE / name / "README.md").read_text().splitlines()
        assert len(lines) == 3, name
        project = tomllib.loads((HOSTILE / name / "pyproject.toml").read_text())["project"]
        assert name in project["entry-points"]["attnmux.backends"]


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_a_good_backend_is_still_chosen(name: str, probe: Callable[..., dict[str, Any]]) -> None:
    answer = probe(name)
    assert answer["selected"] in GOOD
    assert "HELLO_ATTN" in answer["listed"]
    rows = [row for row in answer["report"]["verdicts"] if row["name"] == "HELLO_ATTN"]
    assert [row["eligible"] for row in rows] == [True]


@pytest.mark.parametrize(
    ("folder", "refusal"),
    [(folder, refusal) for folder, rows in REFUSALS.items() for refusal in rows],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_report_says_what_is_wrong_and_the_way_out(
    folder: str, refusal: Refusal, probe: Callable[..., dict[str, Any]]
) -> None:
    answer = probe(folder)
    [row] = rows_of(answer, refusal.name, folder)
    assert row["verdict"] == "refused"
    assert row["version"] == "6.6.6"
    reasons = " ".join(reason["reason"] for reason in row["reasons"])
    for words in refusal.why:
        assert words in reasons
    assert refusal.way_out in row["remedy"]
    assert refusal.name in answer["text"]


@pytest.mark.parametrize(
    ("folder", "error"),
    [
        ("raises_at_import", "RuntimeError"),
        ("misses_library", "ModuleNotFoundError"),
        ("throws_in_supports", "ZeroDivisionError"),
    ],
)
def test_the_traceback_is_kept(
    folder: str, error: str, probe: Callable[..., dict[str, Any]]
) -> None:
    refusal = REFUSALS[folder][0]
    [row] = rows_of(probe(folder), refusal.name, folder)
    traceback = row["reasons"][0]["traceback"]
    assert traceback.startswith("Traceback (most recent call last)")
    assert f"hostile_{folder}" in traceback
    assert error in traceback.splitlines()[-1]


@pytest.mark.parametrize(("folder", "name"), SERVES.items())
def test_what_works_in_them_is_listed_once_and_eligible(
    folder: str, name: str, probe: Callable[..., dict[str, Any]]
) -> None:
    answer = probe(folder)
    assert answer["listed"].count(name) == 1
    [row] = rows_of(answer, name, folder)
    assert row["eligible"]


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_the_listing_is_clean_json_that_names_the_plugin(
    name: str,
    folders: dict[str, Path],
    run_with_plugins: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_with_plugins(
        "-c",
        COMMAND,
        "list",
        "--json",
        plugins=[folders["hello-backend"], folders[name]],
        ATTNMUX_PLUGIN_TIMEOUT="1",
    )
    assert done.returncode == 0, done.stderr
    listing = json.loads(done.stdout)
    assert f"attnmux-hostile-{name.replace('_', '-')}" in json.dumps(listing)
    assert "HELLO_ATTN" in json.dumps(listing)


def test_all_ten_together_break_nobody(probe: Callable[..., dict[str, Any]]) -> None:
    answer = probe(*sorted(REFUSALS))
    assert answer["selected"] in GOOD
    for folder, refusals in REFUSALS.items():
        for refusal in refusals:
            [row] = rows_of(answer, refusal.name, folder)
            assert row["verdict"] == "refused"
    for name in SERVES.values():
        assert name in answer["listed"]
    assert not set(NEVER_IMPORTED) & set(answer["imported"])


def test_doctor_advises_on_every_plugin_that_fails_without_a_request(
    folders: dict[str, Path],
    run_with_plugins: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_with_plugins(
        "-c",
        COMMAND,
        "doctor",
        "--json",
        plugins=[folders["hello-backend"], *(folders[name] for name in REFUSALS)],
        ATTNMUX_PLUGIN_TIMEOUT="1",
    )
    assert done.returncode == 1, done.stderr
    advice = json.loads(done.stdout)["advice"]
    silent_until_asked = {"throws_in_supports", *(set(SERVES) - {"registers_twice"})}
    for folder in REFUSALS:
        named = f"attnmux-hostile-{folder.replace('_', '-')} 6.6.6: "
        told = any(line.startswith(named) for line in advice)
        assert told is (folder not in silent_until_asked), folder


def test_garbage_reaches_neither_the_order_nor_the_list(
    probe: Callable[..., dict[str, Any]],
) -> None:
    answer = probe("returns_garbage")
    assert "THE_BEST_ATTN" not in answer["listed"]
    [note] = answer["report"]["notes"]
    assert "attnmux_rank: named 'THE_BEST_ATTN'; allowed: the candidates" in note
    assert "attnmux-hostile-returns-garbage 6.6.6" in note


def test_each_bad_answer_is_a_failure_of_its_hook(
    folders: dict[str, Path],
    run_with_plugins: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    plugins = [folders["returns_garbage"]]
    done = run_with_plugins("-c", COMMAND, "list", "--json", plugins=plugins)
    [plugin] = [p for p in json.loads(done.stdout)["plugins"] if p["name"] == "returns_garbage"]
    assert plugin["state"] == "problems"
    told = [failure["message"] for failure in plugin["failures"]]
    for words in (
        "attnmux_backends: answered 'CPU_ATTN' in its list",
        "attnmux_backends: answered 42 in its list",
        "attnmux_backends: answered None in its list",
        "attnmux_backends: BackendInfo.name: got ''",
        "attnmux_backends: BackendInfo.class_path: got 'not a path at all'",
        "attnmux_kv_cache_dtypes: answered 'float3' in its list",
    ):
        assert sum(message.startswith(words) for message in told) == 1, words
    assert all(failure["way_out"] for failure in plugin["failures"])


def test_the_liar_is_caught_by_the_conformance_kit(
    folders: dict[str, Path],
    run_with_plugins: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    plugins = [folders["hello-backend"], folders["lies_about_feature"]]
    done = run_with_plugins(
        "-c", COMMAND, "verify", "--backend", "LYING_ATTN", "--json", plugins=plugins
    )
    assert done.returncode == 1, done.stderr
    [report] = json.loads(done.stdout)
    failed = [outcome for outcome in report["outcomes"] if outcome["state"] == "FAILED"]
    assert failed
    assert all("window" in outcome["name"] for outcome in failed)
    assert any("the sliding window is ignored" in json.dumps(outcome) for outcome in failed)
