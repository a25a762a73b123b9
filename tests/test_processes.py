"""Plugins are the same in every process, however it was started (a child of each kind is asked)."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HELLO = Path(__file__).resolve().parent.parent / "docs" / "examples" / "hello-backend"

# A script of its own: a spawned child imports the main module again, and a test module under
# pytest is none. The parent asks first, so that a forked child inherits a registry in use.
SCRIPT = """
import json
import multiprocessing
import sys

from attnmux.plugins import get_registry  # of which `attnmux.list_backends` is a view


def answer(queue):
    entries = get_registry().entries()
    origins = [[entry.name, entry.origin.distribution, entry.origin.version] for entry in entries]
    queue.put([[entry.name for entry in entries if entry.usable], origins])


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    if sys.argv[2] == "parent first":
        answer(queue)
        parent = queue.get()
    child = context.Process(target=answer, args=(queue,))
    child.start()
    told = queue.get()
    child.join(60)
    if sys.argv[2] == "child first":
        answer(queue)
        parent = queue.get()
    print(json.dumps({"parent": parent, "child": told, "exit": child.exitcode}))
"""

# While one thread of the parent is in the middle of discovery, another one forks.
FORK_IN_THE_MIDDLE = """
import json, os, sys, threading, time
from attnmux.plugins import get_registry

registry = get_registry()
inside = threading.Event()
source = registry._source

def slow():
    inside.set()
    time.sleep(1)
    return source()

registry._source = slow
thread = threading.Thread(target=registry.entries)
thread.start()
assert inside.wait(30)
read, write = os.pipe()
child = os.fork()
if child == 0:
    registry._source = source
    os.write(write, json.dumps([entry.name for entry in registry.entries()]).encode())
    os._exit(0)
os.close(write)
told = json.loads(os.read(read, 65536))
os.waitpid(child, 0)
thread.join()
print(json.dumps({"parent": [e.name for e in registry.entries()], "child": told}))
"""


@pytest.fixture(scope="module")
def hello(unpack_plugins: Callable[..., dict[str, Path]]) -> Path:
    return unpack_plugins(HELLO)["hello-backend"]


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.parametrize("order", ["parent first", "child first"])
def test_a_child_knows_the_same_backends(
    method: str,
    order: str,
    hello: Path,
    run_with_plugins: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    script = tmp_path / "asks_a_child.py"
    script.write_text(SCRIPT)
    done = run_with_plugins(str(script), method, order, plugins=[hello])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["exit"] == 0
    assert "HELLO_ATTN" in answer["parent"][0]
    assert answer["child"] == answer["parent"]


@pytest.mark.parametrize(
    ("settings", "known"),
    [({"ATTNMUX_DISABLE": "hello"}, False), ({"ATTNMUX_PLUGINS": "hello"}, True)],
    ids=["left out", "the only one"],
)
def test_a_child_obeys_the_lists_of_the_environment(
    settings: dict[str, str],
    known: bool,
    hello: Path,
    run_with_plugins: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    script = tmp_path / "asks_a_child.py"
    script.write_text(SCRIPT)
    done = run_with_plugins(str(script), "spawn", "child first", plugins=[hello], **settings)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["child"] == answer["parent"]
    assert ("HELLO_ATTN" in answer["child"][0]) is known


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_child_forked_in_the_middle_of_discovery_does_not_wait_for_ever(
    hello: Path, run_with_plugins: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_with_plugins(
        "-W", "ignore::DeprecationWarning", "-c", FORK_IN_THE_MIDDLE, plugins=[hello], timeout=60
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "HELLO_ATTN" in answer["child"]
    assert answer["child"] == answer["parent"]
