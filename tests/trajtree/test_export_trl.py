"""The TRL export, loaded by TRL's own loaders: AsyncGRPO's rollout queue, batcher and collator, and SFTTrainer."""

import itertools
import os
import queue
from collections import Counter, defaultdict

import pytest
from gyre_trajtree import Assessment, Ledger, Tree, executions, export, sample_run
from sampled_runs import call, opened, recorded

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # AsyncGRPO is experimental in TRL, and says so
os.environ.setdefault("HF_HUB_OFFLINE", "1")

RECORDS = [
    record
    for name, score in [("a", 0.0), ("b", 1.0)]
    for record in [
        opened(name, "g"),
        call(f"{name}1", name, [1, 2, 3], [10, 11, 12], [-0.1, -0.2, -0.3], version=4),
        call(f"{name}2", name, [4], [13, 14], [-0.4, -0.5], version=5, parent=f"{name}1"),
        call(f"{name}3", name, [5, 6], [15, 16, 17], [-0.6, None, -0.8], version=5, parent=f"{name}1"),
        Assessment(name, "valid", score),
    ]
]


@pytest.fixture
def exported(tmp_path):
    """(dataset as `datasets` loads the export, samples, ledger)"""
    from datasets import load_dataset

    ledger = Ledger()
    samples = list(sample_run(recorded(RECORDS), ledger=ledger))
    export(iter(samples), "trl", tmp_path / "samples.jsonl", ledger)
    dataset = load_dataset(
        "json", data_files=str(tmp_path / "samples.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    return dataset, samples, ledger


def test_async_grpo_trains_the_targets_with_their_log_probs_and_advantages(exported):
    from trl.experimental.async_grpo.async_grpo_trainer import (
        DataCollatorForRollout,
        FixedCountBatcher,
        RolloutQueueDataset,
    )
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    dataset, samples, ledger = exported
    fields = (
        "input_ids",
        "completion_mask",
        "old_log_probs",
        "advantage",
        "model_version",
        "group_id",
        "metrics",
    )
    waiting = queue.Queue()
    for row in dataset.with_format("numpy"):
        waiting.put(RolloutSample(prompt=[], completion=[], **{name: row[name] for name in fields}))
    metrics = defaultdict(list)
    source = RolloutQueueDataset(waiting, lambda: 5, lambda seconds: None, 60.0, metrics)
    rows = next(iter(FixedCountBatcher(source, num_processes=1, microbatch_size=len(samples))))
    batch = DataCollatorForRollout(pad_token_id=0, metrics=metrics)([rows])

    index = batch["token_index"][0]
    found = zip(
        batch["shift_labels"][0][index].tolist(),
        batch["old_log_probs"][0].tolist(),
        batch["advantages"][0].tolist(),
        strict=True,
    )
    expected = [
        (token, logprob, sample.advantage)
        for sample in samples
        for token, logprob, trains in zip(
            sample.trajectory.ids.tolist(),
            sample.trajectory.logprobs.tolist(),
            sample.trajectory.targets.tolist(),
            strict=True,
        )
        if trains
    ]
    assert Counter(found) == Counter(expected)
    assert len(expected) == ledger.trained == 2 * 7
    assert int(batch["global_n_tokens"][0]) == ledger.trained
    assert "sample/dropped_stale_total" not in metrics
    assert sorted(set(metrics["sample/staleness_mean"])) == [0.0, 1.0]
    assert metrics["reward"] == [0.5]


def test_async_grpo_shares_the_prefixes_of_an_execution_again(exported):
    from trl.experimental.async_grpo.packing import TreeRow

    dataset, _, _ = exported
    row = TreeRow()
    for sample in dataset.with_format("numpy"):
        if sample["execution"] == "a":
            row.add(sample)
    nodes = Tree.from_calls(executions(RECORDS)["a"].calls).nodes
    forks = 1  # TRL repeats the last token before two samples part
    assert len(row.tokens) == sum(node.end - node.start for node in nodes) + forks


def test_sft_trainer_learns_the_targets_and_nothing_else(exported, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    dataset, samples, _ = exported
    words = Tokenizer(WordLevel({str(token): token for token in range(32)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="31", unk_token="0")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
        )
    )
    settings = SFTConfig(
        output_dir=str(tmp_path / "sft"),
        max_length=None,
        max_steps=1,
        per_device_train_batch_size=len(samples),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
    )
    trainer = SFTTrainer(model, settings, train_dataset=dataset, processing_class=tokenizer)
    (batch,) = itertools.islice(trainer.get_train_dataloader(), 1)
    found = {
        (tuple(ids[mask.bool()].tolist()), tuple(labels[mask.bool()].tolist()))
        for ids, labels, mask in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
        )
    }
    assert found == {
        (
            tuple(sample.trajectory.ids.tolist()),
            tuple(
                token if trains else -100
                for token, trains in zip(
                    sample.trajectory.ids.tolist(), sample.trajectory.targets.tolist(), strict=True
                )
            ),
        )
        for sample in samples
    }
    assert trainer.train().training_loss > 0
