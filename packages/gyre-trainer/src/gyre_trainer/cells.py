"""The driver's side of a cell: one process, its connection, and the end of both. asyncio, no torch.

Invariants: a cell answers one operation at a time; every operation has a deadline, which counts from the cell's
last sign of progress; a cell that dies, loses its engine or passes its deadline is killed with its engine,
then accounted for, and every waiting and later operation raises CellDied. No secret is in any environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre_trainer import wire
from gyre_trainer.errors import CellDied, CellError
from gyre_trainer.settings import CellSettings

HOST = "127.0.0.1"
STOP_TIMEOUT_S = 5.0

OnDeath = Callable[[int, str], None]
"""Called once with the cell's index and the reason when it has been ended and nobody stopped it. Must not raise."""
OnNotice = Callable[[int, dict[str, Any]], None]
"""Called with the cell's index and what it told unasked: {"engine": "restarted" | "lost", "url", ...}. Must not
raise."""


class CellProcess:
    """One running cell. Start it with `CellProcess.start`; `engine_url` is where its engine serves."""

    def __init__(self, index: int, settings: CellSettings, log_dir: Path, key: bytes, on_notice: OnNotice):
        self.index = index
        self.settings = settings
        self.engine_url = ""
        self.engine_pid: int | None = None
        self.death: str | None = None
        """Why the cell is dead; None while it lives."""
        self._log = log_dir / f"cell{index}.log"
        self._engine_log = log_dir / f"engine{index}.log"
        self._key = key
        self._on_notice = on_notice
        self._on_death: OnDeath = lambda index, reason: None
        self._turn = asyncio.Lock()
        self._number = 0
        self._answer: asyncio.Future[Any] | None = None
        self._extend: Callable[[], None] = lambda: None
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        index: int,
        settings: CellSettings,
        log_dir: Path,
        key: bytes | None = None,
        on_notice: OnNotice = lambda index, notice: None,
        on_death: OnDeath = lambda index, reason: None,
    ) -> CellProcess:
        """Start the process and wait until its actor and engine are ready. Raises CellDied or CellError.

        `log_dir` gets `cell<i>.log` and `engine<i>.log`. `key` (32 bytes) is shared by all cells of a run.
        """
        cell = cls(index, settings, log_dir, key or secrets.token_bytes(32), on_notice)
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await cell._launch()
                state = await cell.call("start", timeout_s=settings.start_timeout_s, settings=settings)
        except TimeoutError:
            await cell.kill(f"was not ready within {settings.start_timeout_s:g} s; see {cell._log}")
            raise cell._death_error() from None
        except OSError as error:
            await cell.kill(f"it could not be started: {error}")
            raise cell._death_error() from None
        except BaseException:
            await cell.kill("its start was given up")
            raise
        if cell.death is not None:
            raise cell._death_error()
        cell.engine_url = state["engine"]
        cell._on_death = on_death
        return cell

    async def call(self, operation: str, timeout_s: float | None = None, **arguments: Any) -> Any:
        """Run one operation of `gyre_trainer.cell.Cell` and return its answer.

        Waits for the operation before it. Raises CellError when the operation failed, CellDied when the cell
        died or gave neither answer nor sign of progress for `timeout_s` (default: the settings'
        operation_timeout_s).
        """
        async with self._turn:
            if self.death is not None:
                raise self._death_error()
            self._number += 1
            loop = asyncio.get_running_loop()
            self._answer = loop.create_future()
            wait = timeout_s or self.settings.operation_timeout_s
            try:
                async with asyncio.timeout(wait) as deadline:
                    self._extend = lambda: deadline.reschedule(loop.time() + wait)
                    self._writer.write(wire.frame((self._number, operation, arguments)))
                    await self._writer.drain()
                    return await self._answer
            except TimeoutError:
                await self.kill(f"did not answer {operation!r} within {wait:g} s")
                raise self._death_error() from None
            except OSError:
                await self.kill("its connection broke")
                raise self._death_error() from None
            finally:
                self._answer = None

    async def stop(self) -> None:
        """End the cell and its engine; never raises."""
        self._on_death = lambda index, reason: None
        if self.death is None:
            with contextlib.suppress(CellError):
                await self.call("stop", timeout_s=STOP_TIMEOUT_S)
        await self.kill("it was stopped")

    async def kill(self, reason: str) -> None:
        """End both process groups at once; the first reason is kept."""
        first = self.death is None
        self.death = self.death or reason
        self._kill_groups()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._death_error())
        if first:  # still before any waiting operation goes on
            self._on_death(self.index, reason)
        if self._process is not None:
            await self._process.wait()
        if self._writer is not None:
            self._writer.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    # -- inside
    async def _launch(self) -> None:
        connected: asyncio.Future[tuple] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await wire.answer(reader, writer, self._key) and not connected.done():
                connected.set_result((reader, writer))
            else:
                writer.close()

        server = await asyncio.start_server(accept, HOST, 0, limit=2**20)
        try:
            port = server.sockets[0].getsockname()[1]
            await self._spawn(port)
            ended = asyncio.create_task(self._process.wait())
            await asyncio.wait({connected, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not connected.done():
                code = self._process.returncode
                self.death = f"ended with code {code} while starting; see {self._log}"
                raise self._death_error()
        finally:
            server.close()
        reader, self._writer = connected.result()
        self._listening = asyncio.create_task(self._listen(reader))

    async def _spawn(self, port: int) -> None:
        threads = str(self.settings.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gyre_trainer.cell", "--driver", f"{HOST}:{port}"),
                *("--index", str(self.index), "--engine-log", str(self._engine_log)),
                stdin=asyncio.subprocess.PIPE,  # held open: its end tells the cell that the driver is gone
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        # Any process of this user can read an environment or a command line, but no pipe of another.
        self._process.stdin.write(self._key.hex().encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take messages until the connection ends; the cell is dead then."""
        try:
            while True:
                kind, *content = await wire.receive(reader)
                if kind == "notice":
                    await self._take_notice(content[0])
                elif kind == "progress":
                    self._take_progress()
                elif kind in ("answer", "error"):
                    self._take_answer(kind, *content)
        except EOFError:
            await self.kill(f"its process ended; see {self._log}")
        except Exception as error:  # without a listener the cell is lost, and must say why
            await self.kill(f"what it sent could not be handled: {error!r}")

    async def _take_notice(self, notice: dict[str, Any]) -> None:
        self.engine_pid = notice.get("engine_pid", self.engine_pid)
        self._on_notice(self.index, notice)
        if notice.get("engine") == "lost":
            await self.kill(f"its engine was lost: {notice['reason']}")

    def _take_progress(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._extend()

    def _take_answer(self, kind: str, number: int, *content: Any) -> None:
        if self._answer is None or self._answer.done() or number != self._number:
            return
        if kind == "answer":
            if isinstance(content[0], dict) and "engine_pid" in content[0]:
                self.engine_pid = content[0]["engine_pid"]
            self._answer.set_result(content[0])
        else:
            self._answer.set_exception(CellError(self.index, *content))

    def _kill_groups(self) -> None:
        for pid in (self.pid, self.engine_pid):
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self.engine_pid = None

    def _death_error(self) -> CellDied:
        return CellDied(self.index, self.death or "it died")
