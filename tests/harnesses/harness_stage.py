"""Owns the stage of these tests: engines played by a policy, a strict proxy, one harness process in a fresh home."""

import contextlib
import os
import queue
import signal
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from gyre_proxy.codec import Codec
from harness_policy import Script
from harness_proxy import ProxyProcess
from proxy_stage import FakeEngine, Proxy, Stage
from proxy_tokenizer import build_tokenizer

CONTEXT = 262_144
RUN_DEADLINE_S = 120.0
"""Longest life of one harness process."""

MARKS = "marks"
"""Folder beside the workspace with a file for every mark that was asked for."""

PICTURE = "picture.png"
"""An image in the workspace."""

TAG = "GYRE_TEST_RUN"
"""Variable with which every process of a run is found."""
_ALLOWED = ("PATH", "LANG", "LC_ALL")
"""What a harness sees of this process's environment."""

_NOWHERE = "http://127.0.0.1:9"
"""The discard port: whatever a harness would ask of another host is refused at once."""

SEALED = {
    "HTTP_PROXY": _NOWHERE,
    "HTTPS_PROXY": _NOWHERE,
    "http_proxy": _NOWHERE,
    "https_proxy": _NOWHERE,
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "DO_NOT_TRACK": "1",
    "TERM": "dumb",
    "NO_COLOR": "1",
}


def decoded(codec: Codec, ids: list[int]) -> str:
    """Tokens as text, special ones too."""
    return codec._tokenizer.decode(ids, skip_special_tokens=False)


def ids_key(ids: Sequence[int]) -> bytes:
    """Tokens as something that sets and dictionaries can hold."""
    return np.asarray(ids, np.int32).tobytes()


class PolicyEngine(FakeEngine):
    """A scripted engine whose script reads the prompt."""

    def __init__(self, codec: Codec, script: Script, marks: Path, version: int) -> None:
        """Leaves a file in `marks` for every mark that it begins to answer: commands of tools can wait for them."""
        super().__init__(codec, [], version)
        self._policy, self._marks = script, marks
        self._held_tokens: int | None = None
        self._held_marks: set[str] | None = None
        self.cut: dict[str, int] = {}
        """Mark -> tokens after which its first answer ends for its length."""
        self._opening = self._encode("<|im_start|>assistant\n")
        self._answers: dict[bytes, tuple[str, str]] = {}
        self.puzzled: list[str] = []
        """What the script did not foresee, a line each."""

    def hold(self, tokens: int, news: queue.Queue, marks: set[str] | None = None) -> None:
        """Stop requests after so many tokens until they are aborted, and put the engine into `news` each time.

        `marks`: only the first request for each of these, which is taken out of the set; no other may run beside it.
        """
        self._held_tokens, self._held_marks, self._held = tokens, marks, _Notice(news, self)

    def _held_after(self, mark: str) -> int | None:
        if self._held_marks is None:
            return self._held_tokens
        if mark not in self._held_marks:
            return None
        self._held_marks.remove(mark)
        return self._held_tokens

    async def stop(self) -> None:
        """Die: every connection is cut, and none is taken any more."""
        if self._server is not None:
            for listener in self._server.servers:
                listener.close()
        await super().stop()

    def _plan(self, given: dict) -> tuple[list[int], str]:
        ids = given["input_ids"]
        begun = len(ids) - ids[::-1].index(self._opening[0]) - 1
        done = ids[begun + len(self._opening) :]
        try:
            mark, text = self._answer(ids[:begun])
            tokens = [*self._encode(text), self.codec.turn_end]
            if tokens[: len(done)] != done:
                raise LookupError(f"{mark} went on with other tokens than were sampled")
        except LookupError as error:
            self.puzzled.append(str(error))
            raise
        (self._marks / mark).touch()
        self.hold_after = self._held_after(mark)
        if mark in self.cut:
            return tokens[len(done) : self.cut.pop(mark)], "length"
        return tokens[len(done) :], "stop"

    def _answer(self, prompt: list[int]) -> tuple[str, str]:
        """(mark, text) by the script; a prompt that goes on elsewhere is not read again."""
        key = ids_key(prompt)
        if key not in self._answers:
            self._answers[key] = self._policy.answer(decoded(self.codec, prompt))
        return self._answers[key]

    def _encode(self, text: str) -> list[int]:
        return self.codec._tokenizer.encode(text, add_special_tokens=False).ids


class _Notice:
    """Stands for an engine's event of a held request."""

    def __init__(self, news: queue.Queue, engine: PolicyEngine) -> None:
        self._news, self._engine = news, engine

    def set(self) -> None:
        self._news.put(self._engine)


class HarnessStage(Stage):
    """A stage with a tokenizer that has room for the prompts of harnesses."""

    def __init__(self, tokenizer: Path) -> None:
        super().__init__()
        self.tokenizer = build_tokenizer(tokenizer, context_length=CONTEXT)
        self.codec = Codec(self.tokenizer)

    def decoded(self, ids: list[int]) -> str:
        return decoded(self.codec, ids)

    def policy_engine(self, script: Script, folder: Path, version: int) -> PolicyEngine:
        """`folder`: that of the harness whose model it is."""
        engine = PolicyEngine(self.codec, script, folder / MARKS, version)
        self.do(engine.start())
        self._stops.append(engine.stop)
        return engine

    def strict_proxy(self, record: Path, **settings: object) -> Proxy:
        """A proxy that serves only keys it issued, in this process, without engines."""
        return self.proxy(tokenizer=self.tokenizer, record=record, strict=True, **settings)

    def proxy_process(self, record: Path) -> ProxyProcess:
        """A running proxy of its own, without engines."""
        proxy = ProxyProcess(self.tokenizer, record)

        async def end() -> None:
            proxy.kill()

        self._stops.append(end)
        proxy.start()
        return proxy


def admit(proxy: Proxy, *engines: PolicyEngine) -> None:
    """Make these the engines of the proxy, all of them admitting."""
    table = [{"url": e.url, "version": e.version, "admitting": True} for e in engines]
    proxy.admin("PUT", "engines", {"engines": table})


class HarnessProcess:
    """One harness from its start to its end, with everything it started; a context manager.

    `home` and `workspace` are folders of its own. Ends are put into `news` as None, so that one can wait for
    the end and for other things at once.
    """

    def __init__(self, folder: Path, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._output, self._errors = folder / "stdout", folder / "stderr"
        self._tag = str(folder)
        self._environment = {name: os.environ[name] for name in _ALLOWED if name in os.environ} | SEALED
        self._environment |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), TAG: self._tag}
        self._environment |= environment
        self._argv, self._workspace = argv, folder / "workspace"
        self.news: queue.Queue = queue.Queue()
        self._deadline = 0.0

    def __enter__(self) -> "HarnessProcess":
        self._deadline = time.monotonic() + RUN_DEADLINE_S
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                self._argv,
                cwd=self._workspace,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()
        return self

    def _wait(self) -> None:
        self._process.wait()
        self.news.put(None)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in self.stragglers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._waiter.join()

    def stragglers(self) -> list[int]:
        """Processes of this run that live, whatever group they are in."""
        tag = f"{TAG}={self._tag}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and tag in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def next(self) -> object:
        """The next piece of news, None for the end of the process. Fails at the deadline."""
        try:
            return self.news.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(
                f"the harness did not end within {RUN_DEADLINE_S:.0f} s\n{self.told()}"
            ) from None

    def ended(self, on_news: Callable[[object], None] | None = None) -> int:
        """Wait for the end, handing over other news meanwhile; the exit code."""
        while (news := self.next()) is not None:
            on_news(news)
        return self._process.returncode

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def told(self) -> str:
        """The ends of its output and of its errors, for messages of failed tests."""
        return f"--- stdout\n{self.output[-3000:]}\n--- stderr\n{self.errors[-3000:]}"


def furnish(folder: Path) -> Path:
    """The folders of one run, with a picture in the workspace."""
    for name in ("home", "tmp", "workspace", MARKS):
        (folder / name).mkdir(parents=True)
    (folder / "workspace" / PICTURE).write_bytes(_png())
    return folder


def _png() -> bytes:
    """A red square of 16 x 16 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\xff\0\0" * 16) * 16)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
