"""The tiny model: a Qwen3 of 138 thousand parameters, warm-started on demonstrations of the tasks.

`python -m gyre_cli.quickstart.tiny OUT` regenerates what the package ships in `tiny/`: the same bits on the
same kind of machine with the same versions of torch and transformers, because everything is seeded and torch
runs on one thread while it trains.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyre_cli.errors import MisuseError
from gyre_cli.quickstart.demonstrations import Transcript, demonstrations
from gyre_cli.quickstart.tasks import make_tasks
from gyre_cli.quickstart.tokenizer import END, END_OF_TEXT, VOCABULARY, build_tokenizer, save_tokenizer

STEPS = 330
TASKS_PER_STEP = 16
LEARNING_RATE = 4e-3
WARM_UP = 20
DECAY_FROM = 0.7
"""Share of the steps after which the learning rate falls linearly to zero."""
CONTEXT_WEIGHT = 0.2
"""Loss weight of tokens that the model only reads, against 1 for tokens it has to produce."""
TASK_SEED = 1_000_003
"""The demonstrations' tasks come from this seed plus `seed`: seeds of runs are small numbers."""


def build(out_dir: Path, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> None:
    """Make the model and write it as a Hugging Face directory (config, weights, tokenizer, chat template).

    Takes 20 to 60 s on one core. `progress(done, total)` is called after each training step. Raises
    MisuseError when `out_dir` is a file, or when the example harness, which demonstrates, is absent.
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise MisuseError(f"{out_dir} is a file, not a folder to write the model to")
    import torch

    tokenizer = build_tokenizer()
    with one_thread(torch):
        torch.manual_seed(seed)
        model = new_model(tokenizer)
        warm_start(model, transcript_batches(tokenizer, seed), progress)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_model(model, out_dir)
    save_tokenizer(out_dir)


def write_model(model: Any, folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors; the tied output weights are not repeated."""
    from safetensors.torch import save

    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


@contextmanager
def one_thread(torch: Any) -> Iterator[None]:
    """Sums depend on the number of threads, and with them the weights' last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def new_model(tokenizer: Any) -> Any:
    """A Qwen3ForCausalLM, float32, with random weights from torch's global generator."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=192,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config.do_sample = True
    return model


def transcript_batches(tokenizer: Any, seed: int) -> Iterator[list[Transcript]]:
    """Endless batches, each the transcripts of TASKS_PER_STEP demonstrated runs."""
    runs = demonstrations(make_tasks(TASK_SEED + seed), tokenizer, seed)
    while True:
        yield list(itertools.chain.from_iterable(itertools.islice(runs, TASKS_PER_STEP)))


def warm_start(
    model: Any, batches: Iterator[list[Transcript]], progress: Callable[[int, int], None] | None
) -> None:
    """Supervised training in place for STEPS batches."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step, batch in enumerate(itertools.islice(batches, STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * schedule(step)
        produced = sum(sum(transcript.produced) for transcript in batch)
        for part in by_length(batch):
            (supervised_loss(model, part) / produced).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if progress:
            progress(step + 1, STEPS)


def schedule(step: int) -> float:
    """Share of the learning rate at a step: linear rise, plateau, linear fall."""
    return min(1.0, (step + 1) / WARM_UP, (1 - step / STEPS) / (1 - DECAY_FROM))


def by_length(batch: list[Transcript]) -> tuple[list[Transcript], list[Transcript]]:
    """The shorter and the longer half, so that little is padded."""
    ordered = sorted(batch, key=lambda transcript: len(transcript.ids))
    return ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]


def supervised_loss(model: Any, transcripts: list[Transcript]) -> Any:
    """Weighted cross-entropy in nats, summed over all tokens but the first of each transcript."""
    import torch

    longest = max(len(transcript.ids) for transcript in transcripts)
    ids = torch.full((len(transcripts), longest), model.config.pad_token_id)
    weights = torch.zeros(len(transcripts), longest)
    for row, transcript in enumerate(transcripts):
        length = len(transcript.ids)
        ids[row, :length] = torch.tensor(transcript.ids)
        weights[row, :length] = torch.tensor(transcript.produced).float().clamp(min=CONTEXT_WEIGHT)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    counted = weights[:, 1:] > 0
    losses = torch.nn.functional.cross_entropy(
        model.lm_head(hidden[counted]), ids[:, 1:][counted], reduction="none"
    )
    return (losses * weights[:, 1:][counted]).sum()


def show(done: int, total: int) -> None:
    print(f"\rstep {done} of {total}", end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gyre_cli.quickstart.tiny", description="Make the tiny model."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, made where it is missing")
    try:
        build(parser.parse_args().out, progress=show)
    except MisuseError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
