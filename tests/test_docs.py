from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / "tests" / "doc_blocks.py"
FOLDERS = ("docs", "packages", "benchmarks", "tests", "changes")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(p for at in FOLDERS for p in (ROOT / at).rglob("*.md")))
    if "data" not in path.parts  # inputs of tests, no pages
)


def run_page(page: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUNNER), str(page)], check=False, capture_output=True, text=True
    )


def run_text(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "page.md").write_text(text.replace("~~~", "```"))
    return run_page(folder / "page.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_does_what_the_page_says(page: str) -> None:
    done = run_page(ROOT / page)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_of_the_repository_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if ":" not in target]
    assert [t for t in targets if not (ROOT / page).parent.joinpath(t).exists()] == []


GOOD = """
~~~python
kept = 41
~~~

<!-- file: made/here.txt -->
~~~text
from the page
~~~

~~~python
print(kept + 1)
print(open("made/here.txt").read())
~~~

<!-- output -->
~~~text
42
from ...
~~~

~~~console
$ echo one; echo two; echo three
one
...
three
$ printf 'a %s\\n' \\
>   b
a b
~~~

~~~toml
answer = 42
~~~
"""


def test_page_whose_blocks_are_right_passes(tmp_path: Path) -> None:
    done = run_text(tmp_path, GOOD)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/page.md: 6 blocks\n")


FAULTS = {
    "python that raises": ("~~~python\n\n1 / 0\n~~~", "ZeroDivisionError"),
    "python that prints something else": (
        "~~~python\nprint(2)\n~~~\n<!-- output -->\n~~~text\n3\n~~~",
        "the page shows",
    ),
    "command that fails": ("~~~console\n$ false\n~~~", "ended with 1"),
    "command that prints something else": ("~~~console\n$ echo 2\n3\n~~~", "the page shows"),
    "text that a command does not print": (
        "<!-- output of: echo 2 -->\n~~~text\n3\n~~~",
        "the page shows",
    ),
    "script whose first line fails": ("~~~bash\nfalse\ntrue\n~~~", "ended with 1"),
    "output with no command": ("~~~console\nhello\n~~~", "starts with a command"),
    "language that nobody runs": ("~~~ruby\nputs 1\n~~~", "knows how to run ruby"),
    "no language": ("~~~\nhello\n~~~", "no language"),
    "json that does not parse": ("~~~json\n{,}\n~~~", "Expecting property name"),
    "block that is not in the file it names": (
        "<!-- from: noxfile.py -->\n~~~python\nnot there\n~~~",
        "not what stands in noxfile.py",
    ),
    "command left unrun without leave": (
        "<!-- not run: slow -->\n~~~console\n$ attnmux list\n~~~",
        "must run",
    ),
    "block that never ends": ("~~~python\n1", "never closed"),
}


@pytest.mark.parametrize(("text", "complaint"), FAULTS.values(), ids=FAULTS.keys())
def test_page_with_a_fault_fails_and_says_where(tmp_path: Path, text: str, complaint: str) -> None:
    done = run_text(tmp_path, text)
    assert done.returncode == 1
    assert complaint in done.stdout
    assert re.search(r"page\.md, block at line \d", done.stdout)


def test_what_a_page_installs_is_seen_by_its_commands_and_gone_afterwards(tmp_path: Path) -> None:
    text = """
<!-- file: pkg/pyproject.toml -->
~~~toml
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "page-made-this"
version = "1.2.3"
~~~

<!-- file: pkg/page_made_this.py -->
~~~python
ANSWER = 42
~~~

~~~console
$ python -m pip install --quiet ./pkg
$ python -c "import page_made_this, torch; print(page_made_this.ANSWER)"
42
~~~
"""
    done = run_text(tmp_path, text)
    assert done.returncode == 0, done.stdout
    gone = subprocess.run([sys.executable, "-c", "import page_made_this"], capture_output=True)
    assert gone.returncode == 1


def test_sessions_that_pages_name_exist() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "-l"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    known = set(re.findall(r"^[*-] (\S+) ->", listed, re.MULTILINE)) | {"tests"}
    text = "".join((ROOT / page).read_text() for page in PAGES)
    named = set(re.findall(r"nox (?:-r )?-s \"?([\w()]+)", text))
    assert named
    assert named <= known
