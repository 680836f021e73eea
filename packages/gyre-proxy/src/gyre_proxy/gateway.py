"""Owns the calls of all executions: opens them, carries them through engines, records them, ends them.

Invariants: an answer is given out only after its record is durable; a call cut by a reroute or a dead engine
goes on elsewhere from prompt plus sampled ids; every wait for an engine ends at the call's deadline, or when its
patience does, and names what it waited for. Runs in one event loop; between two awaits nothing else changes the tables.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from math import inf

import numpy as np
import orjson
from gyre_trajtree import Execution, Record, RunLogCorrupt, RunLogIndex, RunLogWriter, TrajtreeError

from gyre_proxy.codec import Codec
from gyre_proxy.conversation import Answer, Request
from gyre_proxy.durability import GroupCommit
from gyre_proxy.engine_client import EngineClient, EngineDown, EngineRefused, Output
from gyre_proxy.errors import (
    BadRequest,
    Busy,
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
from gyre_proxy.logs import ids_of, report
from gyre_proxy.metrics import Metrics
from gyre_proxy.prompts import Prompts
from gyre_proxy.records import call_answer, call_node, call_record, restored
from gyre_proxy.router import Engine, Router
from gyre_proxy.sessions import Match, Prompt, Session
from gyre_proxy.settings import Settings
from gyre_proxy.watch import Watch

_LOG = logging.getLogger("gyre_proxy")

ABORT_GRACE_S = 5.0
"""Time an engine gets to hand over what it sampled of a cancelled call."""

WOKEN, WAKE_S = 64, 1.0
"""Waiting calls that one freed place wakes, and how often the others look by themselves: thousands may wait."""

LOSSES = 5
"""Engines that a call may lose while they hold it; one that breaks them all must not go on to the next."""

_STOPS = "the proxy stops; try again"


class Gateway:
    """Everything between a parsed request and its answer."""

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        log: RunLogWriter,
        recorded: RunLogIndex | None = None,
        corrupt: list[RunLogCorrupt] | None = None,
    ) -> None:
        """`recorded`: what the log holds already, with its `corrupt` lines; its executions go on where they were."""
        self.settings, self.codec, self._log = settings, codec, log
        self.context_length = settings.context_length or codec.context_length
        if self.context_length is None or self.context_length < 2:
            raise SettingsError("the tokenizer directory names no context length; give --context-length")
        self.router = Router(
            Engine(url.rstrip("/"), capacity=settings.engine_capacity) for url in settings.engines
        )
        self.metrics = Metrics(self._gauges)
        self.reroutes = 0
        self.calls = 0
        self.engines_changed = Signal()
        self._recorded, self._corrupt = recorded, [] if corrupt is None else corrupt
        self._recalled: set[str] = set()
        """Recorded executions that were taken up: the index does not know what came after the start."""
        self.executions = Executions(forget=self.router.forget)
        self._commit = GroupCommit(log, settings.flush)
        self._client = EngineClient(codec.vocabulary_size)
        self._watch = Watch(
            lambda: self.router.engines.values(),
            lambda: self._running,
            self._client,
            settings.silence_s,
            self.engines_changed.fire,
        )
        self._watching: asyncio.Task | None = None
        self._flights: dict[tuple, Flight] = {}
        self._running: set[Flight] = set()
        self._background: set[asyncio.Task] = set()
        self._stopping = False
        self._beside = asyncio.Lock()
        """Held by long work on what is shared, in a thread: recorded executions, codecs of template arguments."""
        self._prompts = Prompts(codec, self._beside)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that the context has room behind and the engines take."""
        return self.router.limits(self.context_length)[0]

    @property
    def under_way(self) -> int:
        """Calls between their request and their durable record."""
        return len(self._running)

    def start(self) -> None:
        """Begin to look after engines; inside a running loop."""
        self._watching = asyncio.create_task(self._watch.run())

    # --- executions

    async def _recall(self, execution: str) -> None:
        """Take up an execution that an earlier proxy recorded, if it is one; beside the loop, as it may be long."""
        recorded = self._recorded
        if recorded is None or execution not in recorded or execution in self._recalled:
            return
        async with self._beside:
            if execution in self._recalled:
                return
            seen = len(self._corrupt)
            found = await asyncio.to_thread(recorded.load, execution)
            for error in self._corrupt[seen:]:
                _LOG.warning(
                    "recorded line lost", extra={"fields": {"execution": execution, "why": str(error)}}
                )
            if found.closed:
                self.executions.adopt_ended(execution, len(found.calls), time.time())
            else:
                session = await asyncio.to_thread(restored, found, self.codec)
                self.executions.adopt(session, time.time())
            self._recalled.add(execution)

    async def open_execution(self, opened: Execution, engine: str | None, record: bool) -> None:
        """Make an execution known before its first call; `record`: in the run log too.

        Raises ExecutionClosed when it already ended, Busy when too many are open, RecordingFailed.
        """
        self._admit(opened.id)
        await self._recall(opened.id)
        self.executions.open(opened.id, opened.deadline, time.time())
        if record:
            await self._append(opened)
        if engine is not None:
            self.router.move({opened.id: engine})

    async def close_execution(self, closed: Execution, record: bool) -> int:
        """End an execution; `record`: in the run log too, so that it stays ended after a restart.

        Abort its calls, refuse later ones, free its memory. Returns its recorded calls. Raises RecordingFailed.
        """
        await self._recall(closed.id)
        session = self.executions.stop(closed.id)
        if session is not None:
            flights = [f for f in self._running if f.session is session]
            for flight in flights:
                self._cancel(flight, ExecutionClosed(f"execution {closed.id} was closed during the call"))
            await asyncio.gather(*(f.task for f in flights), return_exceptions=True)
            if record:
                await self._append(closed)
        return self.executions.end(closed.id, time.time())

    # --- calls

    async def count_tokens(self, execution: str, request: Request) -> int:
        """Prompt tokens the request would have. Raises ExecutionClosed, ContextOverflow for a text not worth counting."""
        codec = await self._prompts.codec(request)
        session = await self._session(execution)
        match = session.match(request.conversation)
        return len(await self._prompts.encode(match, request, codec, self.longest_prompt))

    async def open_flight(
        self, execution: str, request: Request, hints: dict, protocol: str, id_prefix: str
    ) -> Flight:
        """Start the call, or join the same call when it is still under way (a harness's retry).

        Raises ExecutionClosed, ContextOverflow when the prompt leaves no room, BadRequest when it cannot be rendered,
        Busy when too much is under way.
        """
        begun = time.time()
        codec = await self._prompts.codec(request)
        session = await self._session(execution)
        match = session.match(request.conversation)
        who = (session.execution, *sorted(hints.items()))
        key = (who, match.digest, _asked(request))
        flight = self._flights.get(key)
        if flight is None:
            prompt = await self._prompts.encode(match, request, codec, self.longest_prompt)
            # while a long prompt was encoded anything may have happened
            session = await self._session(execution)
            flight = self._flights.get(key)
        if flight is not None:
            self.metrics.joined.inc()
            return flight
        if len(self._running) >= self.settings.max_calls:
            raise Busy(f"{self.settings.max_calls} calls are under way (--max-calls); try again")
        flight = self._flights[key] = self._new_flight(
            session, request, hints, protocol, codec, match, prompt
        )
        self.metrics.contexts.labels(session.attachment(match, flight.prompt.parent)).inc()
        self.metrics.spent("prepare", flight.started - begun)
        self._running.add(flight)
        session.in_flight += 1
        flight.task = asyncio.create_task(self._fly(flight, key, id_prefix))
        flight.task.add_done_callback(lambda task: _landed(flight, task))
        return flight

    def leave(self, flight: Flight, delivered: bool) -> None:
        """A client stopped reading. The last one to go before the end cancels the call.

        Who asks again for an answer that nobody got makes another attempt.
        """
        flight.readers -= 1
        if flight.readers or delivered:
            return
        flight.session.note_failed(flight.match.digest, flight.id)
        if not flight.done and flight.finish is None:
            self._cancel(flight, ClientLeft("the client disconnected before the answer"))

    async def _session(self, execution: str) -> Session:
        if self._stopping:
            raise EngineUnavailable(_STOPS)
        self._admit(execution)
        await self._recall(execution)
        return self.executions.use(execution, time.time())

    def _admit(self, execution: str) -> None:
        """Raises Busy for one execution more than may be open."""
        most = self.settings.max_executions
        if not self.executions.holds(execution) and len(self.executions) >= most:
            raise Busy(f"{most} executions are open (--max-executions); close some through the admin API")

    def _new_flight(
        self,
        session: Session,
        request: Request,
        hints: dict,
        protocol: str,
        codec: Codec,
        match: Match,
        prompt: Prompt,
    ) -> Flight:
        longest, whole = self.router.limits(self.context_length)
        if len(prompt) > longest:
            raise ContextOverflow(len(prompt), longest)
        room = whole - len(prompt)
        limit = min(room, request.max_tokens or self.settings.max_new_tokens or room)
        sampling = {**self.settings.sampling(), "max_new_tokens": limit}
        if request.schema is not None:
            sampling["json_schema"] = orjson.dumps(request.schema).decode()
        left = self.settings.call_deadline_s
        if session.deadline is not None:
            left = min(left, session.deadline - time.time())
        return Flight(
            id=secrets.token_hex(8),
            session=session,
            request=request,
            protocol=protocol,
            codec=codec,
            match=match,
            hints=hints,
            prompt=prompt,
            limit=limit,
            sampling=sampling,
            deadline=time.monotonic() + left,
            attempt_of=session.failed_attempt(match.digest),
            live=LiveText(
                codec, prompt, bool(request.conversation.offered), request.stop, len(request.prefill)
            )
            if request.stream or request.stop
            else None,
        )

    async def _fly(self, flight: Flight, key: tuple, id_prefix: str) -> None:
        """The whole life of a call; sets its answer or its failure."""
        failure: ProxyError | None = None
        try:
            try:
                await self._sample(flight)
            except EngineRefused as error:
                flight.finish, failure = "error", self._refusal(flight, error)
            except EngineUnavailable as error:
                flight.finish, failure = "error" if not flight.ids else "abort", error
            except _Cancelled:
                flight.finish, failure = "abort", flight.cancelled
            answer = call_answer(flight, id_prefix)
            await self._record(flight, answer, id_prefix, failed=failure is not None)
        except RecordingFailed as error:
            failure = error
        finally:
            self._release(flight)
            if self._flights.get(key) is flight:
                del self._flights[key]
            self._running.discard(flight)
            flight.session.in_flight -= 1
        if failure is None:
            flight.complete(answer)
        else:
            flight.fail(failure)
        report(flight, failure)

    async def _sample(self, flight: Flight) -> None:
        """Sample to the end, over as many engines as it takes."""
        try:
            async with asyncio.timeout(flight.deadline - time.monotonic()):
                while flight.finish is None:
                    await self._leg(flight, await self._engine(flight))
                    self._settle(flight)
                    if flight.finish is None:
                        self.metrics.continued.labels(flight.cut_by).inc()
        except TimeoutError:
            waited = time.time() - flight.started
            raise EngineUnavailable(
                f"call {flight.id} met its deadline after {waited:.1f} s, waiting for {flight.waiting_for}"
            ) from None

    async def _engine(self, flight: Flight) -> Engine:
        """An engine that takes the call. Raises EngineUnavailable when none does for too long, or too many were lost."""
        if flight.losses >= LOSSES:
            raise EngineUnavailable(
                f"call {flight.id} lost {flight.losses} engines in a row; last: {flight.waiting_for}"
            )
        flight.waiting_since = flight.waiting_since or time.monotonic()
        patience = flight.waiting_since + self.settings.engine_wait_s
        while True:
            if flight.cancelled:
                raise _Cancelled
            now = time.monotonic()
            engine = self.router.pick(flight.session.execution, now, flight.reserved)
            if engine is not None and not engine.asked:
                self._watch.ask(engine)
                flight.waiting_for = f"{engine.url} to say what it serves"
                await self.engines_changed.wait(WAKE_S)
                continue
            if engine is not None:
                self._release(flight)
                return engine
            due = self.router.due(now)
            if due is None:
                flight.waiting_for = self.router.waits_for()
            if now >= patience:
                waited = self.settings.engine_wait_s
                raise EngineUnavailable(f"no engine in {waited:g} s: waited for {flight.waiting_for}")
            # with a turn of its own from time to time: a change wakes only some of those who wait
            await self.engines_changed.wait(min(patience - now, WAKE_S, inf if due is None else due))

    def _release(self, flight: Flight) -> None:
        """Give back the room that is kept for a call."""
        if flight.reserved is not None:
            flight.reserved.reserved -= 1
            flight.reserved = None
            self.engines_changed.fire()

    async def _leg(self, flight: Flight, engine: Engine) -> None:
        """One request to one engine; leaves what it sampled in the flight."""
        base, version, ok = len(flight.ids), engine.version, True
        flight.legs += 1
        flight.engine, flight.last_engine = engine, engine.url
        flight.rid = f"{flight.id}-{flight.legs:04}"  # SGLang aborts whatever begins with a rid
        flight.heard = time.monotonic()
        flight.dispatched = flight.dispatched or time.time()
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
            engine.label = output.label or engine.label
            flight.losses = 0
            flight.cut_by = "aborted" if engine.admitting else "reroute"
            if output.finish != "abort":
                flight.finish = flight.finish or output.finish
            elif not output.ids and engine.admitting and not flight.cancelled:
                ok, flight.waiting_for = False, f"{engine.url} to stop aborting calls"
        except _Stopped:
            pass
        except EngineDown as error:
            ok, flight.cut_by, flight.waiting_for = False, "lost", f"an engine to come back ({error})"
            flight.losses = 0 if len(flight.ids) > base else flight.losses + error.held
            _LOG.warning(
                "engine lost", extra={"fields": {**ids_of(flight), "engine": engine.url, "why": str(error)}}
            )
        except asyncio.CancelledError:
            if not flight.dropped or flight.task.uncancel() > 0:
                raise
            flight.dropped, ok = False, False
            if flight.cut_by == "frozen":
                flight.losses += 1
                flight.waiting_for = f"an engine to come back ({engine.url} gave no sign of life)"
        finally:
            flight.engine = None
            self.router.end(engine, ok, time.monotonic())
            self.engines_changed.fire(WOKEN)

    def _body(self, flight: Flight, engine: Engine) -> dict:
        """/generate's body for what is still to be sampled."""
        left = flight.limit - len(flight.ids)
        if engine.limits is not None:
            left = min(left, engine.limits[1] - len(flight.prompt) - len(flight.ids))
        body = {
            "rid": flight.rid,
            "input_ids": orjson.Fragment(flight.prompt.json(flight.ids)),
            "sampling_params": {
                **flight.sampling,
                "max_new_tokens": left,
                "stop_token_ids": flight.codec.stop_ids,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if engine.cache_key is not None:
            # Without it an engine's cache hands out keys and values of older weights.
            body["extra_key"] = engine.cache_key
        return body

    def _refusal(self, flight: Flight, error: EngineRefused) -> BadRequest:
        """What the client is told; that a prompt is too long in the words it knows."""
        if len(flight.prompt) > self.longest_prompt:
            return ContextOverflow(len(flight.prompt), self.longest_prompt)
        return BadRequest(str(error))

    def _settle(self, flight: Flight) -> None:
        """After a leg that was cut: is there anything left to sample?"""
        if flight.finish is not None:
            return
        if flight.ids and flight.ids[-1] in flight.codec.stop_ids:
            flight.finish = "stop"
        elif len(flight.ids) >= flight.limit or len(flight.prompt) + len(flight.ids) > self.longest_prompt:
            flight.finish = "length"
        elif flight.cancelled:
            raise _Cancelled

    async def _record(self, flight: Flight, answer: Answer, id_prefix: str, failed: bool) -> None:
        """Write the call, then let later requests find it. Raises RecordingFailed when it is not durable."""
        sampled = time.time()
        record = call_record(flight, answer, sampled, id_prefix)
        await self._append(record)
        self.calls += 1
        untrainable = int(np.isnan(record.logprobs).sum())
        self.metrics.recorded(flight, answer, untrainable, sampled)
        node = call_node(flight, answer) if flight.ids else None
        context = bytes.fromhex(record.extra["context"])
        flight.session.remember(
            flight.id, flight.match.digest, context, node, answer.tool_calls, failed, answer.text
        )

    async def _append(self, record: Record) -> None:
        """Make a record durable. Raises RecordingFailed."""
        try:
            self._log.append(record)
            await self._commit.durable()
        except TrajtreeError as error:
            raise RecordingFailed(f"the {record.type} could not be recorded: {error}") from error

    def _gauges(self) -> dict[str, tuple[str, str, dict[str, float]]]:
        engines = self.router.engines
        return {
            "executions_open": ("Open executions.", "", {"": len(self.executions)}),
            "calls_under_way": ("Calls between request and durable record.", "", {"": len(self._running)}),
            "calls_waiting": (
                "Calls under way that no engine has taken.",
                "",
                {"": sum(f.engine is None and f.finish is None for f in self._running)},
            ),
            "engine_in_flight": (
                "Calls at an engine.",
                "engine",
                {url: e.in_flight for url, e in engines.items()},
            ),
            "engine_admitting": (
                "Whether an engine takes calls and did not lose the last one.",
                "engine",
                {url: float(e.serving) for url, e in engines.items()},
            ),
        }

    # --- reroutes and ends

    async def reroute(self, source: str, moves: Mapping[str, str], deadline_s: float) -> tuple[int, int]:
        """Empty an engine (paper 4.3): stop admitting, move routes and reserve room, abort there, continue elsewhere.

        Only open executions move: a route of another would count as load for ever. Returns (executions moved,
        calls that went on elsewhere) when none is left on the source. Raises EngineUnavailable when some are
        left at the deadline.
        """
        now = time.time()
        moves = {name: url for name, url in moves.items() if self.executions.is_open(name, now)}
        self.router.stop_admitting(source)
        self.router.move(moves)
        for flight in self._running:
            if flight.engine is not None and flight.engine.url == source and flight.reserved is None:
                flight.reserved = self.router.reserve(flight.session.execution)
        engine = self.router.engines[source]
        flights = [f for f in self._running if f.engine is engine]
        await evict(flights, time.monotonic() + deadline_s, self._client, self.engines_changed)
        left = [f.id for f in self._running if f.engine is engine]
        if left:
            raise EngineUnavailable(f"calls left on {source} after {deadline_s} s: {', '.join(left)}")
        self.reroutes += 1
        self.metrics.reroutes.inc()
        return len(moves), sum(1 for f in flights if f.finish is None or f.last_engine != source)

    def _cancel(self, flight: Flight, reason: ProxyError) -> None:
        """End a call without an answer; what it sampled so far is recorded as aborted."""
        flight.cancelled = reason
        for key in [k for k, f in self._flights.items() if f is flight]:
            del self._flights[key]
        self.engines_changed.fire()
        if flight.engine is not None:
            deadline = time.monotonic() + ABORT_GRACE_S
            task = asyncio.create_task(evict([flight], deadline, self._client, self.engines_changed))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Take no more calls, let those under way end for the grace time, abort and record the rest; release all."""
        self._stopping = True
        if self._running and self.settings.grace_s:
            await asyncio.wait([f.task for f in self._running], timeout=self.settings.grace_s)
        flights = list(self._running)
        for flight in flights:
            self._cancel(flight, EngineUnavailable(_STOPS))
        await asyncio.gather(*(f.task for f in flights), *self._background, return_exceptions=True)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._watch.close()
        self._client.close()
        self._log.close()


class _Stopped(Exception):
    """A stop string ended the answer; leaving the exchange closes its connection, which ends it at the engine."""


class _Cancelled(Exception):
    """The call was cancelled; `flight.cancelled` says why."""


def _asked(request: Request) -> tuple:
    """What a retry has in common with the call that it repeats, beside the conversation."""
    schema = None if request.schema is None else orjson.dumps(request.schema, option=orjson.OPT_SORT_KEYS)
    return request.max_tokens, request.stop, request.prefill, request.forced, schema


def _landed(flight: Flight, task: asyncio.Task) -> None:
    """Nobody may wait for a call whose task broke."""
    if not flight.done:
        broke = None if task.cancelled() else task.exception()
        _LOG.error("call broke", exc_info=broke, extra={"fields": ids_of(flight)})
        cause = "it was cancelled" if broke is None else repr(broke)
        flight.fail(ProxyError(f"call {flight.id} ended by an internal error: {cause}"))
