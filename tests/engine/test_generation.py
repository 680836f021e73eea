"""The batching state machine: whatever happens to a sequence, its tokens and log-probs are those it would
have alone.
"""

import random
from collections import Counter

import pytest
import torch
from gyre_trainer import generation as generation_module
from gyre_trainer.errors import EngineError, RequestError
from gyre_trainer.generation import Generation, Sampling, sample
from gyre_trainer.model_qwen3 import Qwen3
from hypothesis import given, settings
from hypothesis import strategies as st

GREEDY = Sampling(max_new_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def weights(models):
    return {version: Qwen3.load(directory) for version, directory in models.items()}


@pytest.fixture(autouse=True)
def _one_thread_no_gradients():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


@pytest.fixture
def make(weights):
    def make(**options) -> Generation:
        return Generation(weights["1"], "1", **{"context": 128, "seed": 0} | options)

    return make


def finish(generation: Generation) -> dict:
    """Step until idle; the final output of each request."""
    done = {}
    while not generation.idle:
        done |= {o.rid: o for o in generation.step() if o.finish}
    return done


def prompt_of(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 96) for _ in range(length)]


def near(expected):
    return pytest.approx(expected, abs=1e-5)


# --- what is generated ---


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=9),
    st.integers(1, 5),
)
@settings(max_examples=25, deadline=None)
def test_a_sequence_does_not_depend_on_its_neighbours(weights, requests, max_running):
    """Any lengths, arrival steps and batch size: greedy tokens and log-probs equal those of the sequence
    alone.
    """
    together = Generation(weights["1"], "1", context=128, max_running=max_running, cached=2)
    arrivals = [
        (step, str(i), prompt_of(i // 2, length), Sampling(new, 0.0, ignore_eos=True))
        for i, (length, new, step) in enumerate(requests)
    ]
    done = {}
    for now in range(7):
        for step, rid, prompt, sampling in arrivals:
            if step == now:
                together.add(rid, prompt, sampling)
        done |= {o.rid: o for o in together.step() if o.finish}
    done |= finish(together)
    for _, rid, prompt, sampling in arrivals:
        alone = Generation(weights["1"], "1", context=128, max_running=1, cached=0)
        alone.add(rid, prompt, sampling)
        expected = finish(alone)[rid]
        assert done[rid].output_ids == expected.output_ids
        assert done[rid].logprobs == near(expected.logprobs)


def test_logprobs_are_of_the_distribution_at_the_requests_temperature(make, references):
    generation = make()
    temperatures = {"cold": 0.5, "plain": 1.0, "hot": 1.7, "greedy": 0.0}
    for rid, temperature in temperatures.items():
        generation.add(rid, prompt_of(1, 20), Sampling(10, temperature, ignore_eos=True))
    for rid, output in finish(generation).items():
        at = temperatures[rid] or 1.0
        expected = references["1"].logprobs(prompt_of(1, 20), output.output_ids, at)
        assert output.logprobs == near(expected)


def test_a_long_prompt_in_pieces_equals_one_in_whole(make, monkeypatch):
    prompts = {str(n): prompt_of(n, n) for n in (70, 33, 9, 1)}
    whole, pieces = make(), make()
    for generation in (whole, pieces):
        for rid, prompt in prompts.items():
            generation.add(rid, prompt, GREEDY)
    expected = finish(whole)
    monkeypatch.setattr(generation_module, "PROMPT_PIECE", 8)
    monkeypatch.setattr(generation_module, "STEP_TOKENS", 14)
    for rid, output in finish(pieces).items():
        assert output.output_ids == expected[rid].output_ids
        assert output.logprobs == near(expected[rid].logprobs)


def test_a_matched_stop_token_is_kept_and_named(make):
    generation = make()
    generation.add("free", prompt_of(5, 12), GREEDY)
    ids = finish(generation)["free"].output_ids
    first = ids.index(ids[3])
    stopping = Sampling(max_new_tokens=8, temperature=0.0, stop_token_ids=frozenset({ids[3]}))
    generation.add("stop", prompt_of(5, 12), stopping)
    generation.add(
        "ignored", prompt_of(5, 12), Sampling(8, 0.0, stop_token_ids=stopping.stop_token_ids, ignore_eos=True)
    )
    done = finish(generation)
    assert done["stop"].output_ids == ids[: first + 1]
    assert done["stop"].finish == {"type": "stop", "matched": ids[3]}
    assert done["ignored"].output_ids == ids
    assert done["ignored"].finish == {"type": "length", "length": 8}


def test_the_models_eos_stops_and_beats_the_length_limit(make):
    generation = make(seed=3)
    for index in range(60):
        generation.add(str(index), prompt_of(index, 5), Sampling(max_new_tokens=30, temperature=1.5))
    done = finish(generation)
    stopped = [o for o in done.values() if o.finish["type"] == "stop"]
    assert stopped
    assert all(o.output_ids[-1] == 2 and o.finish["matched"] == 2 for o in stopped)
    assert all(2 not in o.output_ids[:-1] for o in done.values())


def test_no_new_tokens_and_as_many_as_fit(make):
    generation = make(context=32)
    generation.add("none", prompt_of(1, 10), Sampling(max_new_tokens=0))
    generation.add("fill", prompt_of(2, 10), Sampling(max_new_tokens=None, ignore_eos=True))
    done = finish(generation)
    assert (done["none"].output_ids, done["none"].finish) == ([], {"type": "length", "length": 0})
    assert done["none"].spans == [("1", 0, 0)]
    assert len(done["fill"].output_ids) == 20  # two positions stay free, as in SGLang


def test_streaming_outputs_grow_by_one_and_end_with_the_whole(make):
    generation = make()
    generation.add("s", prompt_of(1, 6), GREEDY, stream=True)
    generation.add("quiet", prompt_of(1, 6), GREEDY)
    seen = []
    while not generation.idle:
        seen += [o for o in generation.step() if o.rid == "s"]
    assert [len(o.output_ids) for o in seen] == list(range(1, 9))
    assert all(seen[-1].output_ids[: len(o.output_ids)] == o.output_ids for o in seen)
    assert [o.finish is not None for o in seen] == [False] * 7 + [True]


def test_a_seed_fixes_a_request_whatever_runs_beside_it(make):
    sampling = Sampling(max_new_tokens=12, ignore_eos=True, seed=7)
    alone, crowded = make(seed=1), make(seed=2)
    alone.add("x", prompt_of(1, 9), sampling)
    for index in range(6):
        crowded.add(str(index), prompt_of(index, 30), Sampling(max_new_tokens=20, ignore_eos=True))
    crowded.add("x", prompt_of(1, 9), sampling)
    assert finish(alone)["x"].output_ids == finish(crowded)["x"].output_ids


# --- sampling ---


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    draws = 20_000
    ids, logprobs = sample(
        logits.expand(draws, 4), [Sampling(temperature=2.0)] * draws, [random.Random(1)] * draws
    )
    expected = torch.softmax(logits[0] / 2.0, dim=0).tolist()
    counts = Counter(ids)
    # five standard deviations
    assert all(abs(counts[t] / draws - p) < 5 * (p * (1 - p) / draws) ** 0.5 for t, p in enumerate(expected))
    assert logprobs[0] == pytest.approx(torch.log_softmax(logits[0] / 2.0, dim=0)[ids[0]].item())


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.5), {0, 1}),
        (Sampling(top_p=0.3), {0}),
        (Sampling(min_p=0.6), {0, 1}),
        (Sampling(top_k=3, min_p=0.9), {0}),
        (Sampling(), {0, 1, 2, 3}),
    ],
)
def test_filters_exclude_exactly_the_tail(sampling, allowed):
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    draws = 2000
    ids, logprobs = sample(logits.expand(draws, 4), [sampling] * draws, [random.Random(1)] * draws)
    assert set(ids) == allowed
    unfiltered = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert logprobs == near([unfiltered[t] for t in ids])


class _Edge(random.Random):
    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


@given(
    st.lists(st.integers(-300, 300).map(lambda n: n / 10), min_size=2, max_size=20),
    st.sampled_from([0.0, 1e-300, 0.5, 1 - 2**-53]),
    st.integers(0, 5),
    st.floats(0.01, 1.0),
)
@settings(max_examples=200, deadline=None)
def test_a_draw_at_any_edge_is_never_an_excluded_token(logits, draw, top_k, top_p):
    (token,), (logprob,) = sample(torch.tensor([logits]), [Sampling(top_k=top_k, top_p=top_p)], [_Edge(draw)])
    ranked = sorted(logits, reverse=True)
    assert logits[token] >= ranked[min(top_k or len(logits), len(logits)) - 1]
    assert logprob <= 0.0


# --- aborts, pauses, weights ---


def test_an_abort_keeps_the_partial_output(make, references):
    generation = make(max_running=1)
    generation.add("running", prompt_of(1, 9), Sampling(max_new_tokens=50, ignore_eos=True))
    generation.add("waiting", prompt_of(2, 9), GREEDY)
    for _ in range(5):
        generation.step()
    (running,) = generation.abort("running")
    (waiting,) = generation.abort("waiting")
    assert generation.abort("running") == []
    assert running.finish["type"] == waiting.finish["type"] == "abort"
    assert running.spans == [("1", 0, 5)]
    assert running.logprobs == near(references["1"].logprobs(prompt_of(1, 9), running.output_ids))
    assert (waiting.output_ids, waiting.spans) == ([], [("1", 0, 0)])
    assert generation.idle and generation.flush()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_holds_everything_and_loses_nothing(make, mode):
    undisturbed, paused = make(), make()
    undisturbed.add("a", prompt_of(1, 9), GREEDY)
    paused.add("a", prompt_of(1, 9), GREEDY)
    for _ in range(3):
        paused.step()
    assert paused.pause(mode) == []
    paused.add("late", prompt_of(2, 9), GREEDY)
    assert paused.idle and paused.step() == []
    assert paused.flush() is (mode == "retract")
    paused.resume()
    done = finish(paused)
    assert set(done) == {"a", "late"}
    expected = finish(undisturbed)["a"]
    assert done["a"].output_ids == expected.output_ids
    assert done["a"].logprobs == near(expected.logprobs)
    assert done["a"].retractions == (mode == "retract")


def test_retracted_requests_go_on_before_those_that_wait(make):
    generation = make(max_running=2)
    for rid in "abcd":
        generation.add(rid, prompt_of(1, 9), GREEDY)
    generation.step()
    generation.pause("retract")
    generation.resume()
    assert list(finish(generation)) == ["a", "b", "c", "d"]


def test_a_pause_by_abort_returns_every_partial(make):
    generation = make(max_running=1)
    for rid in "ab":
        generation.add(rid, prompt_of(1, 9), GREEDY)
    generation.step()
    assert {o.rid: len(o.output_ids) for o in generation.pause("abort")} == {"a": 1, "b": 0}
    assert generation.idle


def test_an_abort_during_an_in_place_pause_takes_effect_after_it(make):
    generation = make()
    generation.add("a", prompt_of(1, 9), GREEDY)
    generation.step()
    generation.pause("in_place")
    assert generation.abort("a") == [] and generation.step() == []
    generation.resume()
    (output,) = generation.step()
    assert (output.rid, output.finish["type"], len(output.output_ids)) == ("a", "abort", 1)
    assert generation.idle and generation.flush()


def test_a_pause_by_abort_ends_what_an_earlier_pause_holds(make):
    generation = make()
    generation.add("a", prompt_of(1, 9), GREEDY)
    generation.step()
    generation.pause("in_place")
    generation.abort("a")
    assert [o.rid for o in generation.pause("abort")] == ["a"]


@pytest.mark.parametrize(("stream", "sampled", "kept"), [(True, 53, 53), (False, 3, 0), (False, 53, 50)])
def test_a_retracted_request_that_is_aborted_has_only_what_was_delivered(make, stream, sampled, kept):
    generation = make()
    generation.add("a", prompt_of(1, 9), Sampling(max_new_tokens=60, ignore_eos=True), stream=stream)
    for _ in range(sampled):
        generation.step()
    generation.pause("retract")
    (output,) = generation.abort("a")
    assert output.finish["message"] == "Abort in waiting queue"
    assert (len(output.output_ids), len(output.logprobs), output.spans) == (kept, kept, [("1", 0, kept)])


def test_an_abort_takes_every_id_that_begins_with_its_own(make):
    generation = make()
    for rid in ("a", "a1", "b"):
        generation.add(rid, prompt_of(1, 9), GREEDY)
    generation.step()
    assert [o.rid for o in generation.abort("a")] == ["a", "a1"]


def test_an_unknown_pause_mode_is_refused_without_pausing(make):
    generation = make()
    with pytest.raises(RequestError, match="retract"):
        generation.pause("gently")
    assert not generation.paused


def test_tokens_after_an_update_belong_to_the_new_weights(make, weights, references):
    generation = make()
    prompt = prompt_of(1, 15)
    generation.add("a", prompt, Sampling(max_new_tokens=10, ignore_eos=True))
    for _ in range(4):
        generation.step()
    generation.load(weights["2"], "2")
    output = finish(generation)["a"]
    assert output.spans == [("1", 0, 4), ("2", 4, 10)]
    assert output.logprobs[:4] == near(references["1"].logprobs(prompt, output.output_ids[:4]))
    after = references["2"].logprobs(prompt + output.output_ids[:4], output.output_ids[4:])
    assert output.logprobs[4:] == near(after)
    assert output.retractions == 1


def test_an_update_that_keeps_kv_never_shares_it(make, weights, references):
    generation = make()
    prompt = prompt_of(1, 15)
    generation.add("old", prompt, Sampling(max_new_tokens=10, ignore_eos=True))
    for _ in range(4):
        generation.step()
    generation.load(weights["2"], "2", keep_kv=True)
    old = finish(generation)["old"]
    assert old.spans == [("1", 0, 4), ("2", 4, 10)] and old.retractions == 0
    longer = prompt + old.output_ids
    generation.add("new", longer, GREEDY)
    new = finish(generation)["new"]
    assert new.cached_tokens == 0
    assert new.logprobs == near(references["2"].logprobs(longer, new.output_ids))


def test_weights_of_another_shape_are_refused(make, make_model, tmp_path):
    generation = make()
    other = Qwen3.load(make_model(tmp_path, 1, num_hidden_layers=1))
    with pytest.raises(EngineError, match="another configuration"):
        generation.load(other, "2")
    assert generation.version == "1"


actions = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), st.integers(0, 30)),
    st.tuples(st.just("add"), st.integers(0, 2), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    st.tuples(
        st.sampled_from(["abort", "load", "retract", "in_place", "resume", "flush"]),
        st.integers(0, 9),
        st.just(0),
    ),
)


@given(st.lists(actions, min_size=3, max_size=30))
@settings(max_examples=150, deadline=None)
def test_after_any_history_each_token_has_its_versions_logprob(weights, references, history):
    """Requests that share prefixes and extend each other, in few slots, under aborts, pauses, flushes and
    updates: every request leaves once, and each recorded log-prob is what the span's weights say of the
    full prefix.
    """
    generation = Generation(weights["1"], "1", context=128, max_running=3, cached=2, seed=0)
    prompts, done = {}, []
    for verb, number, length in history:
        if verb == "add":
            rid = str(len(prompts))
            parents = [o for o in done if o.prompt_tokens + len(o.output_ids) < 90]
            start = prompt_of(number, 12)
            if parents and number == 2:
                start = prompts[parents[-1].rid] + parents[-1].output_ids
            prompts[rid] = start + prompt_of(length, length)[: 100 - len(start)]
            generation.add(rid, prompts[rid], Sampling(max_new_tokens=1 + length % 7, ignore_eos=True))
        elif verb == "step":
            for _ in range(number):
                done += generation.step()
        elif verb == "abort":
            done += generation.abort(str(number))
        elif verb == "load":
            version = "2" if generation.version == "1" else "1"
            generation.load(weights[version], version)
        elif verb == "flush":
            generation.flush()
        elif verb == "resume":
            generation.resume()
        else:
            done += generation.pause(verb)
    generation.resume()
    done += finish(generation).values()
    assert sorted(o.rid for o in done) == sorted(prompts)
    assert not generation.slots.busy.any()
    for output in done:
        ends = [0, *(end for _, _, end in output.spans)]
        assert [start for _, start, _ in output.spans] == ends[:-1] and ends[-1] == len(output.output_ids)
        assert len(output.logprobs) == len(output.output_ids)
        for version, start, end in output.spans:
            if end > start:
                prefix = prompts[output.rid] + output.output_ids[:start]
                expected = references[version].logprobs(prefix, output.output_ids[start:end])
                assert output.logprobs[start:end] == near(expected)


# --- KV reuse ---


def test_the_next_turn_of_a_session_finds_its_kv(make, references):
    generation = make()
    prompt = prompt_of(1, 20)
    generation.add("turn 1", prompt, GREEDY)
    first = finish(generation)["turn 1"]
    longer = prompt + first.output_ids + prompt_of(9, 5)
    generation.add("turn 2", longer, GREEDY)
    second = finish(generation)["turn 2"]
    assert (first.cached_tokens, second.cached_tokens) == (0, 27)  # the last output token was never an input
    assert second.logprobs == near(references["1"].logprobs(longer, second.output_ids))


def test_a_branch_copies_what_it_shares_and_the_trunk_stays(make, references):
    generation = make()
    trunk = prompt_of(1, 30)
    generation.add("trunk", trunk, GREEDY)
    longer = trunk + finish(generation)["trunk"].output_ids + [5, 6]
    branch = trunk[:20] + prompt_of(2, 10)
    generation.add("branch", branch, GREEDY)
    generation.add("again", longer, GREEDY)
    done = finish(generation)
    assert done["branch"].cached_tokens == 20
    assert done["again"].cached_tokens == 37
    for rid, prompt in (("branch", branch), ("again", longer)):
        assert done[rid].logprobs == near(references["1"].logprobs(prompt, done[rid].output_ids))


def test_kv_is_not_shared_across_extra_keys_flushes_and_updates(make, weights):
    generation = make()
    prompt = prompt_of(1, 20)

    def cached(extra_key: str = "") -> int:
        generation.add("x", prompt, GREEDY, extra_key=extra_key)
        return finish(generation)["x"].cached_tokens

    assert [cached(), cached(), cached("other"), cached("other")] == [0, 19, 0, 19]
    generation.flush()
    assert [cached(), cached()] == [0, 19]
    generation.load(weights["2"], "1")
    assert cached() == 0


def test_the_least_recently_used_session_gives_way(make):
    generation = make(max_running=1, cached=1)
    prompts = [prompt_of(seed, 20) for seed in (1, 2, 3)]

    def cached(index: int) -> int:
        generation.add("x", prompts[index], GREEDY)
        return finish(generation)["x"].cached_tokens

    assert [cached(0), cached(1), cached(2)] == [0, 0, 0]
    assert cached(1) == 19
    assert cached(0) == 0


# --- memory ---


def test_release_is_refused_while_anything_runs_and_undone_by_occupy(make, weights):
    generation = make()
    generation.add("a", prompt_of(1, 9), GREEDY)
    with pytest.raises(RequestError, match="drain or retract"):
        generation.release()
    generation.step()
    generation.pause("in_place")
    with pytest.raises(RequestError, match="drain or retract"):
        generation.release()
    generation.pause("retract")
    generation.release()
    assert generation.model is None and generation.cache is None
    generation.load(weights["2"], "2")
    generation.resume()
    assert generation.idle
    generation.occupy()
    assert finish(generation)["a"].spans == [("1", 0, 1), ("2", 1, 8)]
