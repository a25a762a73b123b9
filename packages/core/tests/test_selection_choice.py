"""Who decides, what is chosen, and what an error says."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import pickle
import sys

import pytest
import torch

from attnmux.plugins import BackendInfo, Registry
from attnmux.request import AttentionRequest
from attnmux.selection import (
    SelectionError,
    explain,
    list_backends,
    select_backend,
    use_backend,
)

REQUEST = AttentionRequest(head_size=64, dtype=torch.bfloat16)
NO_WINDOW = AttentionRequest(head_size=64, dtype=torch.bfloat16, has_sliding_window=True)
INVARIANT = AttentionRequest(head_size=64, dtype=torch.bfloat16, use_batch_invariant=True)


@pytest.fixture
def registry(workshop) -> Registry:
    return workshop.registry(
        workshop.plugin("low", {"LOW": ""}, info="priority=1"),
        workshop.plugin("high", {"HIGH": ""}, info="priority=5"),
        workshop.plugin(
            "able",
            {"ABLE": "supports_batch_invariance = classmethod(lambda cls: True)"},
            info="priority=0",
        ),
        workshop.plugin("gpu", {"GPU_ONLY": ""}, info="device_types=('cuda',)"),
    )


def rank_hook(*names: str) -> str:
    return f"@hookimpl\ndef attnmux_rank(request, candidates):\n    return {list(names)}\n"


def test_priority_decides_when_nobody_asks(registry) -> None:
    report = explain(REQUEST, registry=registry)
    assert (report.chosen, report.decided_by) == ("HIGH", "automatic")
    assert "highest priority (5) of 3" in report.decision
    assert [v.name for v in report.verdicts] == ["HIGH", "LOW", "ABLE", "GPU_ONLY"]
    assert [v.word for v in report.verdicts] == ["chosen", "eligible", "eligible", "refused"]


def test_the_name_decides_between_equal_priorities(workshop) -> None:
    registry = workshop.registry(workshop.plugin("x", {"B": "", "A": ""}))
    report = explain(REQUEST, registry=registry)
    assert report.chosen == "A"
    assert "first by name" in report.decision


def test_the_able_one_is_chosen_for_a_feature(registry) -> None:
    assert explain(INVARIANT, registry=registry).chosen == "ABLE"
    assert "the only one" in explain(INVARIANT, registry=registry).decision


def test_a_rank_of_a_plugin_beats_priority_and_is_named(workshop) -> None:
    registry = workshop.registry(
        workshop.plugin("high", {"HIGH": ""}, info="priority=5"),
        workshop.plugin("low", {"LOW": ""}, hooks=rank_hook("LOW")),
    )
    report = explain(REQUEST, registry=registry)
    assert report.chosen == "LOW"
    assert report.decision == "LOW, automatically: ranked first by attnmux-low 1.0"


def test_a_rank_that_fails_is_noted_and_priority_decides(workshop) -> None:
    registry = workshop.registry(
        workshop.plugin("a", {"A": ""}, hooks="@hookimpl\ndef attnmux_rank():\n    return 1 / 0\n")
    )
    report = explain(REQUEST, registry=registry)
    assert report.chosen == "A"
    assert "attnmux_rank raised ZeroDivisionError" in report.notes[0]
    assert "attnmux_rank raised" in str(report)


@pytest.mark.parametrize(
    ("keyword", "context", "environment", "chosen", "decided_by"),
    [
        (None, None, None, "HIGH", "automatic"),
        (None, None, "LOW", "LOW", "environment"),
        (None, "ABLE", "LOW", "ABLE", "context"),
        ("HIGH", "ABLE", "LOW", "HIGH", "keyword"),
        ("LOW", None, None, "LOW", "keyword"),
    ],
)
def test_the_strongest_wish_counts_and_is_reported(
    registry, monkeypatch, keyword, context, environment, chosen: str, decided_by: str
) -> None:
    if environment:
        monkeypatch.setenv("ATTNMUX_BACKEND", environment)

    def decide():
        report = explain(REQUEST, keyword, registry=registry)
        return report, select_backend(REQUEST, keyword, registry=registry).get_name()

    if context:
        with use_backend(context):
            report, name = decide()
    else:
        report, name = decide()
    assert (report.chosen, report.decided_by, name) == (chosen, decided_by, chosen)


def test_a_context_ends_and_nests(registry) -> None:
    def name() -> str:
        return select_backend(REQUEST, registry=registry).get_name()

    with use_backend("LOW"):
        with use_backend("ABLE"):
            assert name() == "ABLE"
        assert name() == "LOW"
    assert name() == "HIGH"


def test_a_context_belongs_to_its_thread(registry) -> None:
    with use_backend("LOW"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(select_backend, REQUEST, registry=registry).result()
    assert other.get_name() == "HIGH"


def test_a_forced_backend_that_cannot_serve_is_an_error_and_never_another(registry) -> None:
    # The first request under the same wish works, the second does not (a draft model, say).
    assert select_backend(REQUEST, "LOW", registry=registry).get_name() == "LOW"
    with pytest.raises(SelectionError) as caught:
        select_backend(INVARIANT, "LOW", registry=registry)
    text = str(caught.value)
    assert "LOW was asked for by keyword and cannot serve this request" in text
    assert "batch invariance not supported" in text
    assert "could serve it: ABLE" in text
    assert caught.value.report.chosen is None


def test_a_forced_backend_is_asked_alone(registry) -> None:
    select_backend(REQUEST, "LOW", registry=registry)
    module = registry.backends()["HIGH"].info.class_path.partition(":")[0]
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("name", "hint"),
    [("HIHG", "did you mean HIGH?"), ("low", "did you mean LOW?"), ("xyzzy", "names for device")],
)
def test_an_unknown_name_gets_the_closest_and_the_names_valid_here(registry, name, hint) -> None:
    with pytest.raises(SelectionError) as caught:
        select_backend(REQUEST, name, registry=registry)
    text = " ".join(str(caught.value).split())
    assert f"'{name}' was asked for by keyword, and no backend of that name is installed" in text
    assert hint in text
    assert "names for device cpu: ABLE, HIGH, LOW" in text


def test_a_misspelt_variable_is_an_error_that_names_the_variable(registry, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_BACKEND", "HIHG")
    with pytest.raises(SelectionError, match="by ATTNMUX_BACKEND"):
        select_backend(REQUEST, registry=registry)


def test_a_name_of_another_device_says_so_and_what_could_serve(registry) -> None:
    with pytest.raises(SelectionError) as caught:
        select_backend(REQUEST, "GPU_ONLY", registry=registry)
    assert "device type cpu not supported (got cpu; allowed: cuda)" in str(caught.value)
    assert "could serve it: ABLE, HIGH, LOW" in caught.value.report.decision


def test_nothing_fits_and_the_error_lists_every_backend_with_every_reason(registry) -> None:
    wish = AttentionRequest(
        head_size=64, dtype=torch.bfloat16, has_sliding_window=True, has_sink=True
    )
    with pytest.raises(SelectionError) as caught:
        select_backend(wish, registry=registry)
    report = explain(wish, registry=registry)
    assert str(caught.value) == str(report)
    assert {v.name for v in report.verdicts} == {"HIGH", "LOW", "ABLE", "GPU_ONLY"}
    for name in ("HIGH", "LOW", "ABLE"):
        assert list(report.verdict(name).reasons) == [
            "attention sinks not supported",
            "sliding window not supported",
        ]
        assert report.verdict(name).remedy == (
            "eligible with has_sink=False, has_sliding_window=False"
        )


def test_a_failed_plugin_is_a_row_with_its_way_out(workshop) -> None:
    registry = workshop.registry(
        workshop.point("broken", "import no_such_lib"), workshop.plugin("fine", {"A": ""})
    )
    report = explain(REQUEST, registry=registry)
    assert report.chosen == "A"
    verdict = report.verdict("broken")
    assert not verdict.eligible
    assert "No module named 'no_such_lib'" in verdict.reasons[0]
    assert "pip install no_such_lib" in verdict.remedy
    assert "Traceback" in verdict.reasons[0].traceback
    assert verdict.source == "attnmux-broken 1.0"


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("ATTNMUX_DISABLE", "high", "take it out of ATTNMUX_DISABLE"),
        ("ATTNMUX_PLUGINS", "low", "add high to ATTNMUX_PLUGINS, or unset that"),
    ],
)
def test_a_plugin_left_out_is_a_row_with_how_to_get_it_back(
    registry, monkeypatch, variable, value, remedy
) -> None:
    monkeypatch.setenv(variable, value)
    verdict = explain(REQUEST, registry=registry).verdict("high")
    assert verdict.reasons == (f"left out by {variable}",)
    assert verdict.remedy == remedy


def test_no_backend_at_all_says_what_to_install() -> None:
    with pytest.raises(SelectionError, match="pip install attnmux-cpu"):
        select_backend(REQUEST, registry=Registry(lambda: []))


def test_a_later_registration_and_a_changed_setting_are_seen(
    registry, workshop, monkeypatch
) -> None:
    assert select_backend(REQUEST, registry=registry).get_name() == "HIGH"
    path = f"{workshop.backends(NEWER='')}:NEWER"
    registry.register(BackendInfo("NEWER", path, priority=99))
    assert select_backend(REQUEST, registry=registry).get_name() == "NEWER"
    monkeypatch.setenv("ATTNMUX_DISABLE", "NEWER")
    assert select_backend(REQUEST, registry=registry).get_name() == "HIGH"
    monkeypatch.setenv("ATTNMUX_DISABLE", "NEWER,high")
    assert select_backend(REQUEST, registry=registry).get_name() == "LOW"


def test_a_repeated_request_is_answered_from_memory(workshop) -> None:
    body = """
asked = []
@classmethod
def supports_head_size(cls, head_size):
    cls.asked.append(head_size)
    return True
"""
    registry = workshop.registry(workshop.plugin("one", {"A": body}))
    for _ in range(3):
        cls = select_backend(REQUEST, registry=registry)
    assert cls.asked == [64]


def test_a_refusal_is_not_remembered(registry, workshop) -> None:
    for _ in range(2):
        with pytest.raises(SelectionError):
            select_backend(NO_WINDOW, registry=registry)
    body = "supports_sliding_window = classmethod(lambda cls: True)"
    registry.register(BackendInfo("W", f"{workshop.backends(W=body)}:W"))
    assert select_backend(NO_WINDOW, registry=registry).get_name() == "W"


@pytest.mark.parametrize("wrong", [None, {"head_size": 64}, "cpu"])
def test_a_request_that_is_none_is_refused(registry, wrong) -> None:
    with pytest.raises(ValueError, match=r"request: got .*; allowed: an AttentionRequest"):
        explain(wrong, registry=registry)
    with pytest.raises(ValueError, match=r"request: got .*; allowed: an AttentionRequest"):
        select_backend(wrong, registry=registry)


@pytest.mark.parametrize("wrong", ["", 3])
def test_a_wish_that_is_no_name_is_refused(registry, wrong) -> None:
    with pytest.raises(ValueError, match="the name of a backend"):
        explain(REQUEST, wrong, registry=registry)
    with pytest.raises(ValueError, match="the name of a backend"), use_backend(wrong):
        pass


def test_list_backends_names_the_usable_ones(registry, monkeypatch) -> None:
    assert list_backends(registry=registry) == ("ABLE", "GPU_ONLY", "HIGH", "LOW")
    monkeypatch.setenv("ATTNMUX_DISABLE", "high")
    assert list_backends(registry=registry) == ("ABLE", "GPU_ONLY", "LOW")


# The report ----------------------------------------------------------------------------------


def test_the_table_shows_each_backend_and_fits_the_page(registry) -> None:
    text = str(explain(INVARIANT, registry=registry))
    lines = text.splitlines()
    assert lines[0].startswith("request: head_size 64, bfloat16, cache auto, device cpu, batch")
    assert "chosen:  ABLE, automatically: the only one that can serve it" in lines
    by_name = {line.split()[0]: line.split() for line in lines if line}
    assert " ".join(by_name["ABLE"]) == "ABLE chosen attnmux-able 1.0 can serve it; priority 0"
    assert by_name["HIGH"][:5] == ["HIGH", "refused", "attnmux-high", "1.0", "batch"]
    assert "-> eligible with use_batch_invariant=False" in text
    assert max(map(len, lines)) <= 100


def test_the_json_has_the_same_facts(registry) -> None:
    data = json.loads(explain(INVARIANT, registry=registry).to_json())
    assert data["chosen"] == "ABLE"
    assert data["decided_by"] == "automatic"
    assert data["request"]["dtype"] == "bfloat16"
    high = next(v for v in data["verdicts"] if v["name"] == "HIGH")
    assert high["reasons"][0]["reason"] == "batch invariance not supported"
    assert high["remedy"] == "eligible with use_batch_invariant=False"
    assert high["distribution"] == "attnmux-high"


def test_reports_and_errors_cross_process_borders(registry) -> None:
    with pytest.raises(SelectionError) as caught:
        select_backend(INVARIANT, "LOW", registry=registry)
    twin = pickle.loads(pickle.dumps(caught.value))
    assert str(twin) == str(caught.value)
    reason = caught.value.report.verdict("LOW").reasons[0]
    assert copy.deepcopy(reason).remedy == reason.remedy


def test_the_report_refuses_a_name_it_does_not_know(registry) -> None:
    with pytest.raises(KeyError, match="NONE"):
        explain(REQUEST, registry=registry).verdict("NONE")
