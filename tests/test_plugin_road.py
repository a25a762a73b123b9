"""The road of a third-party backend: built, installed, found, selected, verified, run, removed.

The plugin is the source tree docs/examples/hello-backend, the environment a fresh one that holds
nothing of attnmux but the two wheels. The tests stand in the order of the road and share it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "packages" / "core"
HELLO = ROOT / "docs" / "examples" / "hello-backend"

SELECT = """
import torch
import attnmux

request = attnmux.AttentionRequest(head_size=32, dtype=torch.bfloat16, block_size=16)
cls = attnmux.select_backend(request)
print(cls.__module__, cls.get_name(), attnmux.__file__, sep="\\n")
"""

# One layer of two requests by the contract alone, against torch's own attention.
RUN = """
import torch
from torch.nn.functional import scaled_dot_product_attention
import attnmux
from attnmux.batch import make_metadata
from attnmux.config import EngineConfig
from attnmux.kv_cache import FullAttentionSpec, KVCacheLayout, allocate

torch.manual_seed(0)
backend = attnmux.select_backend(
    attnmux.AttentionRequest(head_size=16, dtype=torch.float32, block_size=4)
)
spec = FullAttentionSpec.for_layer(
    block_size=4, num_kv_heads=2, head_size=16, dtype=torch.float32
)
cache = allocate({"layer": spec}, 8, KVCacheLayout.LBNHC).views["layer"].fill_(torch.nan)
impl = attnmux.create_impl(backend, num_heads=6, head_size=16, scale=0.25, num_kv_heads=2)
builder = attnmux.create_builder(backend, spec, ["layer"], EngineConfig(), "cpu")

batch = make_metadata([5, 3], [5, 3], [[6, 1], [3]], 4)
query, output = torch.randn(8, 6, 16), torch.full((8, 6, 16), torch.nan)
key, value = torch.randn(8, 2, 16), torch.randn(8, 2, 16)
impl.do_kv_cache_update(None, key, value, cache, batch.slot_mapping)
impl.forward(None, query, key, value, cache, builder.build(0, batch), output)

worst = 0.0
for tokens in (slice(0, 5), slice(5, 8)):
    q, k, v = (x[tokens].transpose(0, 1).double() for x in (query, key, value))
    k, v = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
    right = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25).transpose(0, 1)
    worst = max(worst, (output[tokens] - right).abs().max().item())
print(worst)
"""
FLOAT32_ERROR = 2e-6  # 5 keys, values near 1: a few roundings of 2**-24 each


@dataclass(frozen=True)
class Environment:
    """A fresh environment with the core's wheel in it."""

    folder: Path
    hello: Path
    """The plugin's wheel."""

    @property
    def scripts(self) -> Path:
        return Path(sysconfig.get_path("scripts", vars=self._scheme))

    @property
    def site_packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars=self._scheme))

    @property
    def _scheme(self) -> dict[str, str]:
        return {"base": str(self.folder), "platbase": str(self.folder)}

    def run(self, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ATTNMUX_", "PYTHON"))}
        return subprocess.run(
            [str(self.scripts / command[0]), *command[1:]],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
            env=kept | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | settings,
        )

    def output_of(self, *command: str, **settings: str) -> str:
        done = self.run(*command, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.scripts / "python")]
        done = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def borrow_what_the_wheels_depend_on(environment: Environment) -> None:
    """Let the fresh environment see torch and the rest, so that 200 MB are not installed anew.

    A folder of links to everything that the running environment has installed, attnmux's own
    packages excepted; a .pth file names it. (The whole site-packages would bring in whatever of
    attnmux is installed there, with its entry points, and nothing would be proved.)
    """
    borrowed = environment.folder / "borrowed"
    borrowed.mkdir()
    sites = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    for site in sites:  # in an environment on top of another there are several
        for entry in Path(site).iterdir():
            ours = entry.name.lstrip("_").startswith(("attnmux", "editable"))
            if not ours and entry.suffix != ".pth" and not (borrowed / entry.name).exists():
                (borrowed / entry.name).symlink_to(entry)
    (environment.site_packages / "borrowed.pth").write_text(f"{borrowed}\n")


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Both wheels built; the core's installed in an environment of its own."""
    wheels = tmp_path_factory.mktemp("wheels")
    # Without isolation: hatchling is here already, and no package index is needed.
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w"]
    done = subprocess.run(
        [*build, str(wheels), str(CORE), str(HELLO)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [core] = wheels.glob("attnmux-*.whl")
    [hello] = wheels.glob("attnmux_hello-*.whl")
    environment = Environment(tmp_path_factory.mktemp("fresh"), hello)
    venv.create(environment.folder, with_pip=False)
    borrow_what_the_wheels_depend_on(environment)
    environment.pip("install", "--no-deps", "--no-index", str(core))
    return environment


@pytest.fixture(scope="module")
def installed(road: Environment) -> Environment:
    road.pip("install", "--no-deps", "--no-index", str(road.hello))
    return road


def listed(environment: Environment) -> dict[str, Any]:
    """Name -> row of every backend that `attnmux list` knows."""
    listing = json.loads(environment.output_of("attnmux", "list", "--json"))
    return {row["name"]: row for row in listing["backends"]}


def test_before_nothing_is_found_and_the_way_out_is_said(road: Environment) -> None:
    assert listed(road) == {}
    done = road.run("python", "-c", SELECT)
    assert done.returncode == 1
    assert "no backend is installed" in done.stderr
    assert "pip install" in done.stderr


def test_installed_it_is_listed_with_its_distribution(installed: Environment) -> None:
    rows = listed(installed)
    assert list(rows) == ["HELLO_ATTN"]
    assert rows["HELLO_ATTN"]["distribution"] == "attnmux-hello"
    assert rows["HELLO_ATTN"]["version"] == "0.1.0"


def test_it_is_selected_and_everything_is_from_the_wheels(installed: Environment) -> None:
    module, name, core = installed.output_of("python", "-c", SELECT).splitlines()
    assert (module, name) == ("attnmux_hello.backend", "HELLO_ATTN")
    assert Path(core).is_relative_to(installed.folder)


def test_the_conformance_kit_proves_it(installed: Environment) -> None:
    done = installed.run("attnmux", "verify", "--backend", "HELLO_ATTN", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    [report] = json.loads(done.stdout)
    assert report["conforms"]
    assert report["matrix"]["plain attention"]["decode"] == "proved"
    assert report["matrix"]["sliding window"]["decode"] == "declined"
    assert report["counts"]["FAILED"] == 0


def test_its_own_tests_are_the_kit(installed: Environment) -> None:
    """The whole kit has run above: here its plain scenarios stand for all, and both guards."""
    chosen = ("-k", "plain or known_failures or standard_tests")
    settings = ("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(installed.folder))
    told = installed.output_of("python", "-m", "pytest", *settings, *chosen, str(HELLO / "tests"))
    [passed] = re.findall(r"(\d+) passed", told)
    assert int(passed) >= 3
    assert "failed" not in told


def test_it_computes_attention_through_the_contract(installed: Environment) -> None:
    assert float(installed.output_of("python", "-c", RUN)) < FLOAT32_ERROR


def test_the_wheel_carries_the_template_of_a_plugin(road: Environment) -> None:
    road.output_of("attnmux", "new-backend", "hello", "--output", str(road.folder / "made"))
    made = road.folder / "made" / "attnmux-hello"
    for path in ("pyproject.toml", "src/attnmux_hello/impl.py", "tests/test_conformance.py"):
        assert (made / path).read_text() == (HELLO / path).read_text()


def test_uninstalled_it_is_gone(installed: Environment) -> None:
    installed.pip("uninstall", "--yes", "attnmux-hello")
    assert listed(installed) == {}
    done = installed.run("python", "-c", SELECT, ATTNMUX_BACKEND="HELLO_ATTN")
    assert done.returncode == 1
    told = " ".join(done.stderr.split())  # the report wraps its lines
    assert "'HELLO_ATTN' was asked for by ATTNMUX_BACKEND" in told
    assert "no backend of that name is installed" in told
