"""Run every code block of one page: `python tests/doc_blocks.py PAGE`.

The page's blocks run in their order, in a copy of the repository and an environment of their own
that sees the packages of the calling one; what they install or write is gone afterwards.

    python    executed; the blocks of one page share a namespace
    console   lines that start with "$ " are commands, the lines below one are what it prints
    bash      a script that must exit with 0
    json, toml   must parse
    text      anything; not run

A comment on the line above a block changes that:

    <!-- output -->        a text block: what the python block above it prints
    <!-- output of: COMMAND -->   a text block: what that command prints
    <!-- file: NAME -->    the block is written to that file
    <!-- from: PATH -->    the block stands word for word in that file of the repository
    <!-- not run: WHY -->  allowed for commands of nox and git alone

In expected output "..." stands for anything. Exit status 0: every block did what the page says.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import traceback
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>[\w-]*)\s*$")
MARK = re.compile(r"<!-- (?P<kind>output of|output|file|from|not run)(: (?P<value>.+?))? -->")
MAY_STAY_UNRUN = ("python -m nox", "python -m pip install nox", "git ", "cd ")
LEFT_BEHIND = shutil.ignore_patterns(".*", "__pycache__", "dist", "build")
COMMAND_SECONDS = 600


class PageError(Exception):
    """A block does not do what its page says."""


@dataclass(frozen=True)
class Block:
    """One fenced block: its code, the number of its first line, and the mark above it."""

    language: str
    code: str
    line: int
    mark: str | None = None
    value: str | None = None


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page of Markdown."""
    lines = text.splitlines()
    at = 0
    above = ""
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if not opening:
            above = lines[at].strip() or above
            at += 1
            continue
        start = at + 1
        closing = re.compile(rf"^ *{opening['fence']}`*\s*$")
        at = next((n for n in range(start, len(lines)) if closing.match(lines[n])), None)
        if at is None:
            raise PageError(f"line {start}: this block is never closed")
        code = "".join(line.removeprefix(opening["indent"]) + "\n" for line in lines[start:at])
        mark = MARK.fullmatch(above)
        kind, value = (mark["kind"], mark["value"]) if mark else (None, None)
        yield Block(opening["language"], code, start + 1, kind, value)
        above = ""
        at += 1


def matches(expected: str, printed: str) -> bool:
    """Whether output is what the page shows, "..." standing for anything, ends of lines aside."""

    def trimmed(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())

    pattern = re.escape(trimmed(expected)).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, trimmed(printed), re.DOTALL) is not None


def require_output(expected: str, printed: str) -> None:
    """Raise, with both texts, unless they match."""
    if not matches(expected, printed):
        raise PageError(f"the page shows\n{expected}\nbut this was printed\n{printed}")


def run_python(block: Block, page: str, namespace: dict[str, Any]) -> str:
    """Execute the block, its lines numbered as on the page; return what it printed."""
    printed = io.StringIO()
    source = "\n" * (block.line - 1) + block.code
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, page, "exec"), namespace)
    except Exception as error:
        raise PageError(
            f"{traceback.format_exc()}\nprinted before:\n{printed.getvalue()}"
        ) from error
    return printed.getvalue()


def run_shell(script: str) -> str:
    """Run commands of the shell to the first that fails; return what they printed, errors too."""
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    if done.returncode:
        raise PageError(f"{script!r} ended with {done.returncode} and printed\n{done.stdout}")
    return done.stdout


def commands(code: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output shown below it."""
    found: list[tuple[str, str]] = []
    for line in code.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = (f"{found[-1][0][:-1]}{line.lstrip('> ')}", "")
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        else:
            raise PageError("a console block starts with a command: $ and a space")
    return found


def run_console(code: str) -> None:
    """Run each command and hold what it prints against the page, where that shows any."""
    for command, expected in commands(code):
        printed = run_shell(command)
        if expected.strip():
            require_output(expected, printed)


def leave_unrun(block: Block) -> None:
    """Accept that a block is not run, if it holds nothing but commands that may stay so."""
    if not block.value:
        raise PageError("'not run' needs a reason")
    for command in block.code.splitlines():
        if not command.removeprefix("$ ").startswith(MAY_STAY_UNRUN) and block.language != "text":
            raise PageError(f"{command!r} must run; only commands of nox and git may stay unrun")


def hold_against_file(block: Block) -> None:
    """Raise unless the block stands in the file that it says it is from."""
    if block.code.strip() not in (ROOT / str(block.value)).read_text():
        raise PageError(f"this is not what stands in {block.value}")


def run_block(block: Block, page: str, namespace: dict[str, Any], printed: str) -> str:
    """Do what the block's language and mark ask for; return what a python block printed."""
    if block.mark == "not run":
        leave_unrun(block)
    elif block.mark == "from":
        hold_against_file(block)
    elif block.mark == "file":
        target = Path(str(block.value))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(block.code)
    elif block.mark == "output":
        require_output(block.code, printed)
    elif block.mark == "output of":
        require_output(block.code, run_shell(str(block.value)))
    elif block.language == "python":
        return run_python(block, page, namespace)
    elif block.language == "console":
        run_console(block.code)
    elif block.language == "bash":
        run_shell(block.code)
    elif block.language in ("json", "toml"):
        {"json": json.loads, "toml": tomllib.loads}[block.language](block.code)
    elif block.language != "text":
        raise PageError(f"nobody knows how to run {block.language or 'a block with no language'}")
    return ""


def shown(page: str) -> str:
    """A page's name as people know it."""
    return str(Path(page).relative_to(ROOT)) if Path(page).is_relative_to(ROOT) else page


def run_page(page: str) -> int:
    """Run the blocks of a page; print what is wrong with the first that fails."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    count = 0
    line = 1
    try:
        for block in blocks(Path(page).read_text()):
            line = block.line
            printed = run_block(block, page, namespace, printed)
            count += 1
    except (PageError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"{shown(page)}, block at line {line}: {error}")
        return 1
    print(f"{shown(page)}: {count} blocks")
    return 0


def make_environment(folder: Path) -> Path:
    """Make an environment that sees the packages of this one; return its folder of commands."""
    venv.create(folder, with_pip=False)
    scheme = {"base": str(folder), "platbase": str(folder)}
    seen = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    link = Path(sysconfig.get_path("purelib", vars=scheme)) / "seen.pth"
    link.write_text("import site; " + "; ".join(f"site.addsitedir({at!r})" for at in seen) + "\n")
    bin_folder = Path(sysconfig.get_path("scripts", vars=scheme))
    for entry in entry_points(group="console_scripts"):
        script = bin_folder / entry.name
        script.write_text(
            f"#!{bin_folder / 'python'}\nimport sys\nfrom {entry.module} import {entry.attr}\n"
            f"sys.exit({entry.attr}())\n"
        )
        script.chmod(0o755)
    return bin_folder


def main(page: Path) -> int:
    """Run a page in a copy of the repository, in an environment of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "repository"
        shutil.copytree(ROOT, copy, ignore=LEFT_BEHIND)
        bin_folder = make_environment(Path(scratch) / "environment")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ATTNMUX_")}
        environment |= {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
        environment |= {"NO_COLOR": "1", "TERM": "dumb"}
        command = [str(bin_folder / "python"), __file__, "--inside", str(page.resolve())]
        return subprocess.run(command, check=False, cwd=copy, env=environment).returncode


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        sys.exit(run_page(sys.argv[2]))
    sys.exit(main(Path(sys.argv[1])))
