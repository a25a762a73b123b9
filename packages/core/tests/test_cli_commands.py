"""The commands list, explain and doctor: what they print, and their exit codes."""

from __future__ import annotations

import json

import importlib_metadata
import pytest
import torch
from typer.testing import CliRunner

from attnmux import cli
from attnmux.cli import main
from attnmux.plugins import Registry


def run(*arguments: str):
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def registry(workshop, monkeypatch) -> Registry:
    """Two good plugins, one without a backend, and one broken, in place of what is installed."""
    made = workshop.registry(
        workshop.plugin(
            "good",
            {"GOOD": "supports_sliding_window = classmethod(lambda cls: True)"},
            info="priority=3, summary='a good one'",
        ),
        workshop.plugin("gpu", {"GPU": ""}, info="device_types=('cuda',)"),
        workshop.point(
            "none",
            "from attnmux.plugins import hookimpl\n@hookimpl\n"
            "def attnmux_backends():\n    return []\n",
        ),
        workshop.point("broken", "import no_such_lib"),
    )
    for module in ("cli.listing", "cli.doctor", "selection"):
        monkeypatch.setattr(f"attnmux.{module}.get_registry", lambda: made)
    return made


def rows(output: str) -> dict[str, str]:
    """The lines of a table by their first word."""
    return {line.split()[0]: line for line in output.splitlines() if line.strip()}


def test_list_shows_backends_plugins_failures_and_the_way_out(registry) -> None:
    result = run("list")
    assert result.exit_code == 0
    table = rows(result.stdout)
    assert table["GOOD"].split()[1:7] == ["ready", "attnmux-good", "1.0", "cpu", "3", "1.0"]
    assert "a good one" in table["GOOD"]
    assert "ready" in table["GPU"]
    assert "a plugin that brings no backend" in table["(none)"]
    assert "failed" in table["(broken)"]
    flat = " ".join(result.stdout.split())
    assert "No module named 'no_such_lib'" in flat
    assert "-> install what provides module 'no_such_lib'" in flat
    assert "2 ready." in flat


def test_list_shows_tracebacks_when_asked(registry) -> None:
    assert "Traceback (most" not in run("list").stdout
    assert "Traceback (most recent call last)" in run("list", "--traceback").stdout


def test_list_as_json_has_everything(registry) -> None:
    data = json.loads(run("list", "--json").stdout)
    assert data["contract"] == "1.0"
    by_name = {row["name"]: row for row in data["backends"]}
    assert by_name["GOOD"]["state"] == "ready"
    assert by_name["GOOD"]["priority"] == 3
    assert by_name["GOOD"]["device_types"] == ["cpu"]
    assert by_name["broken"]["failure"]["kind"] == "missing-library"
    assert "no_such_lib" in by_name["broken"]["failure"]["traceback"]
    assert {row["name"]: row["state"] for row in data["plugins"]} == {
        "broken": "failed",
        "good": "loaded",
        "gpu": "loaded",
        "none": "loaded",
    }


def test_list_with_nothing_installed_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("attnmux.cli.listing.get_registry", lambda: Registry(lambda: []))
    assert "pip install attnmux-cpu" in run("list").stdout


def test_list_shows_options(workshop, monkeypatch) -> None:
    module = workshop.module(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass O:\n    n: int = 3\n"
    )
    made = workshop.registry(workshop.plugin("good", {"GOOD": ""}, info=f"options='{module}:O'"))
    monkeypatch.setattr("attnmux.cli.listing.get_registry", lambda: made)
    line = next(
        line
        for line in run("list", "--options").stdout.splitlines()
        if "ATTNMUX_OPT_GOOD_N" in line
    )
    assert line.split() == ["GOOD", "n", "3", "ATTNMUX_OPT_GOOD_N", "an", "integer"]
    data = json.loads(run("list", "--options", "--json").stdout)
    assert data["backends"][0]["options"][0]["variable"] == "ATTNMUX_OPT_GOOD_N"


def test_explain_a_layer(registry) -> None:
    result = run("explain", "--head-size", "64", "--sliding-window", "128")
    assert result.exit_code == 0
    assert "chosen:  GOOD, automatically" in result.stdout
    assert "sliding window" in result.stdout.splitlines()[0]
    assert "device type cpu not supported" in result.stdout


def test_explain_exits_with_1_when_nothing_fits(registry) -> None:
    result = run("explain", "--head-size", "64", "--sinks")
    assert result.exit_code == 1
    assert "attention sinks not supported" in result.stdout
    assert "no backend can serve this request" in result.stdout


def test_explain_a_forced_backend(registry) -> None:
    result = run("explain", "--head-size", "64", "--backend", "GODO")
    assert result.exit_code == 1
    assert "did you mean GOOD?" in " ".join(result.stdout.split())


# option -> field of the request and its value
OPTIONS = {
    ("--dtype", "float16"): ("dtype", "float16"),
    ("--kv-cache-dtype", "fp8"): ("kv_cache_dtype", "fp8"),
    ("--block-size", "32"): ("block_size", 32),
    ("--num-heads", "8"): ("num_heads", 8),
    ("--num-kv-heads", "2"): ("num_kv_heads", 2),
    ("--head-size-v", "32"): ("head_size_v", 32),
    ("--device", "cuda:1"): ("device", "cuda:1"),
    ("--capability", "9.0"): ("device_capability", [9, 0]),
    ("--layout", "LBNHC"): ("kv_cache_layout", "LBNHC"),
    ("--attn-type", "encoder_decoder"): ("attn_type", "encoder_decoder"),
    ("--sliding-window", "8"): ("has_sliding_window", True),
    ("--soft-cap", "30"): ("has_logits_soft_cap", True),
    ("--sinks",): ("has_sink", True),
    ("--alibi",): ("use_alibi", True),
    ("--alibi-sqrt",): ("use_alibi_sqrt", True),
    ("--mla",): ("use_mla", True),
    ("--sparse",): ("use_sparse", True),
    ("--mm-prefix",): ("use_mm_prefix", True),
    ("--non-causal",): ("use_non_causal", True),
    ("--per-request-causal",): ("use_per_request_causal", True),
    ("--rswa",): ("use_rswa", True),
    ("--lse",): ("needs_lse", True),
    ("--kv-sharing",): ("use_kv_sharing", True),
    ("--per-head-scales",): ("use_per_head_quant_scales", True),
    ("--batch-invariant",): ("use_batch_invariant", True),
    ("--dcp",): ("use_dcp", True),
    ("--pcp",): ("use_pcp", True),
    ("--kv-connector",): ("use_kv_connector", True),
    ("--adaptive-verification",): ("use_adaptive_verification", True),
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option[0])
def test_each_option_of_explain_reaches_the_request(registry, option: tuple[str, ...]) -> None:
    field, value = OPTIONS[option]
    plain = json.loads(run("explain", "--head-size", "64", "--json").stdout)["request"]
    asked = json.loads(run("explain", "--head-size", "64", "--json", *option).stdout)["request"]
    assert asked[field] == value
    assert plain[field] != value


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give --head-size N, or --config PATH"),
        (("--head-size", "0"), "head_size: got 0; allowed: an integer of at least 1"),
        (("--head-size", "64", "--dtype", "bf17"), "--dtype: got 'bf17'"),
        (("--head-size", "64", "--sliding-window", "0"), "sliding_window: got 0"),
        (("--head-size", "64", "--soft-cap", "-1"), "--soft-cap: got -1.0"),
        (("--head-size", "64", "--capability", "nine"), "--capability: got 'nine'"),
        (("--head-size", "64", "--layout", "NHD"), "kv_cache_layout: got 'NHD'"),
        (("--head-size", "64", "--device", "my gpu"), "device: got 'my gpu'"),
        (("--head-size", "64", "--num-heads", "3", "--num-kv-heads", "2"), "num_heads: got 3"),
        (("--config", "no/such/file"), "config: got no/such/file; allowed: a readable file"),
        (("--config", ".", "--head-size", "64"), "--head-size: got 64; allowed: nothing beside"),
    ],
)
def test_bad_input_of_explain_is_one_sentence_and_exit_code_2(registry, arguments, text) -> None:
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert text in result.stderr
    assert "Traceback" not in result.output


def test_an_unreadable_setting_is_one_sentence(registry, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_PLUGIN_TIMEOUT", "soon")
    result = run("list")
    assert result.exit_code == 2
    assert "error: ATTNMUX_PLUGIN_TIMEOUT: got 'soon'" in result.stderr


def test_doctor_reports_failures_and_ends_with_what_to_do(registry, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_BACKENDS", "x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.warns(UserWarning, match="ATTNMUX_BACKENDS"):
        result = run("doctor")
    assert result.exit_code == 1
    table = rows(result.stdout)
    assert "works" in table["GOOD"]
    assert "elsewhere" in table["GPU"]
    assert "FAILED" in table["broken"]
    assert "MISMATCH: nothing reads it; did you mean ATTNMUX_BACKEND?" in table["ATTNMUX_BACKENDS"]
    advice = " ".join(result.stdout.partition("WHAT TO DO")[2].split())
    assert "unset ATTNMUX_BACKENDS" in advice
    assert "pip install no_such_lib" in advice


def test_doctor_finds_nothing_wrong_where_nothing_is(workshop, monkeypatch) -> None:
    made = workshop.registry(workshop.plugin("good", {"GOOD": ""}))
    monkeypatch.setattr("attnmux.cli.doctor.get_registry", lambda: made)
    result = run("doctor")
    assert result.exit_code == 0
    assert "nothing: no problem was found" in result.stdout
    assert torch.__version__ in result.stdout
    data = json.loads(run("doctor", "--json").stdout)
    assert data["advice"] == []
    assert data["backends"][0]["state"] == "works"


def test_doctor_names_a_backend_whose_module_does_not_load(workshop, monkeypatch) -> None:
    module = workshop.module("raise ImportError('undefined symbol: q')")
    point = workshop.point(
        "bad",
        "from attnmux.plugins import BackendInfo, hookimpl\n@hookimpl\ndef attnmux_backends():\n"
        f"    return [BackendInfo('BAD', '{module}:X')]\n",
    )
    made = workshop.registry(point)
    monkeypatch.setattr("attnmux.cli.doctor.get_registry", lambda: made)
    result = run("doctor")
    assert result.exit_code == 1
    assert "undefined symbol: q" in " ".join(result.stdout.split())
    assert "pip install --force-reinstall --no-cache-dir attnmux-bad" in " ".join(
        result.stdout.split()
    )


def test_doctor_survives_an_unreadable_setting(registry, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_TRACE_PLUGINS", "perhaps")
    result = run("doctor")
    assert result.exit_code == 1
    assert "repair the setting: ATTNMUX_TRACE_PLUGINS: got 'perhaps'" in result.stdout


def test_doctor_names_settings_that_ask_for_what_is_not_there(workshop, monkeypatch) -> None:
    made = workshop.registry(workshop.plugin("good", {"GOOD": ""}))
    monkeypatch.setattr("attnmux.cli.doctor.get_registry", lambda: made)
    monkeypatch.setenv("ATTNMUX_BACKEND", "GOOD_")
    monkeypatch.setenv("ATTNMUX_OPT_GOOD_X", "1")
    monkeypatch.setenv("ATTNMUX_OPT_GOD_X", "1")
    result = run("doctor")
    assert result.exit_code == 1
    assert "MISMATCH: no usable backend" in rows(result.stdout)["ATTNMUX_BACKEND"]
    advice = " ".join(result.stdout.partition("WHAT TO DO")[2].split())
    assert "unset ATTNMUX_BACKEND, or set it to GOOD: 'GOOD_' is no usable backend" in advice
    assert "repair the setting: ATTNMUX_OPT_GOOD_X is set, but GOOD has no options" in advice
    assert "repair the setting: ATTNMUX_OPT_GOD_X is set, but no known backend" in advice


def test_doctor_marks_a_requirement_that_is_not_met(registry, monkeypatch) -> None:
    monkeypatch.setattr(
        "importlib_metadata.requires", lambda name: ["torch>=99"] if name == "attnmux" else []
    )
    result = run("doctor")
    found = importlib_metadata.version("torch")  # torch.__version__ may name its build too
    assert f"MISMATCH: attnmux needs torch>=99, found {found}" in result.stdout
    assert 'pip install "torch>=99"' in result.stdout


def test_version_names_core_and_contract() -> None:
    assert run("--version").stdout.startswith("attnmux 0.")
    assert "contract 1.0" in run("--version").stdout


def test_an_unknown_command_is_an_error() -> None:
    assert run("lisst").exit_code == 2


def test_a_command_whose_library_is_missing_says_so_and_leaves_the_others(monkeypatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "verify", ("no_such_module", "verify"))
    result = run("verify")
    assert result.exit_code == 2
    assert "attnmux verify cannot run here: No module named 'no_such_module'" in result.stderr
    assert run("--help").exit_code == 0
