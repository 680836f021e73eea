"""Owns real SGLang servers of a test session: whether they are installed, how they start on CPU, and that they end.

A server runs in a process group of its own, which is ended as one; it also ends when the test process does.
"""

import contextlib
import ctypes
import hashlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx

HERE = Path(__file__).parent
INSTALL = "bash tests/sglang_environment/install.sh"
START_S = 180
STOP_S = 20
LOG_TAIL = 4000  # characters of the server's log in a failure
MAX_RUNNING = 16
CONTEXT = 4096

_OPTIONS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--dtype", "float32", "--max-total-tokens", "16384"),
    *("--max-running-requests", str(MAX_RUNNING), "--context-length", str(CONTEXT)),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"),
    "--sleep-on-idle",  # else an idle server keeps a core busy
)
_PR_SET_PDEATHSIG = 1


def home() -> Path:
    """Where install.sh puts the environment."""
    default = Path.home() / ".cache" / "gyre-tests" / "sglang"
    return Path(os.environ.get("GYRE_TEST_SGLANG_HOME") or default)


def missing() -> str | None:
    """Why there is no server to start, with the command that installs it; None where there is one."""
    files = sorted(HERE.glob("requirements*.txt"))
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    try:
        installed = (home() / "installed").read_text().strip()
    except FileNotFoundError:
        return f"the real SGLang server is not installed in {home()}: run `{INSTALL}`"
    if installed != wanted:
        return f"the SGLang server in {home()} has other versions than these tests want: run `{INSTALL}`"
    return None


class Process:
    """A process in a group of its own, with its output in the file `log`. It ends with the thread that starts it."""

    name: str

    def __init__(self, command: list[object], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def ready(self) -> bool:
        raise NotImplementedError

    def await_ready(self) -> None:
        """Raises RuntimeError, with the end of the log, if it is not ready within START_S seconds."""
        deadline = time.monotonic() + START_S
        while not self.ready():
            try:
                code = self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
                reason = f"was not ready within {START_S} s"
            else:
                reason = f"ended with code {code} before it was ready"
            raise RuntimeError(f"{self.name} {reason}; its log ends:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self.log.read_bytes()[-LOG_TAIL:].decode("utf-8", "replace")

    def stop(self) -> None:
        """End the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)


class SglangServer(Process):
    """Serves the directory `model`."""

    name = "the SGLang server"
    program: tuple[object, ...] = ("-m", "sglang.launch_server")

    def __init__(self, model: Path, log: Path, *options: str, **environment: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [home() / "venv" / "bin" / "python", *self.program, "--model-path", model]
        command += ["--host", "127.0.0.1", "--port", port, *_OPTIONS, *options]
        environment |= {
            "PYTHONPATH": str(HERE / "stubs"),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        super().__init__(command, log, os.environ | environment)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


def _end_with_parent() -> None:
    """In the new process: be killed when the thread that started it ends; the server's own children follow it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
