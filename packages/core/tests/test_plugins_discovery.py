"""Good plugins: found once, in every process, by one list, with nothing heavy imported."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest

from attnmux import list_backends
from attnmux.plugins import BackendInfo, Registry

COUNTING = """
import pathlib
from attnmux.plugins import BackendInfo, hookimpl
calls = []
@hookimpl
def attnmux_backends():
    calls.append(1)
    return [BackendInfo("COUNTED", "no_such_module:X")]
"""


def test_one_plugin_brings_several_backends_and_two_plugins_are_both_listed(workshop) -> None:
    registry = workshop.registry(
        workshop.plugin("one", {"A1": "", "A2": "", "A3": ""}), workshop.plugin("two", {"B1": ""})
    )
    assert list(registry.backends()) == ["A1", "A2", "A3", "B1"]
    assert registry.failures() == ()
    assert [record.state for record in registry.plugins()] == ["loaded", "loaded"]


def test_an_entry_knows_its_distribution_and_version(workshop) -> None:
    entry = workshop.registry(workshop.plugin("one", {"A": ""})).backends()["A"]
    assert (entry.origin.distribution, entry.origin.version) == ("attnmux-one", "1.0")


def test_discovery_from_eight_threads_and_three_times_calls_the_hook_once(workshop) -> None:
    point = workshop.point("counted", COUNTING)
    registry = workshop.registry(point)
    start = threading.Barrier(8)
    seen = []

    def look() -> None:
        start.wait()
        seen.append(list(registry.backends()))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(3):
        registry.backends()
    assert seen == [["COUNTED"]] * 8
    assert len(sys.modules[point.value].calls) == 1


def test_a_backend_module_is_imported_when_asked_for_and_not_before(workshop) -> None:
    point = workshop.plugin("one", {"A": ""})
    registry = workshop.registry(point)
    module = registry.backends()["A"].info.class_path.partition(":")[0]
    assert module not in sys.modules
    assert registry.load("A").cls.get_name() == "A"
    assert module in sys.modules


def test_making_a_registry_looks_for_nothing() -> None:
    def source() -> list[object]:
        raise AssertionError("looked for plugins")

    Registry(source)


@pytest.mark.parametrize(
    ("variable", "value", "imported"),
    [
        ("ATTNMUX_PLUGINS", "one", {"one"}),
        ("ATTNMUX_PLUGINS", "", set()),
        ("ATTNMUX_PLUGINS", "Attnmux_Two", {"two"}),  # a distribution's name, any spelling
        ("ATTNMUX_DISABLE", "one", {"two"}),
        ("ATTNMUX_DISABLE", "attnmux-one,two", set()),
    ],
)
def test_lists_of_the_environment_act_before_any_import(
    workshop, monkeypatch, variable: str, value: str, imported: set[str]
) -> None:
    points = {name: workshop.plugin(name, {name.upper(): ""}) for name in ("one", "two")}
    monkeypatch.setenv(variable, value)
    registry = workshop.registry(*points.values())
    registry.entries()
    assert {name for name, point in points.items() if point.value in sys.modules} == imported
    left_out = {e.name for e in registry.entries() if e.disabled_by == variable}
    assert left_out == set(points) - imported


def test_a_backend_can_be_disabled_by_its_own_name(workshop, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_DISABLE", "A")
    registry = workshop.registry(workshop.plugin("one", {"A": "", "B": ""}))
    assert {entry.name: entry.usable for entry in registry.entries()} == {"A": False, "B": True}


def test_a_changed_list_is_seen_and_plugins_are_not_asked_again(workshop, monkeypatch) -> None:
    point = workshop.point("counted", COUNTING)
    registry = workshop.registry(point)
    assert registry.backends()["COUNTED"].usable
    before = registry.generation
    monkeypatch.setenv("ATTNMUX_DISABLE", "counted")
    assert "COUNTED" not in registry.backends()
    assert registry.generation > before
    monkeypatch.delenv("ATTNMUX_DISABLE")
    assert registry.backends()["COUNTED"].usable
    assert len(sys.modules[point.value].calls) == 1


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("ATTNMUX_PLUGINS", "oen,one", r"ATTNMUX_PLUGINS names 'oen'.*did you mean one\?"),
        ("ATTNMUX_DISABLE", "AA", r"ATTNMUX_DISABLE names 'AA'.*did you mean A\?"),
    ],
)
def test_a_name_in_a_list_that_names_nothing_is_warned_about(
    workshop, monkeypatch, variable: str, value: str, text: str
) -> None:
    monkeypatch.setenv(variable, value)
    registry = workshop.registry(workshop.plugin("one", {"A": ""}))
    with pytest.warns(UserWarning, match=text):
        registry.entries()


def test_registering_in_code_is_seen_and_twice_is_nothing(workshop) -> None:
    registry = workshop.registry(workshop.plugin("one", {"A": ""}))
    before = registry.generation
    info = BackendInfo("LATER", f"{workshop.backends(LATER='')}:LATER")
    registry.register(info)
    registry.register(info)
    assert registry.generation == before + 1
    assert registry.load("LATER").cls.get_name() == "LATER"
    registry.unregister("LATER")
    assert "LATER" not in registry.backends()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: r.register(BackendInfo("X", "m:Y")), "registered before as m:X"),
        (lambda r: r.register(BackendInfo("bad name", "m:X")), "BackendInfo.name: got 'bad name'"),
        (lambda r: r.unregister("NONE"), "name: got 'NONE'; allowed: a name registered in code"),
    ],
)
def test_bad_registrations_in_code_are_refused(change, text: str) -> None:
    registry = Registry(lambda: [])
    registry.register(BackendInfo("X", "m:X"))
    with pytest.raises(ValueError, match=text):
        change(registry)


def test_refresh_sees_a_plugin_installed_meanwhile(workshop) -> None:
    points = [workshop.plugin("one", {"A": ""})]
    registry = Registry(lambda: list(points))
    assert list(registry.backends()) == ["A"]
    points.append(workshop.plugin("two", {"B": ""}))
    assert list(registry.backends()) == ["A"]
    registry.refresh()
    assert list(registry.backends()) == ["A", "B"]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_process_knows_the_same_backends(method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    # A function of an installed module: a test module cannot be imported by a child.
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(list_backends).result(timeout=60) == list_backends()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_while_another_thread_discovers_waits_for_it(workshop) -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system has no fork")
    registry = workshop.registry(
        workshop.point("slow", "import time\ntime.sleep(0.5)\n" + COUNTING)
    )
    thread = threading.Thread(target=registry.entries)
    thread.start()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(list(registry.backends())))
    child.start()
    try:
        assert queue.get(timeout=30) == ["COUNTED"]
    finally:
        child.join(30)
        thread.join()
