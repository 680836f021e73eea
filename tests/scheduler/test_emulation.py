"""Emulated cells: engines that gyre-proxy takes for SGLang, and whole live runs over them that lose nothing."""

import asyncio
import json
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from gyre_proxy.engine_client import EngineClient, EngineDown, EngineRefused
from gyre_scheduler.emulation import EmulatedPool, EmulatedTrainer, Times
from gyre_scheduler.emulation_engine import EmulatedEngine
from gyre_scheduler.errors import ProtocolError
from gyre_scheduler.events import StreamDrained, Supply
from gyre_scheduler.settings import SchedulerSettings
from gyre_scheduler.simulator import Costs
from gyre_scheduler.workloads import TwoLevelLognormal

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from elastic_run import Pace, run_live

DEADLINE_S = 20
ENDLESS = 1e6
TIMES = Times((0.0, 0.0), 2, 0.0, 0.0, 0.0, 0.0)


def under_deadline(work):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            return await work()

    return asyncio.run(bounded())


@asynccontextmanager
async def serving(**settings):
    engine, client = EmulatedEngine(**settings), EngineClient()
    await engine.start()
    try:
        yield engine, client
    finally:
        client.close()
        await engine.stop()


def request(rid="a", tokens=5, ids=(7, 8), **more):
    sampling = {"max_new_tokens": tokens, "stop_token_ids": [9]}
    return {"rid": rid, "input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, **more}


async def reached(engine, calls):
    while engine.running != calls:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_takes_its_time_and_has_ids_and_logprobs(streamed):
    async def work():
        async with serving(token_s=0.002, token=3, version=4) as (engine, client):
            begun, seen = time.monotonic(), []
            output = await client.generate(engine.url, request(), seen.append if streamed else None)
            return output, time.monotonic() - begun, seen

    output, seconds, seen = under_deadline(work)
    assert (output.ids, output.logprobs) == ([3] * 5, [-1.0] * 5)
    assert (output.finish, output.label, output.spans) == ("length", "4", [(4, 0, 5)])
    assert seconds >= 0.0095
    assert not streamed or seen[-1].finish == "length"


def test_an_answer_of_its_own_length_stops_and_goes_on_where_another_engine_left():
    async def work():
        async with serving(token_s=0, answer_tokens=6, token=3) as (engine, client):
            whole = await client.generate(engine.url, request(tokens=100))
            rest = await client.generate(engine.url, request(tokens=98, ids=(7, 8, 3, 3)))
            return whole, rest

    whole, rest = under_deadline(work)
    assert (whole.ids, whole.finish) == ([3] * 5 + [9], "stop")
    assert (rest.ids, rest.finish) == ([3] * 3 + [9], "stop")


def test_an_aborted_call_answers_with_what_it_has():
    async def work():
        async with serving(token_s=ENDLESS) as (engine, client):
            calls = [asyncio.create_task(client.generate(engine.url, request(rid))) for rid in ("a-1", "b-1")]
            await reached(engine, 2)
            await client.abort(engine.url, "a")
            aborted = await calls[0]
            assert engine.running == 1
            calls[1].cancel()
            await reached(engine, 0)
            return aborted

    aborted = under_deadline(work)
    assert (aborted.finish, aborted.ids) == ("abort", [])


def test_a_paused_engine_samples_nothing_and_other_weights_label_what_comes_after():
    async def work():
        async with serving(token_s=0.001) as (engine, client):
            await client._connections.post(engine.url, "/pause_generation", b'{"mode": "in_place"}')
            call = asyncio.create_task(client.generate(engine.url, request()))
            await reached(engine, 1)
            assert await client.alive(engine.url)
            await client._connections.post(
                engine.url, "/update_weights_from_disk", json.dumps({"weight_version": "1"}).encode()
            )
            assert not call.done()
            await client._connections.post(engine.url, "/continue_generation", b"{}")
            return await call, await client.weights(engine.url)

    output, weights = under_deadline(work)
    assert (output.spans, weights) == ([(1, 0, 5)], "1")


def test_what_an_engine_cannot_take_is_refused():
    async def work():
        async with serving(context_length=10) as (engine, client):
            assert await client.limits(engine.url) == (3, 10)
            with pytest.raises(EngineRefused, match="longer than"):
                await client.generate(engine.url, request(ids=[7] * 9))
            with pytest.raises(EngineRefused, match="input_ids"):
                await client.generate(engine.url, {"rid": "x"})
            engine.released = True
            with pytest.raises(EngineDown, match="released"):
                await client.generate(engine.url, request())

    under_deadline(work)


def test_a_cell_with_calls_in_hand_does_not_leave_rollout():
    async def work():
        client = EngineClient()
        async with EmulatedPool([EmulatedEngine(ENDLESS)], TIMES) as pool:
            call = asyncio.create_task(client.generate(pool.engines[0], request()))
            await reached(pool._engines[0], 1)
            with pytest.raises(ProtocolError, match="1 calls in hand"):
                await pool.to_training(0)
            call.cancel()
            client.close()

    under_deadline(work)


def test_micro_steps_wait_for_a_training_cell_and_drain_once():
    async def work():
        events, served = [], {}
        drained = asyncio.Event()

        def post(event):
            events.append(event)
            if isinstance(event, StreamDrained):
                drained.set()

        async def serve(engines, version):
            served.update(dict.fromkeys(engines, version))

        async with EmulatedPool([EmulatedEngine(), EmulatedEngine()], TIMES) as pool:
            trainer = EmulatedTrainer(pool, post, serve)
            await trainer.admit(0, 1, ())
            await trainer.close_stream(1)
            assert events == [Supply(1, 2)]
            await pool.to_training(1)
            await drained.wait()
            await trainer.step(1, (1,))
            await trainer.publish(1)
            assert served == {0: 1}
            assert await pool.to_rollout(1) == 1
        return events

    assert under_deadline(work) == [Supply(1, 2), Supply(1, 1), Supply(1, 0), StreamDrained(1)]


@pytest.mark.parametrize("policy, phi, mu", [("elastic", 0.5, 2), ("async", 1, 1), ("colocate", 0, 3)])
def test_a_live_run_ends_replays_and_loses_nothing(policy, phi, mu, tmp_path):
    settings = SchedulerSettings(
        policy=policy, phi=phi, mu=mu, steps=2, group_size=2, groups_per_step=2, cells=(3, 3, 3)
    )
    costs = Costs(executions_per_node=0.75, micro_steps_per_group=2)
    live = asyncio.run(
        run_live(
            settings, TwoLevelLognormal(), costs, 0, Pace(hour_s=0.4, token_s=0.01, call_s=0.3), tmp_path
        )
    )
    assert live.faults == []
    assert live.executions >= settings.steps * 4
    assert (live.switches > 0) and live.overheads_s.keys() >= {
        "execution",
        "to_training",
        "update",
        "publish",
    }
