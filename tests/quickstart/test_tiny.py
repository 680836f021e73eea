"""The tiny model's directory: its tokenizer, its chat template, and the shipped weights."""

import itertools
import json
import os

import pytest
import torch
from gyre_cli.errors import MisuseError
from gyre_cli.quickstart import model_path, tiny
from gyre_cli.quickstart.demonstrations import Demonstrator, call_text, demonstrations
from gyre_cli.quickstart.tasks import PATHS, WORDS, make_tasks
from gyre_cli.quickstart.tokenizer import END, build_tokenizer, chat_renderer, save_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

names = st.sampled_from(["write", "read", "task", "shell"])
texts = st.text(max_size=20)
tool_calls = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    names,
    st.dictionaries(texts, texts, max_size=3) | st.just('{"path": "api"}'),
)
turns = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, texts),
    st.builds(lambda text: {"role": "tool", "content": text}, texts),
    st.builds(
        lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls},
        st.none() | texts,
        st.lists(tool_calls, max_size=2),
    ),
)
conversations = st.builds(
    lambda lead, rest: lead + rest,
    st.just([]) | st.builds(lambda text: [{"role": "system", "content": text}], texts),
    st.lists(turns, min_size=1, max_size=6),
)
tool_lists = st.lists(names.map(lambda name: {"type": "function", "function": {"name": name}}), max_size=3)
render = chat_renderer()
PROMPT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def shipped():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def transformers_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path())


def test_the_shipped_tokenizer_is_what_the_code_makes(tmp_path):
    save_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert (model_path() / path.name).read_bytes() == path.read_bytes(), f"regenerate {path.name}"


@settings(deadline=None)
@given(messages=conversations, tools=tool_lists)
def test_transformers_renders_the_same(transformers_tokenizer, messages, tools):
    theirs = transformers_tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, tokenize=False
    )
    assert theirs == render(messages, tools)


@given(conversations, tool_lists, st.lists(turns, max_size=3))
def test_a_longer_conversation_extends_the_rendered_text(messages, tools, more):
    earlier, later = render(messages, tools), render(messages + more, tools)
    assert later.startswith(earlier.removesuffix(PROMPT))


@given(conversations, tool_lists, st.sampled_from(["write", "task"]), texts, texts)
def test_what_the_model_emits_is_what_the_template_renders(messages, tools, name, path, content):
    arguments = {"path": path, "content": content}
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    emitted = Demonstrator.render_reply({"content": None, "tool_calls": [{"function": function}]})
    reply = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": function | {"arguments": arguments}}],
    }
    assert render([*messages, reply], tools) == render(messages, tools) + emitted + "\n" + PROMPT


def test_a_call_is_a_handful_of_tokens_and_every_id_decodes(tokenizer):
    for path, word in itertools.product(PATHS[:5], WORDS[:5]):
        text = call_text("write", json.dumps({"path": path, "content": word})) + END
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert len(ids) == 8
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 480
    assert all(tokenizer.id_to_token(number) for number in range(480))


@given(text=texts)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_demonstrated_tokens_are_those_of_the_whole_text(tokenizer):
    for run in demonstrations(itertools.islice(make_tasks(1), 10), tokenizer, 0):
        for transcript in run:
            text = tokenizer.decode(transcript.ids, skip_special_tokens=False)
            assert tokenizer.encode(text, add_special_tokens=False).ids == transcript.ids
            assert len(transcript.produced) == len(transcript.ids)
            assert transcript.produced[-1] and not transcript.produced[0]


def test_the_shipped_model_is_small_and_whole(shipped):
    assert sum(path.stat().st_size for path in model_path().iterdir()) < 2_000_000
    weights = load_file(model_path() / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == shipped.num_parameters()
    assert shipped.config.vocab_size == 480
    assert shipped.generation_config.eos_token_id == build_tokenizer().token_to_id(END)


def test_the_shipped_model_has_learned_the_demonstrations(shipped, tokenizer):
    assert held_out_loss(shipped, tokenizer) < 0.42


def held_out_loss(model, tokenizer):
    """Nats for each produced token of demonstrations that the warm start did not see."""
    batch = next(tiny.transcript_batches(tokenizer, seed=5))
    with torch.no_grad():
        total = sum(produced_loss(model, transcript) for transcript in batch)
    return total / sum(sum(transcript.produced) for transcript in batch)


def produced_loss(model, transcript):
    ids = torch.tensor([transcript.ids])
    log_probs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
    chosen = log_probs.gather(-1, ids[0, 1:, None])[:, 0]
    return -chosen[torch.tensor(transcript.produced[1:])].sum().item()


def test_the_same_seed_gives_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "STEPS", 3)
    seen = []
    for name in ("a", "b"):
        tiny.build(tmp_path / name, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)] * 2
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert {path.name for path in model_path().iterdir()} == {
        path.name for path in (tmp_path / "a").iterdir()
    }


def test_building_leaves_the_thread_count_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "STEPS", 1)
    before = torch.get_num_threads()
    tiny.build(tmp_path / "model")
    assert torch.get_num_threads() == before


def test_a_file_is_no_place_for_a_model(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MisuseError, match="not a folder"):
        tiny.build(tmp_path / "file")


@pytest.mark.skipif(
    "GYRE_TEST_REGENERATE" not in os.environ, reason="takes a minute; set GYRE_TEST_REGENERATE"
)
def test_a_regenerated_model_behaves_alike(tmp_path, shipped, tokenizer):
    from transformers import AutoModelForCausalLM

    tiny.build(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert held_out_loss(again, tokenizer) == pytest.approx(held_out_loss(shipped, tokenizer), abs=0.05)
