"""What a request may ask for, and the thread that owns the model."""

import math
import queue
import shutil
import threading

import pytest
from gyre_trainer.engine import Engine, GenerateRequest
from gyre_trainer.errors import EngineReleased, ModelError, RequestError, SettingsError
from gyre_trainer.generation import Sampling

WAIT_S = 30


class Running:
    """An engine whose outputs and failures arrive in queues."""

    def __init__(self, model, **options):
        self.outputs: queue.Queue = queue.Queue()
        self.failures: queue.Queue = queue.Queue()
        self.engine = Engine(
            model, self._deliver, self.failures.put, version="1", context_length=4000, seed=0, **options
        )
        self.engine.start()

    def _deliver(self, outputs) -> None:
        for output in outputs:
            self.outputs.put(output)

    def next(self):
        return self.outputs.get(timeout=WAIT_S)

    def finals(self, count: int) -> dict:
        done = {}
        while len(done) < count:
            output = self.next()
            if output.finish:
                done[output.rid] = output
        return done


@pytest.fixture
def run(models):
    started: list[Engine] = []

    def run(**options) -> Running:
        running = Running(models["1"], **options)
        started.append(running.engine)
        return running

    yield run
    for engine in started:
        engine.close()


def request(rid: str, new: int = 5, stream: bool = False, prompt=(5, 6, 7)) -> GenerateRequest:
    return GenerateRequest(rid, list(prompt), Sampling(max_new_tokens=new, ignore_eos=True), stream=stream)


# --- requests ---


def test_a_request_is_read_field_by_field():
    body = {
        "input_ids": [1, 2],
        "rid": "r",
        "stream": True,
        "return_logprob": True,
        "extra_key": "7",
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "something_newer": 1,
        "sampling_params": {
            "max_new_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "stop_token_ids": [4],
            "ignore_eos": True,
            "sampling_seed": 9,
            "skip_special_tokens": False,
            "n": 1,
            "stop": None,
        },
    }
    read = GenerateRequest.parse(body)
    assert (read.rid, read.input_ids, read.stream, read.return_logprob) == ("r", [1, 2], True, True)
    assert read.sampling == Sampling(3, 0.5, 0.9, 5, 0.1, frozenset({4}), True, 9)
    assert read.extra_key != GenerateRequest.parse({"input_ids": [1], "extra_key": "8"}).extra_key


def test_defaults_are_sglangs():
    read = GenerateRequest.parse({"input_ids": [1]})
    assert read.sampling == Sampling(128, 1.0, 1.0, 0, 0.0, frozenset(), False, None)
    assert not read.stream and not read.return_logprob and read.rid
    assert GenerateRequest.parse({"input_ids": [1]}).rid != read.rid
    sampling = {"max_new_tokens": None, "top_k": -1}
    unlimited = GenerateRequest.parse({"input_ids": [1], "sampling_params": sampling}).sampling
    assert (unlimited.max_new_tokens, unlimited.top_k) == (None, 0)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "input_ids"),
        ({"text": "hello"}, "text is not supported"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [1, 2.5]}, "input_ids"),
        ({"input_ids": [1, True]}, "input_ids"),
        ({"input_ids": [[1], [2]]}, "input_ids"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [96]}, "vocabulary, 0 to 95"),
        ({"input_ids": [-1]}, "vocabulary"),
        ({"input_ids": [10**30]}, "vocabulary"),
        ({"input_ids": [1] * 200}, "longer than the model's context length (200 tokens)"),
        ({"input_ids": [1] * 190, "sampling_params": {"max_new_tokens": 11}}, "190 tokens of input and 11"),
        ({"input_ids": [1], "rid": 5}, "rid"),
        ({"input_ids": [1], "stream": "yes"}, "stream"),
        ({"input_ids": [1], "logprob_start_len": 0}, "logprob_start_len"),
        ({"input_ids": [1], "top_logprobs_num": 3}, "top_logprobs_num"),
        ({"input_ids": [1], "lora_path": "x"}, "lora_path"),
        ({"input_ids": [1], "sampling_params": [1]}, "sampling_params"),
        *(
            ({"input_ids": [1], "sampling_params": {name: value}}, name)
            for name, value in [
                ("temperature", -1),
                ("temperature", "hot"),
                ("temperature", float("nan")),
                ("temperature", True),
                ("top_p", 0),
                ("top_p", 1.1),
                ("top_k", 0),
                ("top_k", 2.0),
                ("min_p", 2),
                ("max_new_tokens", -1),
                ("max_new_tokens", 1.5),
                ("stop", ["x"]),
                ("stop_token_ids", ["x"]),
                ("stop_token_ids", 5),
                ("n", 2),
                ("repetition_penalty", 1.2),
                ("presence_penalty", 0.5),
                ("logit_bias", {"3": 1.0}),
                ("sampling_seed", "x"),
                ("ignore_eos", 1),
                ("no_such_thing", 1),
            ]
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(body, says):
    with pytest.raises(RequestError) as error:
        GenerateRequest.parse(body).check(vocab=96, context=200)
    assert says in str(error.value) and "\n" not in str(error.value)


# --- the thread ---


def test_requests_of_many_threads_are_each_answered_once(run):
    running = run(max_running=4)

    def submit(thread: int) -> None:
        for index in range(10):
            running.engine.submit(request(f"{thread}.{index}", new=1 + index % 4, prompt=[5 + thread, 6]))

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    done = running.finals(40)
    assert {rid: len(o.output_ids) for rid, o in done.items()} == {
        f"{t}.{i}": 1 + i % 4 for t in range(4) for i in range(10)
    }
    assert running.outputs.empty()


EXTREMES = [
    *({"top_k": 10**30}, {"temperature": 1e300}, {"temperature": 1e-5}, {"temperature": 1e-300}),
    *({"top_p": 1e-300}, {"min_p": 1.0}, {"sampling_seed": -(10**40)}, {"stop_token_ids": [-1, 10**30]}),
]


def test_extreme_but_legal_sampling_is_served(run):
    running = run()
    for index, extreme in enumerate(EXTREMES):
        body = {"input_ids": [5, 6], "rid": str(index), "sampling_params": {"max_new_tokens": 4} | extreme}
        running.engine.submit(GenerateRequest.parse(body))
    done = running.finals(len(EXTREMES))
    assert all(math.isfinite(logprob) for output in done.values() for logprob in output.logprobs)
    assert running.failures.empty()


def test_commands_take_effect_in_the_order_sent(run):
    running = run()
    running.engine.pause("in_place")
    running.engine.submit(request("a"))
    running.engine.abort("a")
    running.engine.submit(request("b"))
    running.engine.resume()
    done = running.finals(2)
    assert (done["a"].finish["type"], done["a"].output_ids) == ("abort", [])
    assert done["b"].finish == {"type": "length", "length": 5}


def test_an_update_in_the_middle_of_a_request_is_seen_in_its_spans(run, models):
    running = run()
    running.engine.submit(request("a", new=3900, stream=True))
    running.next()
    running.engine.update(str(models["2"]), "2").result(WAIT_S)
    while running.next().spans[-1][0] == "1":
        pass
    running.engine.abort("a")
    (output,) = running.finals(1).values()
    assert [version for version, _, _ in output.spans] == ["1", "2"]
    assert running.engine.model_path == str(models["2"])


def test_a_failed_update_leaves_the_old_weights_in_force(run, models, tmp_path):
    running = run()
    before = running.engine.checksums().result(WAIT_S)
    torn = shutil.copytree(models["2"], tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be read"):
        running.engine.update(str(torn), "2").result(WAIT_S)
    assert running.engine.checksums().result(WAIT_S) == before
    assert running.engine.generation.version == "1"
    running.engine.submit(request("a"))
    assert running.finals(1)["a"].spans == [("1", 0, 5)]


def test_checksums_tell_weights_apart(run, models):
    running = run()
    first = running.engine.checksums().result(WAIT_S)
    running.engine.update(str(models["2"]), "2").result(WAIT_S)
    second = running.engine.checksums().result(WAIT_S)
    running.engine.update(str(models["1"]), "3").result(WAIT_S)
    assert first.keys() == second.keys() and first != second
    assert running.engine.checksums().result(WAIT_S) == first


def test_released_memory_comes_back_with_the_weights_of_the_last_update(run, models, tmp_path):
    running = run()
    running.engine.release().result(WAIT_S)
    assert running.engine.released and not running.engine.ready
    with pytest.raises(EngineReleased, match="resume_memory_occupation"):
        running.engine.submit(request("early"))
    with pytest.raises(RequestError, match="released"):
        running.engine.checksums().result(WAIT_S)
    passing = shutil.copytree(models["2"], tmp_path / "passing")
    running.engine.update(str(passing), "2").result(WAIT_S)
    shutil.rmtree(passing)
    running.engine.occupy().result(WAIT_S)
    assert running.engine.ready
    running.engine.update(str(models["2"]), "2").result(WAIT_S)
    running.engine.release().result(WAIT_S)
    running.engine.occupy().result(WAIT_S)
    running.engine.submit(request("late"))
    assert running.finals(1)["late"].spans == [("2", 0, 5)]


def test_a_request_that_a_release_overtakes_is_aborted_at_once(run):
    running, gate = run(), threading.Event()
    running.engine._send(gate.wait)
    released = running.engine.release()
    running.engine.submit(request("late"))
    gate.set()
    released.result(WAIT_S)
    output = running.finals(1)["late"]
    assert (output.finish["type"], output.output_ids) == ("abort", [])
    running.engine.occupy().result(WAIT_S)


def test_a_fault_of_the_model_is_reported_and_ends_the_thread(run, monkeypatch):
    running = run()

    def broken(batch, cache):
        raise RuntimeError("the model broke")

    monkeypatch.setattr(running.engine.generation.model, "forward", broken)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    running.engine.submit(request("a"))
    assert "the model broke" in str(running.failures.get(timeout=WAIT_S))
    running.engine.close()
    assert not running.engine.alive


def test_a_context_the_model_was_not_made_for_is_refused(models):
    with pytest.raises(SettingsError, match="between 2 and 4096"):
        Engine(models["1"], print, print, context_length=4097)


def test_weights_that_find_no_memory_leave_the_old_ones_in_force(run, models, monkeypatch):
    running = run()

    def without_memory(*arguments):
        raise RuntimeError("not enough memory\nmore of it")

    monkeypatch.setattr("gyre_trainer.engine.Qwen3.load", without_memory)
    version = running.engine.generation.version
    with pytest.raises(ModelError, match="cannot be loaded: not enough memory$"):
        running.engine.update(str(models["2"]), "9").result(WAIT_S)
    assert running.engine.alive and running.engine.generation.version == version
