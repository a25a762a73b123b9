"""Plugins that misbehave: each is reported with the way out, and none stops the others."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from attnmux.plugins import BackendInfo, FailureKind, guard

HEAD = "from attnmux.plugins import BackendInfo, hookimpl\n"
GOOD = HEAD + "@hookimpl\ndef attnmux_backends():\n    return [BackendInfo('X', 'm:X')]\n"


def answers(expression: str) -> str:
    return f"{HEAD}@hookimpl\ndef attnmux_backends():\n    return {expression}\n"


# misbehaviour -> source of the plugin, kind of failure, words of the message and of the way out
HOSTILE = {
    "raises at import": ("1 / 0", FailureKind.RAISED, "raised ZeroDivisionError", "report it"),
    "exits at import": ("raise SystemExit(3)", FailureKind.EXITED, "end the process", "report it"),
    "raises BaseException": (
        "class Odd(BaseException): pass\nraise Odd('odd')",
        FailureKind.RAISED,
        "Odd: odd",
        "ATTNMUX_DISABLE=bad",
    ),
    "is a syntax error": ("def (", FailureKind.RAISED, "SyntaxError", "report it"),
    "misses a library": (
        "import no_such_library",
        FailureKind.MISSING_LIBRARY,
        "not installed: ModuleNotFoundError: No module named 'no_such_library'",
        "pip install no_such_library",
    ),
    "library does not load": (
        "raise ImportError('libx.so: undefined symbol: _ZN3c10')",
        FailureKind.BROKEN_LIBRARY,
        "does not load: ImportError: libx.so: undefined symbol: _ZN3c10",
        "pip install --force-reinstall --no-cache-dir attnmux-bad",
    ),
    "library is not found": (
        "raise OSError('libcudart.so.12: cannot open shared object file')",
        FailureKind.UNLOADABLE_LIBRARY,
        "operating system, often a shared library that cannot be opened: OSError: libcudart",
        "LD_LIBRARY_PATH",
    ),
    "imports what moved": (
        "import attnmux.removed_module",
        FailureKind.CONTRACT,
        "does not have: ModuleNotFoundError: No module named 'attnmux.removed_module'",
        "pip install --upgrade attnmux attnmux-bad",
    ),
    "imports a name that moved": (
        "from attnmux.plugins import no_such_name",
        FailureKind.CONTRACT,
        "does not have: ImportError: cannot import name 'no_such_name'",
        "pip install --upgrade attnmux attnmux-bad",
    ),
    "states an old contract, then fails": (
        "ATTNMUX_CONTRACT = (0, 1)\nimport attnmux.removed_module",
        FailureKind.CONTRACT,
        "built for contract 0.1, needs a core that serves it; this attnmux serves contract 1.0",
        "pip install --upgrade attnmux-bad",
    ),
    "states a new contract": (
        "ATTNMUX_CONTRACT = (2, 0)\n" + GOOD,
        FailureKind.CONTRACT,
        "built for contract 2.0",
        "pip install --upgrade attnmux;",
    ),
    "states nonsense as contract": (
        "ATTNMUX_CONTRACT = '1.0'\n" + GOOD,
        FailureKind.BAD_ANSWER,
        "ATTNMUX_CONTRACT: got '1.0'; allowed: (major, minor)",
        "report it",
    ),
    "hook raises": (answers("1 / 0"), FailureKind.RAISED, "attnmux_backends raised Zero", "report"),
    "hook exits": (answers("exit(1)"), FailureKind.EXITED, "end the process", "report it"),
    "hook answers a number": (
        answers("7"),
        FailureKind.BAD_ANSWER,
        "answered 7; allowed",
        "report",
    ),
    "hook answers None": (answers("None"), FailureKind.BAD_ANSWER, "answered None", "report it"),
    "hook answers one info": (
        answers("BackendInfo('X', 'm:X')"),
        FailureKind.BAD_ANSWER,
        "allowed: a list of BackendInfo",
        "report it",
    ),
    "hook answers strings": (
        answers("['X']"),
        FailureKind.BAD_ANSWER,
        "answered 'X' in its list",
        "report it",
    ),
    "info has a bad name": (
        answers("[BackendInfo(3, 'm:X')]"),
        FailureKind.BAD_ANSWER,
        "BackendInfo.name: got 3",
        "report it",
    ),
    "info has a bad path": (
        answers("[BackendInfo('X', 'no colon')]"),
        FailureKind.BAD_ANSWER,
        "BackendInfo.class_path: got 'no colon'; allowed: 'module:Class'",
        "report it",
    ),
    "implements no hook": ("x = 1", FailureKind.BAD_HOOK, "implements no hook", "report it"),
    "hook takes a wrong argument": (
        f"{HEAD}@hookimpl\ndef attnmux_backends(nonsense):\n    return []\n",
        FailureKind.BAD_HOOK,
        "hook 'attnmux_backends'",
        "report it",
    ),
    "misspells a hook": (
        f"{HEAD}@hookimpl\ndef attnmux_backend():\n    return []\n",
        FailureKind.UNKNOWN_HOOK,
        "plugin bad implements the hook attnmux_backend, which does not exist; did you mean "
        "attnmux_backends?",
        "upgrade attnmux",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_misbehaving_plugin_is_reported_and_the_others_work(workshop, case: str) -> None:
    source, kind, message, way_out = HOSTILE[case]
    registry = workshop.registry(workshop.point("bad", source), workshop.plugin("good", {"A": ""}))
    assert registry.load("A").cls.get_name() == "A"
    (failure,) = registry.failures()
    assert failure.kind == kind
    assert message in failure.message
    assert way_out in failure.way_out
    assert (failure.origin.distribution, failure.origin.version) == ("attnmux-bad", "1.0")
    assert failure.origin.entry_point == "bad"
    assert any(entry.origin.entry_point == "bad" for entry in registry.entries())


@pytest.mark.parametrize("case", ["raises at import", "misses a library", "hook raises"])
def test_the_traceback_is_kept(workshop, case: str) -> None:
    point = workshop.point("bad", HOSTILE[case][0])
    (failure,) = workshop.registry(point).failures()
    assert f"{point.value}.py" in failure.traceback
    assert failure.traceback.startswith("Traceback")


@pytest.fixture
def waiting() -> Iterator[str]:
    """Source that waits until the test is over; the thread left behind then ends."""
    over = SimpleNamespace(yet=False)
    sys.modules["test_over"] = over  # type: ignore[assignment]
    yield "import test_over, time\nwhile not test_over.yet: time.sleep(0.01)\n"
    over.yet = True
    del sys.modules["test_over"]
    while guard._captured:
        time.sleep(0.01)


@pytest.mark.parametrize("where", ["at import", "in a hook"])
def test_a_plugin_that_hangs_is_given_up_after_the_time_limit(
    workshop, monkeypatch, waiting: str, where: str
) -> None:
    inside = f"{HEAD}@hookimpl\ndef attnmux_backends():\n" + textwrap.indent(waiting, "    ")
    monkeypatch.setenv("ATTNMUX_PLUGIN_TIMEOUT", "0.3")
    registry = workshop.registry(
        workshop.point("bad", waiting if where == "at import" else inside),
        workshop.plugin("good", {"A": ""}),
    )
    started = time.monotonic()
    assert "A" in registry.backends()
    assert time.monotonic() - started < 5
    (failure,) = registry.failures()
    assert failure.kind == FailureKind.TIMEOUT
    assert "did not answer within 0.3 s" in failure.message
    assert "ATTNMUX_PLUGIN_TIMEOUT" in failure.way_out


def test_what_a_plugin_prints_is_kept_apart_and_noted(workshop, capfd) -> None:
    source = "import sys\nprint('hello from', __name__)\nprint('oops', file=sys.stderr)\n" + GOOD
    registry = workshop.registry(workshop.point("loud", source))
    (record,) = registry.plugins()
    assert "hello from" in record.output
    assert "oops" in record.output
    assert "printed while it was loaded" in registry.backends()["X"].notes[0]
    assert capfd.readouterr() == ("", "")


def test_output_of_other_threads_is_not_captured(workshop, capsys) -> None:
    source = (
        "import threading, sys\n"
        "other = threading.Thread(target=lambda: print('from another thread'))\n"
        "other.start(); other.join()\n" + GOOD
    )
    workshop.registry(workshop.point("loud", source)).entries()
    assert capsys.readouterr().out == "from another thread\n"


def test_standard_streams_are_the_same_objects_afterwards(workshop) -> None:
    before = sys.stdout, sys.stderr
    workshop.registry(workshop.point("one", GOOD)).entries()
    assert (sys.stdout, sys.stderr) == before


def test_the_same_backend_twice_is_nothing(workshop) -> None:
    twice = answers("[BackendInfo('X', 'm:X'), BackendInfo('X', 'm:X')]")
    point = workshop.point("one", twice)
    registry = workshop.registry(point, point)
    assert [entry.name for entry in registry.entries()] == ["X"]
    assert registry.failures() == ()


def test_two_distributions_with_one_backend_name_are_a_conflict_and_none_is_chosen(
    workshop, monkeypatch
) -> None:
    points = [workshop.point(name, GOOD, dist=f"dist-{name}") for name in ("one", "two")]
    registry = workshop.registry(*points)
    (failure,) = registry.failures()
    assert failure.kind == FailureKind.CONFLICT
    assert "dist-one 1.0" in failure.message
    assert "dist-two 1.0" in failure.message
    assert "ATTNMUX_DISABLE=one or ATTNMUX_DISABLE=two" in failure.way_out
    assert not registry.backends()["X"].usable
    monkeypatch.setenv("ATTNMUX_DISABLE", "two")
    assert registry.backends()["X"].usable
    assert registry.backends()["X"].origin.distribution == "dist-one"


def test_one_distribution_that_uses_a_name_twice_is_a_conflict_too(workshop) -> None:
    source = answers("[BackendInfo('X', 'm:X'), BackendInfo('X', 'm:Y'), BackendInfo('Z', 'm:Z')]")
    registry = workshop.registry(workshop.point("one", source))
    (failure,) = registry.failures()
    assert "(m:X) and attnmux-one 1.0 (m:Y); none of them is used" in failure.message
    assert "report it to the authors of attnmux-one 1.0" in failure.way_out
    assert {name: entry.usable for name, entry in registry.backends().items()} == {
        "X": False,
        "Z": True,
    }


def test_two_distributions_with_one_entry_point_name_are_both_loaded(workshop, monkeypatch) -> None:
    registry = workshop.registry(
        workshop.plugin("same", {"A": ""}, dist="dist-a"),
        workshop.plugin("same", {"B": ""}, dist="dist-b"),
    )
    assert list(registry.backends()) == ["A", "B"]
    monkeypatch.setenv("ATTNMUX_DISABLE", "dist-b")
    assert list(registry.backends()) == ["A"]


def test_a_name_of_this_project_stays_with_it_and_the_other_is_refused(workshop) -> None:
    registry = workshop.registry(
        workshop.plugin("cpu", {"CPU_ATTN": ""}, dist="attnmux-cpu"),
        workshop.plugin("thief", {"CPU_ATTN": ""}, dist="thief-dist"),
    )
    assert registry.backends()["CPU_ATTN"].origin.distribution == "attnmux-cpu"
    assert registry.load("CPU_ATTN").cls is not None
    (failure,) = registry.failures()
    assert failure.kind == FailureKind.CONFLICT
    assert failure.origin.distribution == "thief-dist"
    assert "belongs to attnmux-cpu 1.0" in failure.message
    assert "pip uninstall thief-dist" in failure.way_out


def test_one_bad_info_leaves_the_plugins_other_backends(workshop) -> None:
    source = answers("[BackendInfo('BAD', ''), BackendInfo('FINE', 'm:X')]")
    registry = workshop.registry(workshop.point("one", source))
    assert registry.backends()["FINE"].usable
    assert {entry.name for entry in registry.entries() if entry.failure} == {"BAD"}


@pytest.mark.parametrize(
    ("contract", "upgrade"),
    [
        ((0, 9), "pip install --upgrade attnmux-one"),
        ((1, 1), "pip install --upgrade attnmux;"),
        ((2, 0), "pip install --upgrade attnmux;"),
    ],
)
def test_a_backend_of_another_contract_is_refused_and_never_imported(
    workshop, contract: tuple[int, int], upgrade: str
) -> None:
    registry = workshop.registry(
        workshop.plugin("one", {"A": ""}, info=f"contract={contract}"),
        workshop.plugin("two", {"B": ""}),
    )
    entry = registry.backends()["A"]
    loaded = registry.load("A")
    assert loaded.cls is None
    assert loaded.failure.kind == FailureKind.CONTRACT
    assert f"built for contract {contract[0]}.{contract[1]}" in loaded.failure.message
    assert upgrade in loaded.failure.way_out
    assert entry.info.class_path.partition(":")[0] not in sys.modules
    assert registry.load("B").cls is not None


# kind of failure of the backend's own module -> its source, kind, words of the message
BACKEND_MODULES = {
    "library missing": ("import no_such_lib", FailureKind.MISSING_LIBRARY, "not installed"),
    "undefined symbol": (
        "raise ImportError('undefined symbol: x')",
        FailureKind.BROKEN_LIBRARY,
        "undefined symbol: x",
    ),
    "file not found": (
        "raise OSError('libx.so: cannot open')",
        FailureKind.UNLOADABLE_LIBRARY,
        "OSError: libx.so: cannot open",
    ),
    "raises": ("raise RuntimeError('no driver')", FailureKind.RAISED, "RuntimeError: no driver"),
    "exits": ("raise SystemExit('bye')", FailureKind.EXITED, "SystemExit: bye"),
    "has no such class": ("x = 1", FailureKind.MISSING_MODULE, "has no Backend"),
    "is no backend": (
        "class Backend: pass",
        FailureKind.BAD_ANSWER,
        "subclass of AttentionBackend",
    ),
    "is abstract": (
        "from attnmux.abc.backend import AttentionBackend\nclass Backend(AttentionBackend): pass",
        FailureKind.BAD_ANSWER,
        "does not define get_builder_cls, get_impl_cls, get_name",
    ),
}


@pytest.mark.parametrize("case", BACKEND_MODULES)
def test_a_backend_module_that_fails_is_a_failure_with_the_original_text(
    workshop, case: str
) -> None:
    source, kind, message = BACKEND_MODULES[case]
    module = workshop.module(source)
    point = workshop.point("one", answers(f"[BackendInfo('X', '{module}:Backend')]"))
    loaded = workshop.registry(point).load("X")
    assert loaded.cls is None
    assert loaded.failure.kind == kind
    assert message in loaded.failure.message
    assert loaded.failure.backend == "X"


def test_a_backend_module_that_hangs_is_given_up(workshop, monkeypatch, waiting: str) -> None:
    monkeypatch.setenv("ATTNMUX_BACKEND_TIMEOUT", "0.3")
    module = workshop.module(waiting)
    point = workshop.point("one", answers(f"[BackendInfo('X', '{module}:X')]"))
    failure = workshop.registry(point).load("X").failure
    assert failure.kind == FailureKind.TIMEOUT
    assert "ATTNMUX_BACKEND_TIMEOUT" in failure.way_out


def test_a_plugin_that_asks_the_registry_while_loading_fails_at_once(workshop) -> None:
    registry = None
    keeper = SimpleNamespace(ask=lambda: registry.entries())
    sys.modules["registry_keeper"] = keeper  # type: ignore[assignment]
    try:
        point = workshop.point("one", "import registry_keeper\nregistry_keeper.ask()\n" + GOOD)
        registry = workshop.registry(point)
        (failure,) = registry.failures()
    finally:
        del sys.modules["registry_keeper"]
    assert "a plugin asked the registry while it was being loaded itself" in failure.message


def test_a_keyboard_interrupt_is_the_users(workshop) -> None:
    registry = workshop.registry(workshop.point("one", "raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        registry.entries()


@pytest.mark.parametrize("value", ["", "not a module", "a..b", "mod:", "mod:attr:more"])
def test_an_entry_point_that_names_no_module_is_a_failure(workshop, value: str) -> None:
    registry = workshop.registry(workshop.named_point("bad", value))
    (failure,) = registry.failures()
    assert failure.kind == FailureKind.BAD_ENTRY_POINT
    assert repr(value) in failure.message


def test_a_plugin_whose_module_is_gone_says_so(workshop) -> None:
    (failure,) = workshop.registry(workshop.named_point("gone", "gone_pkg.plugin")).failures()
    assert failure.kind == FailureKind.MISSING_MODULE
    assert "pip install --force-reinstall attnmux-gone" in failure.way_out


def test_damaged_metadata_does_not_stop_a_plugin(workshop) -> None:
    point = workshop.point("one", GOOD)
    broken = SimpleNamespace(name="one", value=point.value, load=point.load, dist=SimpleNamespace())
    registry = workshop.registry(broken)
    assert registry.backends()["X"].usable
    assert "metadata unreadable" in registry.plugins()[0].origin.version


def test_a_failure_can_be_written_as_json(workshop) -> None:
    (failure,) = workshop.registry(workshop.point("bad", "1 / 0")).failures()
    data = json.loads(json.dumps(failure.to_dict()))
    assert data["kind"] == "raised"
    assert data["origin"]["distribution"] == "attnmux-bad"


@pytest.mark.parametrize(
    "info",
    [
        BackendInfo("", "m:X"),
        BackendInfo("X", "m"),
        BackendInfo("X", "m:X", device_types="cpu"),  # type: ignore[arg-type]
        BackendInfo("X", "m:X", device_types=()),
        BackendInfo("X", "m:X", priority="high"),  # type: ignore[arg-type]
        BackendInfo("X", "m:X", summary=None),  # type: ignore[arg-type]
        BackendInfo("X", "m:X", contract="1.0"),  # type: ignore[arg-type]
        BackendInfo("X", "m:X", contract=(1, -1)),
        BackendInfo("X", "m:X", options=3),  # type: ignore[arg-type]
    ],
    ids=lambda info: "",
)
def test_each_bad_field_of_an_info_is_named(info: BackendInfo) -> None:
    (problem,) = info.problems()
    assert problem.startswith("BackendInfo.")
    assert "got" in problem
    assert "allowed" in problem
