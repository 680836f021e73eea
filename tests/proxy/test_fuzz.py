"""Whatever is sent, the proxy answers in the protocol's words, its log stays whole and its sessions go on."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import pytest
from fuzz_bodies import ALL, RICH, VALUES, damage, damaged, places, spoilt, written
from gyre_proxy.bodies import json_object, request_body
from gyre_proxy.codec import Codec
from gyre_proxy.conversation import Request
from gyre_proxy.dialects import BY_PATH
from gyre_proxy.dialects.readings import Readings
from gyre_proxy.errors import BadRequest
from gyre_trajtree import Call, read_run_log
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol_bodies import BODIES
from proxy_stage import DEADLINE_S, Stage

fuzzing = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
PATHS = sorted(RICH)


@pytest.fixture(scope="module")
def target(codec: Codec, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """One proxy for the whole file: what one body poisons, a later one finds."""
    stage = Stage()
    engine = stage.engine(codec, ["Fine."])
    record = tmp_path_factory.mktemp("fuzz") / "run.jsonl"
    proxy = stage.proxy(engines=(engine.url,), tokenizer=tokenizer_dir, record=record)
    with httpx.Client(base_url=f"{proxy.url}/x/e/v1/", timeout=DEADLINE_S) as client:
        yield SimpleNamespace(
            client=client, record=record, stage=stage, engine=engine, tokenizer=tokenizer_dir
        )
    stage.clear()
    stage.close()


def spelled(path: tuple) -> str:
    """A path as error messages write it."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


@pytest.mark.parametrize("path", PATHS)
def test_one_wrong_value_is_read_or_refused_where_it_stands(path):
    """Without a server: many more bodies, and the field at fault is the one that was changed or its neighbour."""

    @settings(fuzzing, max_examples=300)
    @given(st.sampled_from(list(places(RICH[path]))), VALUES)
    def attempt(place, value):
        body = copy.deepcopy(RICH[path])
        damage(body, place, "set", value)
        try:
            assert BY_PATH[path].parse(json_object({}, written(body))).conversation.messages
        except BadRequest as error:
            assert "\n" not in str(error) and len(str(error)) < 500
            if error.param is not None:
                named = error.param
                assert named.startswith(spelled(place[:-1])) or spelled(place).startswith(named), (
                    place,
                    named,
                )

    attempt()


def test_what_was_read_before_changes_nothing():
    """Requests of three protocols in any order, damaged or not, all with the memory of one execution."""
    readings = Readings()
    long = [grown(path) for path in PATHS]

    @settings(fuzzing, max_examples=300)
    @given(st.sampled_from(range(len(PATHS))), st.data())
    def attempt(which, data):
        body = copy.deepcopy(long[which])
        field = "input" if "input" in body else "messages"
        del body[field][data.draw(st.integers(1, len(body[field]))) :]
        if data.draw(st.booleans()):
            body = data.draw(damaged(body))
        raw, dialect = written(body), BY_PATH[PATHS[which]]
        assert meant(dialect, raw, readings) == meant(dialect, raw, None)

    attempt()


def grown(path: str) -> dict:
    """A valid body whose items come three times."""
    field = "input" if path == "responses" else "messages"
    return {**RICH[path], field: json.loads(json.dumps(RICH[path][field] * 3))}


def meant(dialect: ModuleType, raw: bytes, readings: Readings | None) -> Request | str:
    """The request, or why it is none."""
    try:
        return dialect.parse(request_body({}, raw, readings, dialect.Reader))
    except BadRequest as error:
        return f"{error} ({error.param})"


def send(target: SimpleNamespace, path: str, body: bytes) -> httpx.Response:
    """Post the bytes; whatever they are, the answer is one of the protocol's."""
    answer = target.client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        check_error(path, answer)
    elif answer.headers["content-type"] == "application/json":
        assert isinstance(answer.json(), dict)
    else:
        assert answer.text.startswith(("event: ", "data: ")) and answer.text.endswith("\n\n")
    return answer


def check_error(path: str, answer: httpx.Response) -> None:
    """An error of the protocol: its shape, one line that is not too long to read."""
    body = answer.json()
    assert answer.status_code in (400, 413), answer.text
    if path.startswith("messages"):
        assert set(body) == {"type", "error"} and body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert message and len(message) < 1000 and message.isprintable(), message


def check_going_on(target: SimpleNamespace, path: str) -> None:
    """A valid request of the same execution is answered."""
    answer = target.client.post(path, content=json.dumps(BODIES[path]).encode())
    assert answer.status_code == 200, answer.text


def check_log(target: SimpleNamespace) -> None:
    """Every line can be read, and another proxy goes on from it."""
    calls = [record for record in read_run_log(target.record) if isinstance(record, Call)]
    assert calls
    proxy = target.stage.proxy(engines=(target.engine.url,), tokenizer=target.tokenizer, record=target.record)
    for path in PATHS:
        assert proxy.post(path, BODIES[path]).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_the_bodies_are_valid_before_they_are_damaged(target, path):
    for body in ALL[path]:
        answer = send(target, path, written(body))
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", PATHS)
def test_a_damaged_body_is_answered_or_refused(target, path):
    @fuzzing
    @given(damaged(*ALL[path]))
    def attempt(body):
        send(target, path, written(body))
        check_going_on(target, path)

    attempt()
    check_log(target)


@pytest.mark.parametrize("path", PATHS)
def test_spoilt_bytes_are_answered_or_refused(target, path):
    @fuzzing
    @given(spoilt(RICH[path]))
    def attempt(data):
        send(target, path, data)

    attempt()
    check_going_on(target, path)
    check_log(target)


@pytest.mark.parametrize("path", PATHS)
def test_a_damaged_history_does_not_spoil_the_session(target, path):
    """Streamed too, and as the second turn of a conversation that was recorded."""
    field = "input" if path == "responses" else "messages"

    @settings(fuzzing, max_examples=40)
    @given(damaged({field: RICH[path][field]}), st.booleans())
    def attempt(body, stream):
        send(target, path, written({**RICH[path], **body, "stream": stream}))
        check_going_on(target, path)

    attempt()
    check_log(target)


def test_tokens_of_damaged_bodies_are_counted_or_refused(target):
    @settings(fuzzing, max_examples=40)
    @given(damaged(*ALL["messages"]))
    def attempt(body):
        send(target, "messages/count_tokens", written(body))

    attempt()
