"""Owns what a test of HiCache starts besides the proxy: a Mooncake store's master, and SGLang servers that share it."""

import json
import os
import socket
import subprocess
from pathlib import Path

from sglang_server import HERE, Process, SglangServer, free_port, home
from sglang_server import missing as missing_server

LIBRARIES = "apt-get install --no-install-recommends libibverbs1 libnuma1 libcurl4"
PAGE = 64

README_OPTIONS = (
    *("--enable-hierarchical-cache", "--hicache-storage-backend", "mooncake"),
    *("--hicache-write-policy", "write_through", "--page-size", str(PAGE)),
    *("--served-model-name", "tiny"),
)
"""What packages/gyre-proxy/README.md tells users to start every engine with; MOONCAKE_MASTER, MOONCAKE_LOCAL_HOSTNAME
and MOONCAKE_PROTOCOL are the environment it names. Keep both in step."""

_OPTIONS = (
    *("--hicache-io-backend", "direct"),  # the copies that hicache_on_cpu.py has
    "--enable-metrics",  # which tell where the tokens of a call came from
    # a loaded machine may take longer over a page than a user would want to wait
    *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_timeout_base": 60})),
)


def missing() -> str | None:
    """Why there is nothing to start, with the command that mends it; None where there is."""
    if reason := missing_server():
        return reason
    tried = subprocess.run([_master(), "--version"], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        return f"Mooncake does not start: run `{LIBRARIES}`; it says: {tried.stderr.strip()}"
    return None


def _master() -> Path:
    return home() / "venv" / "bin" / "mooncake_master"


class MooncakeMaster(Process):
    """The one that knows what the store holds, and where: in memory that each server gives."""

    name = "the Mooncake master"

    def __init__(self, log: Path) -> None:
        port, metrics = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self._ports = (port, metrics)
        command = [_master(), "-rpc_address=127.0.0.1", f"-rpc_port={port}"]
        command += ["-metrics_host=127.0.0.1", f"-metrics_port={metrics}"]
        super().__init__(command, log, dict(os.environ))

    def ready(self) -> bool:
        try:
            for port in self._ports:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except OSError:
            return False
        return True


class HicacheServer(SglangServer):
    """One of the servers that share the store of `master`."""

    program = (HERE / "hicache_on_cpu.py",)

    def __init__(self, model: Path, log: Path, master: MooncakeMaster, *options: str) -> None:
        environment = {
            "MOONCAKE_MASTER": master.address,
            "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(64 << 20),
        }
        super().__init__(model, log, *README_OPTIONS, *_OPTIONS, *options, **environment)
