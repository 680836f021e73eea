"""Owns the calls of all executions: opens them, carries them through engines, records them, ends them.

Invariants: an answer is given out only after its record is durable; a call cut by a reroute or a dead engine
goes on elsewhere from prompt plus sampled ids; every wait ends at the call's deadline and names what it
waited for. Runs in one event loop; between two awaits nothing else changes the tables.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import orjson
from gyre_trajtree import RunLogIndex, RunLogWriter, TrajtreeError

from gyre_proxy.codec import Codec
from gyre_proxy.conversation import Answer, Request, texts
from gyre_proxy.engine_client import EngineClient, EngineDown, EngineRefused, Output
from gyre_proxy.errors import (
    BadRequest,
    ClientLeft,
    ContextOverflow,
    EngineUnavailable,
    ExecutionClosed,
    ProxyError,
    RecordingFailed,
    SettingsError,
)
from gyre_proxy.eviction import evict
from gyre_proxy.executions import Executions
from gyre_proxy.flights import Flight, LiveText, Signal
from gyre_proxy.records import call_answer, call_node, call_record, restored
from gyre_proxy.router import Engine, Router
from gyre_proxy.sessions import Match, Prompt, Session
from gyre_proxy.settings import Settings

LONG_TEXT = 2**16
"""Characters from which a prompt is encoded in a thread: the tokenizer needs about a second for a million."""

ENCODERS = 2
"""Long prompts encoded at a time; each may take hundreds of times its size in memory."""

ABORT_GRACE_S = 5.0
"""Time an engine gets to hand over what it sampled of a cancelled call."""

_STOPS = "the proxy stops; try again"


class Gateway:
    """Everything between a parsed request and its answer."""

    def __init__(
        self, settings: Settings, codec: Codec, log: RunLogWriter, recorded: RunLogIndex | None = None
    ) -> None:
        """`recorded`: what the log holds already; its executions go on where they were."""
        self.settings, self.codec, self._log = settings, codec, log
        self.context_length = settings.context_length or codec.context_length
        if self.context_length is None:
            raise SettingsError("the tokenizer directory names no context length; give --context-length")
        self.router = Router(Engine(url.rstrip("/")) for url in settings.engines)
        self.reroutes = 0
        self.calls = 0
        self.engines_changed = Signal()
        self._recorded = recorded
        self.executions = Executions(forget=self.router.forget, recall=self._recall)
        self._client = EngineClient()
        self._flights: dict[tuple, Flight] = {}
        self._running: set[Flight] = set()
        self._background: set[asyncio.Task] = set()
        self._stopping = False
        self._encoding = asyncio.Semaphore(ENCODERS)

    # --- executions

    def _recall(self, execution: str) -> Session | None:
        """The session of an execution that an earlier proxy recorded, None when there is none."""
        if self._recorded is None or execution not in self._recorded:
            return None
        recorded = self._recorded.load(execution)
        if recorded.closed:
            raise ExecutionClosed(f"execution {execution} is closed")
        return restored(recorded, self.codec, self.settings.tool_parser)

    def open_execution(self, execution: str, deadline: float, engine: str | None) -> None:
        """Make an execution known before its first call. Raises ExecutionClosed when it already ended."""
        self.executions.open(execution, deadline, time.time())
        if engine is not None:
            self.router.move({execution: engine})

    async def close_execution(self, execution: str) -> int:
        """End an execution.

        Abort its calls, refuse later ones, free its memory. Returns its recorded calls.
        """
        session = self.executions.stop(execution)
        flights = [f for f in self._running if f.session is session]
        for flight in flights:
            self._cancel(flight, ExecutionClosed(f"execution {execution} was closed during the call"))
        await asyncio.gather(*(f.task for f in flights), return_exceptions=True)
        return self.executions.end(execution, time.time())

    # --- calls

    async def count_tokens(self, execution: str, request: Request) -> int:
        """Prompt tokens the request would have. Raises ExecutionClosed, ContextOverflow for a text not worth counting."""
        session = self.executions.use(execution, time.time())
        return len(await self._prompt(session.match(request.conversation), request))

    async def open_flight(self, execution: str, request: Request, hints: dict, id_prefix: str) -> Flight:
        """Start the call, or join the same call when it is still under way (a harness's retry).

        Raises ExecutionClosed, ContextOverflow when the prompt leaves no room, BadRequest when it cannot be rendered.
        """
        session = self._session(execution)
        match = session.match(request.conversation)
        who = (session.execution, *sorted(hints.items()))
        key = (who, match.digest, request.max_tokens, request.stop)
        flight = self._flights.get(key)
        if flight is None:
            prompt = await self._prompt(match, request)
            session = self._session(execution)  # while a long prompt was encoded anything may have happened
            flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = self._new_flight(session, request, hints, match, prompt)
            self._running.add(flight)
            session.in_flight += 1
            flight.task = asyncio.create_task(self._fly(flight, key, id_prefix))
            flight.task.add_done_callback(lambda task: _landed(flight, task))
        return flight

    def leave(self, flight: Flight) -> None:
        """A client stopped reading. The last one to go before the end cancels the call."""
        flight.readers -= 1
        if not flight.readers and not flight.done and flight.finish is None:
            self._cancel(flight, ClientLeft("the client disconnected before the answer"))

    def _session(self, execution: str) -> Session:
        if self._stopping:
            raise EngineUnavailable(_STOPS)
        return self.executions.use(execution, time.time())

    def _new_flight(
        self, session: Session, request: Request, hints: dict, match: Match, prompt: Prompt
    ) -> Flight:
        room = self.context_length - len(prompt)
        if room < 1:
            raise ContextOverflow(len(prompt), self.context_length - 1)
        limit = min(room, request.max_tokens or self.settings.max_new_tokens or room)
        sampling = {**self.settings.sampling(), "max_new_tokens": limit}
        deadline = time.time() + self.settings.call_deadline_s
        return Flight(
            id=secrets.token_hex(8),
            session=session,
            request=request,
            match=match,
            hints=hints,
            prompt=prompt,
            limit=limit,
            sampling=sampling,
            deadline=min(deadline, session.deadline or deadline),
            attempt_of=session.failed_attempt(match.digest),
            live=LiveText(self.codec, bool(request.conversation.tools), request.stop)
            if request.stream or request.stop
            else None,
        )

    async def _prompt(self, match: Match, request: Request) -> Prompt:
        """Tokens of the request; those of a recorded path are reused as they are."""
        node, limit = match.node, self.context_length - 1
        if node is not None and self.codec.mode == "suffix":
            messages = match.messages[match.known :]
            encode = partial(self.codec.encode_suffix, messages, node.ended, node.length, limit)
            return Prompt(node, await self._encoded(encode, texts(messages)))
        messages, tools = match.messages, request.conversation.tools
        encode = partial(self.codec.encode_prompt, messages, tools, limit)
        whole = await self._encoded(encode, texts(messages, tools))
        if node is not None and np.array_equal(node.path_tokens(), whole[: node.length]):
            return Prompt(node, whole[node.length :])
        return Prompt(None, whole)

    async def _encoded(self, encode: Callable[[], list[int]], shown: Iterable[str]) -> np.ndarray:
        """Token ids, int32; long prompts are encoded beside the loop, which goes on meanwhile."""
        if sum(map(len, shown)) < LONG_TEXT:
            return np.asarray(encode(), np.int32)
        async with self._encoding:
            return np.asarray(await asyncio.to_thread(encode), np.int32)

    async def _fly(self, flight: Flight, key: tuple, id_prefix: str) -> None:
        """The whole life of a call; sets its answer or its failure."""
        failure: ProxyError | None = None
        try:
            await self._sample(flight)
        except EngineRefused as error:
            flight.finish, failure = "error", BadRequest(str(error))
        except EngineUnavailable as error:
            flight.finish, failure = "error" if not flight.ids else "abort", error
        except _Cancelled:
            flight.finish, failure = "abort", flight.cancelled
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
            self._running.discard(flight)
            flight.session.in_flight -= 1
        answer = call_answer(flight, self.codec, self.settings.tool_parser, id_prefix)
        try:
            self._record(flight, answer, id_prefix, failed=failure is not None)
        except TrajtreeError as error:
            failure = RecordingFailed(f"the call could not be recorded: {error}")
        if failure is None:
            flight.complete(answer)
        else:
            flight.fail(failure)

    async def _sample(self, flight: Flight) -> None:
        """Sample to the end, over as many engines as it takes."""
        try:
            async with asyncio.timeout(flight.deadline - time.time()):
                while flight.finish is None:
                    await self._leg(flight, await self._engine(flight))
                    self._settle(flight)
        except TimeoutError:
            waited = time.time() - flight.started
            raise EngineUnavailable(
                f"call {flight.id} met its deadline after {waited:.1f} s, waiting for {flight.waiting_for}"
            ) from None

    async def _engine(self, flight: Flight) -> Engine:
        while True:
            if flight.cancelled:
                raise _Cancelled
            now = time.time()
            engine = self.router.pick(flight.session.execution, now)
            if engine is not None:
                return engine
            due = self.router.due(now)
            if due is None:
                flight.waiting_for = "an engine that admits calls"
            await self.engines_changed.wait(due)

    async def _leg(self, flight: Flight, engine: Engine) -> None:
        """One request to one engine; leaves what it sampled in the flight."""
        base, version, ok = len(flight.ids), engine.version, True
        flight.legs += 1
        flight.engine, flight.last_engine = engine, engine.url
        flight.rid = f"{flight.id}-{flight.legs}"
        flight.waiting_for = f"{engine.url} to answer /generate"

        def progress(output: Output) -> None:
            flight.take(output, base, version)
            if flight.finish is not None:
                raise _Stopped

        self.router.begin(engine)
        try:
            output = await self._client.generate(
                engine.url, self._body(flight, engine), None if flight.live is None else progress
            )
            flight.take(output, base, version)
            if output.finish != "abort":
                flight.finish = output.finish
            elif not output.ids and engine.admitting:
                ok, flight.waiting_for = False, f"{engine.url} to stop aborting calls"
        except _Stopped:
            pass
        except EngineDown as error:
            ok, flight.waiting_for = False, f"an engine to come back ({error})"
        except asyncio.CancelledError:
            if not flight.dropped or flight.task.uncancel() > 0:
                raise
            flight.dropped, ok = False, False
        finally:
            flight.engine = None
            self.router.end(engine, ok, time.time())
            self.engines_changed.fire()

    def _body(self, flight: Flight, engine: Engine) -> dict:
        """/generate's body for what is still to be sampled."""
        body = {
            "rid": flight.rid,
            "input_ids": orjson.Fragment(flight.prompt.json(flight.ids)),
            "sampling_params": {
                **flight.sampling,
                "max_new_tokens": flight.limit - len(flight.ids),
                "stop_token_ids": self.codec.stop_ids,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if engine.version is not None:
            # Without it an engine's cache hands out keys and values of older weights.
            body["extra_key"] = str(engine.version)
        return body

    def _settle(self, flight: Flight) -> None:
        """After a leg that was cut: is there anything left to sample?"""
        if flight.finish is not None:
            return
        if flight.ids and flight.ids[-1] in self.codec.stop_ids:
            flight.finish = "stop"
        elif len(flight.ids) >= flight.limit:
            flight.finish = "length"
        elif flight.cancelled:
            raise _Cancelled

    def _record(self, flight: Flight, answer: Answer, id_prefix: str, failed: bool) -> None:
        """Write the call, then let later requests find it. Raises TrajtreeError when it is not durable."""
        record = call_record(flight, answer, time.time(), id_prefix)
        self._log.append(record)
        self.calls += 1
        node = call_node(flight, answer, self.codec.turn_end) if flight.ids else None
        context = bytes.fromhex(record.extra["context"])
        flight.session.remember(flight.id, flight.match.digest, context, node, answer.tool_calls, failed)

    # --- reroutes and ends

    async def reroute(self, source: str, moves: Mapping[str, str], deadline_s: float) -> tuple[int, int]:
        """Empty an engine (paper 4.3): stop admitting, move routes, abort there, continue elsewhere.

        Only open executions move: a route of another would count as load for ever. Returns (executions moved,
        calls that went on elsewhere) when none is left on the source. Raises EngineUnavailable when some are
        left at the deadline.
        """
        now = time.time()
        moves = {name: url for name, url in moves.items() if self.executions.is_open(name, now)}
        self.router.stop_admitting(source)
        self.router.move(moves)
        engine = self.router.engines[source]
        flights = [f for f in self._running if f.engine is engine]
        await evict(flights, time.time() + deadline_s, self._client, self.engines_changed)
        left = [f.id for f in self._running if f.engine is engine]
        if left:
            raise EngineUnavailable(f"calls left on {source} after {deadline_s} s: {', '.join(left)}")
        self.reroutes += 1
        return len(moves), sum(1 for f in flights if f.finish is None or f.last_engine != source)

    def _cancel(self, flight: Flight, reason: ProxyError) -> None:
        """End a call without an answer; what it sampled so far is recorded as aborted."""
        flight.cancelled = reason
        for key in [k for k, f in self._flights.items() if f is flight]:
            del self._flights[key]
        self.engines_changed.fire()
        if flight.engine is not None:
            deadline = time.time() + ABORT_GRACE_S
            task = asyncio.create_task(evict([flight], deadline, self._client, self.engines_changed))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Abort and record every call, then release engines and log."""
        self._stopping = True
        flights = list(self._running)
        for flight in flights:
            self._cancel(flight, EngineUnavailable(_STOPS))
        await asyncio.gather(*(f.task for f in flights), *self._background, return_exceptions=True)
        self._client.close()
        self._log.close()


class _Stopped(Exception):
    """A stop string ended the answer; leaving the exchange closes its connection, which ends it at the engine."""


class _Cancelled(Exception):
    """The call was cancelled; `flight.cancelled` says why."""


def _landed(flight: Flight, task: asyncio.Task) -> None:
    """Nobody may wait for a call whose task broke."""
    if not flight.done:
        cause = "it was cancelled" if task.cancelled() else repr(task.exception())
        flight.fail(ProxyError(f"call {flight.id} ended by an internal error: {cause}"))
