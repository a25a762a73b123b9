"""The rules of the house that a machine can hold: who imports whom, sizes, names, packaging."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from attnmux.cli import COMMANDS
from attnmux.settings import KNOWN_VARIABLES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {  # folder -> import package
    "core": "attnmux",
    "backend-cpu": "attnmux_cpu",
    "backend-flash": "attnmux_flash",
    "backend-mla": "attnmux_mla",
    "engine-transformers": "attnmux_transformers",
}
BACKENDS = ["backend-cpu", "backend-flash", "backend-mla"]
PROJECTS = {
    folder: tomllib.loads((ROOT / "packages" / folder / "pyproject.toml").read_text())["project"]
    for folder in PACKAGES
}
COMES_WITH = {"rich": "typer", "click": "typer"}  # imported, declared under another name
MODULES = {"importlib-metadata": "importlib_metadata", "typing-extensions": "typing_extensions"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / "packages" / folder / "src").rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each import as (module, names taken from it); relative ones do not exist in this house."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or "", [alias.name for alias in node.names]


def imports_of(folder: str, under: str = "") -> dict[str, set[str]]:
    """Module -> the files (relative to the package) that import it, those under a folder only."""
    found: dict[str, set[str]] = {}
    base = ROOT / "packages" / folder / "src" / PACKAGES[folder]
    for path in sources(folder):
        name = str(path.relative_to(base))
        if name.startswith(under):
            for module, _ in imported(path):
                found.setdefault(module, set()).add(name)
    return found


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


# Import directions ------------------------------------------------------------------------


def test_core_imports_no_backend_and_no_engine() -> None:
    others = [package for package in PACKAGES.values() if package != "attnmux"]
    wrong = {m: at for m, at in imports_of("core").items() if any(inside(m, o) for o in others)}
    assert wrong == {}


@pytest.mark.parametrize("folder", BACKENDS)
def test_backend_imports_only_the_public_core(folder: str) -> None:
    private = {
        module: at
        for module, at in imports_of(folder).items()
        if inside(module, "attnmux")
        and (
            any(part.startswith("_") for part in module.split("."))
            or inside(module, "attnmux.testing")
            or inside(module, "attnmux.cli")
        )
    }
    assert private == {}


@pytest.mark.parametrize("folder", [*BACKENDS, "engine-transformers"])
def test_no_private_name_of_another_package_is_taken(folder: str) -> None:
    taken = [
        f"{path.name}: {module}.{name}"
        for path in sources(folder)
        for module, names in imported(path)
        for name in names
        if name.startswith("_")
        and not name.startswith("__")
        and module.startswith("attnmux")
        and not inside(module, PACKAGES[folder])
    ]
    assert taken == []


@pytest.mark.parametrize("folder", [*BACKENDS, "engine-transformers"])
def test_backends_and_engine_do_not_know_each_other(folder: str) -> None:
    allowed = {PACKAGES[folder], "attnmux"}
    if folder == "backend-mla":
        allowed |= {"attnmux_flash.varlen", "attnmux_flash.device"}  # declared public for it
    wrong = {
        module: at
        for module, at in imports_of(folder).items()
        if module.startswith("attnmux") and not any(inside(module, a) for a in allowed)
    }
    assert wrong == {}


@pytest.mark.parametrize("folder", BACKENDS)
def test_kernels_import_nothing_that_stands_above_them(folder: str) -> None:
    package = PACKAGES[folder]
    above = re.compile(rf"{package}\.(\w*_)?(plugin|backend|builder|impl)$")
    assert {m: at for m, at in imports_of(folder, "kernels/").items() if above.match(m)} == {}


@pytest.mark.parametrize("folder", BACKENDS)
def test_plugin_module_imports_only_what_plugins_need(folder: str) -> None:
    modules = set(imports_of(folder, "plugin.py")) - {"__future__"}
    own = {module for module in modules if inside(module, PACKAGES[folder])}
    assert modules - own == {"attnmux.plugins"}
    assert own <= {f"{PACKAGES[folder]}.options"}


def test_testing_imports_only_the_core() -> None:
    modules = {m for m in imports_of("core", "testing/") if m.startswith("attnmux")}
    assert {m for m in modules if inside(m, "attnmux.cli")} == set()


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_import_is_declared(folder: str) -> None:
    ours = {project["name"]: name for name, project in PROJECTS.items()}

    def declared(of: str) -> Iterator[str]:
        project = PROJECTS[of]
        extras = project.get("optional-dependencies", {}).values()
        for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
            name = Requirement(line).name
            yield MODULES.get(name, name.replace("-", "_"))
            if name in ours:
                yield from declared(ours[name])

    known = {*declared(folder), *sys.stdlib_module_names, PACKAGES[folder]}
    tops = {module.split(".")[0] for module in imports_of(folder)}
    missing = {top for top in tops if COMES_WITH.get(top, top) not in known}
    assert missing == {top for top in missing if top.startswith("attnmux")} == set()


# Files ------------------------------------------------------------------------------------


def python_files() -> list[Path]:
    tops = ("packages", "tests", "docs", "benchmarks")
    found = [path for top in tops for path in (ROOT / top).rglob("*.py")]
    return sorted([ROOT / "noxfile.py", *found, *(ROOT / ".ci").glob("*.py")])


def is_test(path: Path) -> bool:
    return "tests" in path.relative_to(ROOT).parts


def test_no_file_outgrows_one_sitting() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in python_files()
        if (lines := len(path.read_text().splitlines())) > (500 if is_test(path) else 400)
    }
    assert long == {}


def test_no_kernel_file_outgrows_one_sitting() -> None:
    kernels = [path for path in python_files() if "kernels" in path.parts and not is_test(path)]
    assert {p.name for p in kernels if len(p.read_text().splitlines()) > 300} == set()


def test_modules_are_named_for_what_they_hold() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [path for path in python_files() if path.stem in drawers] == []


def test_every_module_has_postponed_annotations() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if (text := path.read_text()).strip()
        and any(not isinstance(node, ast.Expr) for node in ast.parse(text).body)
        and "from __future__ import annotations" not in text
        and path.name != "_version.py"
        and "hostile" not in path.parts  # misbehaving is their job
    ]
    assert without == []


def test_no_exception_is_swallowed() -> None:
    swallowed = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and all(isinstance(line, ast.Pass) for line in node.body)
    ]
    assert swallowed == []


def test_nothing_names_a_machine() -> None:
    # spelled in parts, so that this file does not find itself
    places = ["/" + "work/", "/" + "opt/amx", "/" + "tmp/plan", "/" + "root/", "py" + "pi.org"]
    texts = (".py", ".md", ".toml", ".txt", ".json", ".tmpl", ".yaml", ".cfg")
    tops = ("packages", "tests", "docs", "benchmarks", "changes", ".ci")
    files = [p for top in tops for p in (ROOT / top).rglob("*") if p.suffix in texts]
    files += [p for p in ROOT.iterdir() if p.suffix in texts]
    files += [ROOT / ".ci" / "run"]
    named = {
        f"{path.relative_to(ROOT)}: {place}"
        for path in files
        for place in places
        if place in path.read_text()
    }
    assert named == set()


# Packaging --------------------------------------------------------------------------------


def version(folder: str) -> Version:
    path = ROOT / "packages" / folder / "src" / PACKAGES[folder] / "_version.py"
    return Version(re.search(r'"(.+)"', path.read_text())[1])


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_package_has_the_same_things(folder: str) -> None:
    at = ROOT / "packages" / folder
    assert (at / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (at / "README.md").read_text().startswith(f"# {PROJECTS[folder]['name']}\n")
    assert (at / "src" / PACKAGES[folder] / "py.typed").exists()
    assert list((at / "tests").glob("test_*.py"))
    assert PROJECTS[folder]["requires-python"] == ">=3.11"
    assert PROJECTS[folder]["license"] == "Apache-2.0"


@pytest.mark.parametrize("folder", BACKENDS)
def test_every_backend_package_has_a_plugin_and_those_with_a_backend_have_the_five(
    folder: str,
) -> None:
    at = ROOT / "packages" / folder / "src" / PACKAGES[folder]
    names = {path.name.removesuffix(".py") for path in at.iterdir()}
    assert PROJECTS[folder]["entry-points"]["attnmux.backends"] == {
        folder.removeprefix("backend-"): f"{PACKAGES[folder]}.plugin"
    }
    assert "plugin" in names
    five = {"plugin", "backend", "builder", "impl", "kernels"}
    assert names & five in (five, {"plugin"})


def test_ranges_between_our_packages_hold_for_the_versions_of_this_tree() -> None:
    ours = {project["name"]: folder for folder, project in PROJECTS.items()}
    ranges = [
        (folder, wanted)
        for folder, project in PROJECTS.items()
        for wanted in map(Requirement, project["dependencies"])
        if wanted.name in ours
    ]
    assert ranges
    broken = [
        f"{folder}: {wanted}"
        for folder, wanted in ranges
        if version(ours[wanted.name]) not in wanted.specifier
    ]
    assert broken == []


def test_constraints_satisfy_what_packages_declare() -> None:
    pins = {
        Requirement(line).name.lower().replace("_", "-"): Requirement(line).specifier
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    ours = {project["name"] for project in PROJECTS.values()}
    wanted = [
        requirement
        for project in PROJECTS.values()
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name not in ours
    ]
    for requirement in wanted:
        (pin,) = pins[requirement.name.replace("_", "-")]
        assert pin.operator == "=="
        assert pin.version in requirement.specifier, requirement


def test_changelog_is_ahead_of_or_level_with_every_package() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[?([\w.]+)\]?", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    released = [Version(heading) for heading in headings[1:]]
    newest = max(released, default=Version("0"))
    unknown = [name for name in PACKAGES if version(name) not in released]
    assert [name for name in unknown if version(name) < newest] == []


def test_change_notes_are_named_as_the_readme_of_their_folder_says() -> None:
    pattern = re.compile(
        r"[\w.-]+\.(core|cpu|flash|mla|engine|project)\.(added|changed|deprecated|removed|fixed)\.md"
    )
    notes = [path for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    assert [path.name for path in notes if not pattern.fullmatch(path.name)] == []
    assert [path.name for path in notes if not path.read_text().strip().endswith(".")] == []


# Documentation ------------------------------------------------------------------------------


def core_tree(name: str) -> ast.Module:
    return ast.parse((ROOT / "packages/core/src/attnmux" / name).read_text())


def test_every_hook_has_a_heading_with_its_signature() -> None:
    headings = re.findall(r"^### (.+)$", (ROOT / "docs/contract.md").read_text(), re.MULTILINE)
    hooks = [
        f"{node.name}({', '.join(argument.arg for argument in node.args.args)})"
        for node in core_tree("plugins/hookspecs.py").body
        if isinstance(node, ast.FunctionDef)
    ]
    assert hooks == [heading for heading in headings if heading.startswith("attnmux_")]
    authors = (ROOT / "docs/authors.md").read_text()
    assert [hook for hook in hooks if hook.split("(")[0] not in authors] == []


def test_every_setting_and_every_command_is_in_the_readme_of_the_core() -> None:
    readme = (ROOT / "packages/core/README.md").read_text()
    assert [name for name in KNOWN_VARIABLES if f"| `{name}` |" not in readme] == []
    assert [name for name in COMMANDS if f"| `attnmux {name}" not in readme] == []


def test_every_deprecation_is_listed_by_the_version_in_which_it_goes() -> None:
    listed = re.findall(
        r"^\| \d+\.\d+ \| `(.+?)` \|", (ROOT / "docs/deprecations.md").read_text(), re.MULTILINE
    )
    marked = [
        f"{parent.name}.{node.name}"
        for folder in PACKAGES
        for path in sources(folder)
        for parent in ast.walk(ast.parse(path.read_text()))
        if isinstance(parent, ast.ClassDef)
        for node in parent.body
        if isinstance(node, ast.FunctionDef)
        and any("deprecated" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert sorted(marked) == sorted(listed)
    assert marked


# The table of contents ----------------------------------------------------------------------


def sessions() -> list[ast.FunctionDef]:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("session" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def test_every_session_is_short_and_says_in_one_line_what_it_promises() -> None:
    names = [session.name for session in sessions()]
    assert names == ["lint", "types", "tests", "integration", "docs", "build", "demo", "bench"]
    for session in sessions():
        assert session.end_lineno is not None
        assert session.end_lineno - session.lineno < 20, session.name
        assert len((ast.get_docstring(session) or "").splitlines()) == 1, session.name
