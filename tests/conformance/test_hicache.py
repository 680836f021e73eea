"""Calls that move between two real SGLang servers which share keys and values: HiCache on a Mooncake store, over TCP."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from conformance_engines import WAIT_S, Engine, until
from conformance_proxy import Proxy, begun, check_exact, echo, path_of, say, user
from gyre_trajtree import Call
from hicache_servers import PAGE, HicacheServer, MooncakeMaster, missing

MESSAGES = "messages"
TEXT = "the quick brown fox jumps over the lazy dog and then it sleeps for a while\n"
ANSWER = 1500
"""Tokens of an answer that is still under way when its call is rerouted."""


@pytest.fixture(scope="module")
def sharing(models, tmp_path_factory) -> Iterator[list[Engine]]:
    """Two servers on one store, both with weights "1"."""
    reason = missing()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    logs = tmp_path_factory.mktemp("hicache")
    with ExitStack() as started:
        master = MooncakeMaster(logs / "master.log")
        started.callback(master.stop)
        master.await_ready()
        servers = []
        for name in ("a", "b"):  # both at once: most of their start is the same imports
            server = HicacheServer(models["1"], logs / f"{name}.log", master, "--weight-version", "1")
            started.callback(server.stop)
            servers.append(server)
        for server in servers:
            server.await_ready()
        yield [Engine(server.log.stem, server.url, models) for server in servers]


@pytest.fixture
def engines(sharing: list[Engine]) -> Iterator[list[Engine]]:
    """Both with their first weights and nothing in their own caches; the store keeps what it has."""
    yield sharing
    for engine in sharing:
        engine.restore()


@dataclass
class Counts:
    """What a server counted: ended requests, tokens it put into the store, and prompt tokens that it found, by place."""

    requests: int = 0
    stored: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0


METRICS = {
    "num_requests_total": "requests",
    "backuped_tokens_total": "stored",
    'cached_tokens_total{cache_source="device"': "device",
    'cached_tokens_total{cache_source="host"': "host",
    'cached_tokens_total{cache_source="storage"': "storage",
}


def counts(engine: Engine) -> Counts:
    found = Counts()
    for line in engine.client.get("/metrics").text.splitlines():
        match = re.fullmatch(r'sglang:((\w+)(?:\{cache_source="\w+")?).*\} (\S+)', line)
        field = match and (METRICS.get(match[1]) or METRICS.get(match[2]))
        if field:
            setattr(found, field, getattr(found, field) + int(float(match[3])))
    return found


def counting(engine: Engine) -> Callable[[], Counts]:
    """Tells what an engine counted since."""
    before = vars(counts(engine))
    return lambda: Counts(**{name: count - before[name] for name, count in vars(counts(engine)).items()})


def whole(tokens: int) -> int:
    """How many of the tokens of a path are stored: whole pages, and never the last token, whose keys nobody computed."""
    return (tokens - 1) // PAGE * PAGE


def rerouted(
    proxy: Proxy, execution: str, source: Engine, destination: Engine
) -> tuple[list[Call], int, Counts]:
    """Three turns, all at `source` until the third is rerouted in the middle of its answer.

    Gives the calls; how many tokens of the third's path were surely in the store by then; and what the destination
    counted for the one request it got.
    """
    proxy.serve(source, destination)
    proxy.start_at(execution, source)
    at_source, at_destination = counting(source), counting(destination)
    conversation = [user(f"{execution}\n{TEXT * 8}")]
    for turn in range(2):
        answer = proxy.post(execution, MESSAGES, **say(MESSAGES, conversation, 100))
        conversation += [*echo(MESSAGES, answer), user(f"{turn} more\n{TEXT}")]
    calls = proxy.calls()
    past = whole(len(path_of(calls, calls[1])) + len(calls[1].output_ids))
    assert past > 400
    with proxy.stream(execution, MESSAGES, **say(MESSAGES, conversation, ANSWER)) as response:
        lines = begun(response)
        until(lambda: at_source().stored >= past)
        assert at_destination() == Counts()
        moves = {execution: destination.url}
        moved = proxy.admin("POST", "reroute", source=source.url, moves=moves, deadline_s=WAIT_S)
        assert moved == {"moved": 1, "continued": 1}
        assert "message_stop" in "".join(lines)
    until(lambda: at_destination().requests == 1)
    calls = proxy.calls()
    assert [call.parent for call in calls] == [None, calls[0].id, calls[1].id]
    assert (len(calls[2].output_ids), calls[2].engine) == (ANSWER, destination.url)
    return calls, past, at_destination()


def test_a_rerouted_call_finds_its_past_in_the_store(engines, proxy, references):
    source, destination = engines
    calls, past, counted = rerouted(proxy, "same-weights", source, destination)
    assert counted.device == counted.host == 0
    assert past <= counted.storage <= whole(len(path_of(calls, calls[2])) + ANSWER)
    assert calls[2].versions == [[1, 0, ANSWER]]
    check_exact(calls, references)


def test_other_weights_take_nothing_from_the_store(engines, proxy, references, models):
    source, destination = engines
    destination.update(model_path=str(models["2"]), weight_version="2")
    calls, past, counted = rerouted(proxy, "other-weights", source, destination)
    assert counted.device == counted.host == counted.storage == 0
    (first, _, middle), (second, start, end) = calls[2].versions
    assert (first, second, end) == (1, 2, ANSWER) and 0 < middle == start < ANSWER
    check_exact(calls, references)

    prompt = path_of(calls, calls[2])
    destination.flush()

    def ask(**key: str) -> tuple[int, float]:
        """Tokens that the store had under that key, and how far log-probs are from those of weights "2"."""
        answer = destination.answer(20, input_ids=prompt, **key)
        truth = references["2"].logprobs(prompt, answer["output_ids"])
        sampled = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        details = answer["meta_info"].get("cached_tokens_details") or {"storage": 0}
        return details["storage"], max(abs(a - b) for a, b in zip(sampled, truth, strict=True))

    for stored, error in (ask(), ask(extra_key="3")):
        assert stored == 0 and error < 2e-4
    stored, error = ask(extra_key="2")  # what the moved call left there
    assert stored >= past and error < 2e-4
    # the keys and values of weights "1" are there too, and wrong here: only the key keeps them from the call
    stored, error = ask(extra_key="1")
    assert stored >= past and error > 0.01
