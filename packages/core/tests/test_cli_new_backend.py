"""`attnmux new-backend`: what it writes is the example of the documentation, under other names."""

from __future__ import annotations

import ast
import os
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import attnmux.cli.new_backend as command
from attnmux.cli import main
from attnmux.cli.new_backend import PluginNames, generate, next_commands

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "hello-backend"
LONGEST = "abcdefgh-ijklmnop-qrstuv"  # 24 characters, in words: every derived name is longest
LINE_LENGTH = 100


def tree_of(folder: Path) -> dict[str, str]:
    """Relative path -> text of every file that is source, without what tools leave behind."""
    ignored = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis"}
    return {
        file.relative_to(folder).as_posix(): file.read_bytes().decode()
        for file in folder.rglob("*")
        if file.is_file() and not ignored.intersection(file.relative_to(folder).parts)
    }


def test_the_plugin_called_hello_is_the_example_of_the_documentation(tmp_path: Path) -> None:
    generated = tree_of(generate("hello", tmp_path))
    example = tree_of(EXAMPLE)
    assert sorted(generated) == sorted(example)
    for path, text in example.items():
        assert generated[path] == text, f"{path}: change template and example together"


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("hello", ("attnmux-hello", "attnmux_hello", "hello", "HELLO_ATTN", "Hello")),
        (
            "my-kernel",
            ("attnmux-my-kernel", "attnmux_my_kernel", "my_kernel", "MY_KERNEL_ATTN", "MyKernel"),
        ),
        ("my_kernel2", ("attnmux-my-kernel2",)),
        ("fast-attn", ("attnmux-fast-attn", "attnmux_fast_attn", "fast_attn", "FAST_ATTN")),
    ],
)
def test_every_name_follows_from_the_one_given(name: str, names: tuple[str, ...]) -> None:
    made = PluginNames.of(name)
    fields = (made.distribution, made.module, made.plugin, made.backend, made.prefix)
    assert fields[: len(names)] == names


@pytest.mark.parametrize("name", ["x", "my-kernel", LONGEST])
def test_generated_files_are_whole_for_any_name(name: str, tmp_path: Path) -> None:
    folder = generate(name, tmp_path)
    names = PluginNames.of(name)
    for path, text in tree_of(folder).items():
        assert "$" not in text, path
        assert "hello" not in (path + text).lower(), path
        if path.endswith(".py"):
            ast.parse(text, path)
            assert max(map(len, text.splitlines())) <= LINE_LENGTH, path
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == names.distribution
    entry_points = project["entry-points"]["attnmux.backends"]
    assert entry_points == {names.plugin: f"{names.module}.plugin"}
    assert (folder / "src" / names.module / "plugin.py").is_file()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("My-Kernel", "lower-case letters"),
        ("my kernel", "lower-case letters"),
        ("2fast", "a letter first"),
        ("my--kernel", "joined by hyphens"),
        ("-kernel", "joined by hyphens"),
        ("kernel-", "joined by hyphens"),
        ("../kernel", "lower-case letters"),
        ("kernél", "lower-case letters"),
        ("", "lower-case letters"),
        ("attnmux-kernel", "the part after 'attnmux-': kernel"),
        ("cpu", "a name of your own"),
        ("a" * 25, "25 characters; allowed: at most 24"),
    ],
)
def test_a_bad_name_is_refused_in_words(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^name: got ") as caught:
        generate(name, tmp_path)
    assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_touched(tmp_path: Path) -> None:
    precious = tmp_path / "attnmux-hello" / "kernel.cu"
    precious.parent.mkdir()
    precious.write_text("weeks of work")
    with pytest.raises(ValueError, match=r"^output: got .*attnmux-hello, which exists"):
        generate("hello", tmp_path)
    assert tree_of(tmp_path) == {"attnmux-hello/kernel.cu": "weeks of work"}


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^output: got .*file, which is a file"):
        generate("hello", tmp_path / "file")


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(command.rendered(PluginNames.of("hello")))

    def breaks_off(names: PluginNames):
        yield from whole[:3]
        raise OSError("no space left on device")

    monkeypatch.setattr(command, "rendered", breaks_off)
    with pytest.raises(OSError, match="no space left"):
        generate("hello", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_output_folder_is_made(tmp_path: Path) -> None:
    folder = generate("hello", tmp_path / "some" / "where")
    assert folder == tmp_path / "some" / "where" / "attnmux-hello"
    # Renamed into place, it must not keep the closed permissions of a temporary folder.
    assert os.stat(folder).st_mode & 0o700 == 0o700
    assert os.stat(folder).st_mode == os.stat(folder / "src").st_mode


def test_the_command_prints_the_next_three_commands(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["new-backend", "my-kernel", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "attnmux-my-kernel"
    assert result.output.splitlines() == [
        f"{folder}: attnmux-my-kernel, with one backend, MY_KERNEL_ATTN",
        "next:",
        f'  python -m pip install -e "{folder}[test]"',
        "  attnmux list",
        "  attnmux verify --backend MY_KERNEL_ATTN",
    ]


def test_the_command_tells_a_mistake_in_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["new-backend", "CPU", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: name: got 'CPU'; allowed: lower-case letters")
    assert result.stdout == ""


def test_a_relative_folder_is_one_that_pip_takes_for_a_folder() -> None:
    first, *_ = next_commands(Path("attnmux-hello"), PluginNames.of("hello"))
    assert first == 'python -m pip install -e "./attnmux-hello[test]"'
