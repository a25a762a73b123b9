"""`attnmux new-backend NAME`: a whole plugin to start from, which works and passes the kit.

The tree is the example of the documentation with other names. Its template lies beside this file;
`$name` in a text and `__module__` in a path are replaced, nothing else is interpreted.
"""

from __future__ import annotations

import keyword
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from string import Template
from typing import Annotated

import typer

from attnmux.checks import bad_argument
from attnmux.cli.output import user_errors

_SUFFIX = ".tmpl"  # keeps the linters, type checkers and test runners of the core off the templates
_LONGEST_NAME = 24  # longer ones would break the template's lines at 100 columns
_TAKEN = ("core", "cpu", "flash", "mla", "transformers")  # packages of this project


@dataclass(frozen=True)
class PluginNames:
    """The names of one plugin; `of` makes them from the one that the author gives."""

    distribution: str
    """What pip installs: ``attnmux-my-kernel``."""
    module: str
    """What Python imports: ``attnmux_my_kernel``."""
    plugin: str
    """The entry point, and what ``ATTNMUX_PLUGINS`` lists: ``my_kernel``."""
    backend: str
    """What users select: ``MY_KERNEL_ATTN``."""
    prefix: str
    """How class names begin: ``MyKernel``."""

    @classmethod
    def of(cls, name: str) -> PluginNames:
        """Make the names of a plugin called `name`.

        Args:
            name: Lower-case words of letters and digits, joined by hyphens or underscores.

        Raises:
            ValueError: It is no such name, is too long, or belongs to a package of this project.
        """
        words = name.replace("_", "-").split("-")
        if not all(re.fullmatch(r"[a-z0-9]+", word) for word in words) or name[0].isdigit():
            allowed = "lower-case letters and digits, joined by hyphens, a letter first: my-kernel"
            raise bad_argument("name", repr(name), allowed)
        if words[0] == "attnmux":
            rest = "-".join(words[1:]) or "my-kernel"
            raise bad_argument("name", repr(name), f"the part after 'attnmux-': {rest}")
        if len(name) > _LONGEST_NAME:
            raise bad_argument("name", f"{len(name)} characters", f"at most {_LONGEST_NAME}")
        if name in _TAKEN or keyword.iskeyword(name):
            raise bad_argument(
                "name", repr(name), f"a name of your own, none of {', '.join(_TAKEN)}"
            )
        plugin = "_".join(words)
        upper = plugin.upper()
        return cls(
            distribution="attnmux-" + "-".join(words),
            module=f"attnmux_{plugin}",
            plugin=plugin,
            backend=upper if upper.endswith("_ATTN") else f"{upper}_ATTN",
            prefix="".join(word.capitalize() for word in words),
        )


def generate(name: str, output: Path) -> Path:
    """Write the plugin `name` as a folder of its own in `output`, whole or not at all.

    Args:
        name: See `PluginNames.of`.
        output: The folder in which the new one is made; it is made too when it is missing.

    Returns:
        The new folder, ``output/attnmux-<name>``.

    Raises:
        ValueError: The name cannot be used, or the folder is there already.
    """
    names = PluginNames.of(name)
    target = output / names.distribution
    if target.exists() or target.is_symlink():
        raise bad_argument("output", f"{target}, which exists", "a folder that has none yet")
    if output.exists() and not output.is_dir():
        raise bad_argument("output", f"{output}, which is a file", "a folder")
    output.mkdir(parents=True, exist_ok=True)
    # Written aside and then renamed: nobody ever sees half of it, not after a full disk either.
    with tempfile.TemporaryDirectory(dir=output, prefix=f".{names.distribution}-") as aside:
        tree = Path(aside) / names.distribution
        for path, text in rendered(names):
            file = tree / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
        os.rename(tree, target)
    return target


def rendered(names: PluginNames) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield path and text of every file of the plugin; paths are relative to its folder."""
    replace = asdict(names)
    template = files("attnmux.cli") / "templates" / "backend"
    for path, file in _template_files(template, PurePosixPath()):
        text = file.read_text(encoding="utf-8")
        yield (
            PurePosixPath(str(path).removesuffix(_SUFFIX).replace("__module__", names.module)),
            Template(text).substitute(replace),
        )


def _template_files(
    folder: Traversable, path: PurePosixPath
) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _template_files(entry, path / entry.name)
        elif entry.name.endswith(_SUFFIX):
            yield path / entry.name, entry


def new_backend(
    name: Annotated[
        str, typer.Argument(help="Lower case, words joined by hyphens: my-kernel.", metavar="NAME")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the new folder is made.")
    ] = Path(),
) -> None:
    """Start a backend of your own: a plugin that works, is tested, and waits for your kernel."""
    with user_errors():
        target = generate(name, output)
    names = PluginNames.of(name)
    typer.echo(f"{target}: {names.distribution}, with one backend, {names.backend}")
    typer.echo("next:")
    for command in next_commands(target, names):
        typer.echo(f"  {command}")


def next_commands(target: Path, names: PluginNames) -> tuple[str, str, str]:
    """Return what an author runs first: install it, see it listed, have it verified."""
    folder = str(target) if target.is_absolute() else f"./{target.as_posix()}"
    return (
        f'python -m pip install -e "{folder}[test]"',
        "attnmux list",
        f"attnmux verify --backend {names.backend}",
    )
