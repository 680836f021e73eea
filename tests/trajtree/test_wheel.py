"""What a stranger gets: the built wheel in an environment of its own, and the README's code run as it stands."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "packages" / "gyre-trajtree"
BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="uv builds the wheel and its environment")


def blocks(language):
    found = BLOCKS.findall((PACKAGE / "README.md").read_text())
    return [text for name, text in found if name == language]


def run(*command, cwd):
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    run("uv", "build", "--wheel", "--out-dir", out, PACKAGE, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def stranger(wheel):
    """Python of a fresh environment that holds the wheel and what the wheel asks for."""
    folder = wheel.parent / "venv"
    run("uv", "venv", "--quiet", "--python", sys.executable, folder, cwd=wheel.parent)
    python = folder / "bin" / "python"
    run("uv", "pip", "install", "--quiet", "--python", python, wheel, cwd=wheel.parent)
    return python


def test_the_wheel_brings_numpy_and_orjson_and_nothing_else(stranger, tmp_path):
    listed = json.loads(run("uv", "pip", "list", "--python", stranger, "--format", "json", cwd=tmp_path))
    assert sorted(package["name"] for package in listed) == ["gyre-trajtree", "numpy", "orjson"]


def test_the_wheel_holds_the_package_alone_and_says_that_it_is_typed(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gyre_trajtree"}
    assert "gyre_trajtree/py.typed" in names
    sources = {str(path.relative_to(PACKAGE / "src")) for path in (PACKAGE / "src").rglob("*.py")}
    assert sources <= set(names)


def test_the_readme_reads_a_log_written_by_hand_in_ten_lines(stranger, tmp_path):
    (log,), (ten_lines, *_), (output, *_) = blocks("json"), blocks("python"), blocks("text")
    assert len(log.splitlines()) == 3
    assert len([line for line in ten_lines.splitlines() if line.strip()]) <= 10
    (tmp_path / "run.jsonl").write_text(log)
    assert run(stranger, "-c", ten_lines, cwd=tmp_path) == output


def test_everything_else_in_the_readme_runs_and_prints_what_it_says(stranger, tmp_path):
    (tmp_path / "run.jsonl").write_text(blocks("json")[0])
    for code, output in zip(blocks("python"), blocks("text"), strict=True):
        assert run(stranger, "-c", code, cwd=tmp_path) == output


def test_every_module_imports_without_the_extras_or_names_its_own(stranger, tmp_path):
    code = (
        "import importlib, pkgutil, sys, gyre_trajtree as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    try:\n"
        "        importlib.import_module(module.name)\n"
        "    except package.TrajtreeError as error:\n"
        "        assert 'gyre-trajtree[' in str(error), error\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'pyarrow', 'zstandard', 'asyncio'}))\n"
    )
    assert run(stranger, "-c", code, cwd=tmp_path) == "[]\n"


def test_a_missing_extra_is_named_in_one_line(stranger, tmp_path):
    code = (
        "import gyre_trajtree as gt\n"
        "try:\n"
        "    gt.RunLogWriter('run.jsonl.zst')\n"
        "except gt.RunLogError as error:\n"
        "    print(error)\n"
    )
    said = run(stranger, "-c", code, cwd=tmp_path)
    assert "gyre-trajtree[zstd]" in said and said.count("\n") == 1
