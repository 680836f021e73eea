#!/usr/bin/env bash
# Installs the real SGLang server, for tests on CPU, into an environment of its own: $GYRE_TEST_SGLANG_HOME, by default
# ~/.cache/gyre-tests/sglang. Does nothing where the same versions are installed. Needs uv; downloads about 0.2 GB where
# the workspace is installed, whose files are linked, and 3 GB elsewhere.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${GYRE_TEST_SGLANG_HOME:-${HOME:?}/.cache/gyre-tests/sglang}
wanted=$(cat "$here"/requirements*.txt | sha256sum | cut -d ' ' -f 1)

mkdir -p "$home"
exec 9>"$home/lock"
flock -w 900 9 || { echo "error: another installation holds $home/lock for 900 s" >&2; exit 1; }
[ "$(cat "$home/installed" 2>/dev/null)" != "$wanted" ] || exit 0
rm -rf "$home/venv" "$home/installed"
uv venv --quiet --no-project --python 3.11 "$home/venv"
# compiled here, once: a server's start is mostly imports, which take twice as long uncompiled
uv pip install --quiet --compile-bytecode --python "$home/venv/bin/python" -r "$here/requirements.txt"
uv pip install --quiet --compile-bytecode --python "$home/venv/bin/python" --no-deps -r "$here/requirements-nodeps.txt"
echo "$wanted" >"$home/installed"
