"""Continuous batching as a pure, synchronous state machine over one model.

Owns the sequences (waiting and running), the KV slots and the sampling. One `step` is one forward pass in
which every running sequence advances by one token, or by one piece of its prompt. No thread, no clock, no
I/O: one caller at a time drives it (`engine.Engine` does).

Invariants
- A sequence leaves exactly once, with every token it had; an abort keeps partial output.
- A KV row that is reused was computed by the present weights from the same tokens under the same extra key.
- The weight version of an output token is the one whose weights sampled it (`Output.spans`).
- The recorded log-prob is log-softmax(logits / temperature) of the token, before top-k, top-p and min-p, as
  SGLang records it; a greedy token (temperature 0) is recorded at temperature 1.
"""

import random
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from gyre_trainer.errors import RequestError
from gyre_trainer.model_qwen3 import Batch, KVCache, Qwen3, Segment

GREEDY_BELOW = 1e-6
PROMPT_PIECE = 1024  # tokens of one prompt in one step: bounds the memory of a step and the wait for an abort
STEP_TOKENS = 4096  # prompt tokens of all sequences in one step
RESERVED = 6  # positions of the context that no prompt may take, so that output has room
DELIVERED_EVERY = 50  # tokens between two deliveries of a sequence that is not streamed
UNFILLED = 2  # positions of the context that no output takes

PAUSE_MODES = ("abort", "retract", "in_place")

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with SGLang's meanings; `top_k` 0 means the whole vocabulary, `max_new_tokens`
    None up to the context. `ignore_eos` also ignores `stop_token_ids`, as SGLang does. With `seed` the
    choice depends on the request alone, not on its neighbours in the batch.
    """

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def filtered(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class Output:
    """What a sequence has so far: all its tokens, and `finish` (SGLang's finish_reason) once it has left.

    `spans`: (version, start, end) over output positions, `[(version, 0, 0)]` when there is no output."""

    rid: str
    prompt_tokens: int
    output_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]
    cached_tokens: int
    retractions: int
    finish: dict | None


@dataclass(eq=False, slots=True)
class _Sequence:
    rid: str
    prompt_tokens: int
    sampling: Sampling
    stops: frozenset[int]
    limit: int
    chance: random.Random
    key: int
    stream: bool
    tokens: list[int]  # prompt and output
    logprobs: list[float] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)  # (version, first output position)
    slot: int = -1
    cached_tokens: int = 0
    retractions: int = 0
    aborted: bool = False  # while held in its place: it ends when steps go on

    def output(self, version: str, finish: dict | None) -> Output:
        ids = self.tokens[self.prompt_tokens :]
        starts = self.starts or [(version, 0)]
        ends = [start for _, start in starts[1:]] + [len(ids)]
        return Output(
            rid=self.rid,
            prompt_tokens=self.prompt_tokens,
            output_ids=ids,
            logprobs=self.logprobs.copy(),
            spans=[(v, start, end) for (v, start), end in zip(starts, ends, strict=True)],
            cached_tokens=self.cached_tokens,
            retractions=self.retractions,
            finish=finish,
        )


class Slots:
    """Which KV rows hold what. A slot outlives its sequence, so that the next turn of a session, whose
    prompt extends this one's prompt and output, finds its KV in place; another prompt copies the part it
    shares.
    """

    def __init__(self, count: int, context: int):
        self.tokens = np.zeros((count, context), dtype=np.int32)
        self.lengths = np.zeros(count, dtype=np.int64)  # KV rows written
        self.keys = np.full(count, -1, dtype=np.int64)  # who may reuse the rows; -1 nobody
        self.busy = np.zeros(count, dtype=bool)
        self.used = np.zeros(count, dtype=np.int64)
        self._clock = 0

    def acquire(self, prompt: np.ndarray, key: int, cache: KVCache) -> tuple[int, int]:
        """Take a slot for `prompt` (int32). Returns the slot and how many of the prompt's tokens it already
        holds, always fewer than all. There must be an idle slot.
        """
        shared = self._shared(prompt, key)
        source = int(shared.argmax())
        length = int(shared[source])
        if not self.busy[source] and 0 < length == self.lengths[source]:
            slot = source
        else:
            slot = int(np.where(self.busy, np.iinfo(np.int64).max, self.used).argmin())
            if length and slot != source:
                cache.copy_prefix(source, slot, length)
        self.busy[slot] = True
        self.keys[slot] = key
        self.lengths[slot] = length
        self.tokens[slot, : len(prompt)] = prompt
        return slot, length

    def _shared(self, prompt: np.ndarray, key: int) -> np.ndarray:
        differs = self.tokens[:, : len(prompt)] != prompt
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), len(prompt))
        return np.where(self.keys == key, np.minimum(np.minimum(first, self.lengths), len(prompt) - 1), 0)

    def free(self, slot: int) -> None:
        self._clock += 1
        self.busy[slot], self.used[slot] = False, self._clock

    def forget(self) -> None:
        """Make all rows unusable for reuse and idle slots empty; a busy slot still serves its sequence."""
        self.keys[:] = -1
        self.used[~self.busy] = 0
        self.lengths[~self.busy] = 0


class Generation:
    """See the module docstring. `context`: most tokens of prompt and output together. `cached`: idle slots
    kept besides those of `max_running` sequences. `seed`: of the requests that bring none of their own.
    """

    def __init__(
        self,
        model: Qwen3,
        version: str = "default",
        *,
        context: int,
        max_running: int = 32,
        cached: int = 32,
        seed: int | None = None,
    ):
        self.model: Qwen3 | None = model
        self.config, self.version = model.config, version
        self.context, self.max_running, self.cached = context, max_running, cached
        self.paused = False
        self.waiting: deque[_Sequence] = deque()
        self.running: list[_Sequence] = []
        self._chance = random.Random(seed)
        self._allocate()

    def _allocate(self) -> None:
        count = self.max_running + self.cached
        self.slots = Slots(count, self.context)
        self.cache = KVCache(self.config, count, self.context, self.model.device, self.model.dtype)

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do."""
        return self.paused or self.cache is None or not (self.running or self.waiting)

    def add(
        self, rid: str, input_ids: list[int], sampling: Sampling, *, stream: bool = False, extra_key: str = ""
    ) -> None:
        """Queue a request. `rid` must be new, `input_ids` not empty and in the vocabulary, and all tokens
        fit. With `stream`, every step reports its output.
        """
        room = self.context - UNFILLED - len(input_ids)
        limit = room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens)
        stops = frozenset() if sampling.ignore_eos else sampling.stop_token_ids | self.config.eos
        chance = self._chance if sampling.seed is None else random.Random(sampling.seed)
        key, tokens = hash(extra_key), list(input_ids)
        self.waiting.append(_Sequence(rid, len(tokens), sampling, stops, limit, chance, key, stream, tokens))

    def step(self) -> list[Output]:
        """One forward pass. Returns the outputs of the sequences that left and of the streaming ones."""
        if self.idle:
            return []
        outputs = [self._end(s) for s in [*self.running] if s.aborted]
        self._admit()
        if not self.running:
            return outputs
        batch, sequences = self._plan()
        logits = self.model.forward(batch, self.cache)
        ids, logprobs = sample(logits, [s.sampling for s in sequences], [s.chance for s in sequences])
        for sequence, token, logprob in zip(sequences, ids, logprobs, strict=True):
            finish = self._advance(sequence, token, logprob)
            if finish:
                self.slots.free(sequence.slot)
                sequence.slot = -1
            if finish or sequence.stream:
                outputs.append(sequence.output(self.version, finish))
        self.running = [s for s in self.running if s.slot >= 0]
        return outputs

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting.popleft()
            prompt = np.array(sequence.tokens, dtype=np.int32)
            sequence.slot, held = self.slots.acquire(prompt, sequence.key, self.cache)
            if not sequence.retractions:
                sequence.cached_tokens = held
            self.running.append(sequence)

    def _plan(self) -> tuple[Batch, list[_Sequence]]:
        """The next batch, and the sequences that sample from its logits, in order."""
        slots, device = self.slots, self.model.device
        todo = [(s, int(slots.lengths[s.slot])) for s in self.running]
        decoding = [s for s, held in todo if len(s.tokens) - held == 1]
        decode_slots = np.array([s.slot for s in decoding], dtype=np.int64)
        positions = slots.lengths[decode_slots]
        tokens = np.array([s.tokens[-1] for s in decoding], dtype=np.int32)
        slots.tokens[decode_slots, positions] = tokens
        slots.lengths[decode_slots] += 1
        columns = [(tokens, positions, decode_slots * self.context + positions)]
        sampling, wanted = decoding, list(range(len(decoding)))
        segments: list[Segment] = []
        row = len(decoding)
        for sequence, held in todo:
            count = min(len(sequence.tokens) - held, PROMPT_PIECE)
            if len(sequence.tokens) - held == 1 or (segments and row + count > STEP_TOKENS):
                continue
            segments.append(Segment(row, sequence.slot, held, count))
            span = np.arange(held, held + count)
            columns.append((slots.tokens[sequence.slot, span], span, sequence.slot * self.context + span))
            slots.lengths[sequence.slot] += count
            row += count
            if held + count == len(sequence.tokens):
                sampling.append(sequence)
                wanted.append(row - 1)
        flat = [np.concatenate(column).astype(np.int64, copy=False) for column in zip(*columns, strict=True)]
        arrays = [*flat, decode_slots, positions + 1, np.array(wanted, dtype=np.int64)]
        on_device = [torch.from_numpy(a).to(device) for a in arrays]
        longest = int(positions.max()) + 1 if len(positions) else 0
        return Batch(*on_device[:5], longest, segments, on_device[5]), sampling

    def _advance(self, sequence: _Sequence, token: int, logprob: float) -> dict | None:
        """Append one sampled token. Returns the finish reason when it was the last."""
        made = len(sequence.logprobs)
        if made < sequence.limit:
            if not sequence.starts or sequence.starts[-1][0] != self.version:
                sequence.starts.append((self.version, made))
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if token in sequence.stops:
                return {"type": "stop", "matched": token}
        if made + 1 >= sequence.limit:
            return {"type": "length", "length": sequence.limit}
        return None

    def abort(self, rid: str | None = None) -> list[Output]:
        """End with what they have all sequences whose id begins with `rid` (None: all), as SGLang does. Returns
        their outputs; what an in-place pause holds ends, and is returned, by the first step after it.
        """
        chosen = [s for s in [*self.running, *self.waiting] if rid is None or s.rid.startswith(rid)]
        outputs = []
        for sequence in chosen:
            if sequence.slot >= 0 and self.paused:
                sequence.aborted = True
            else:
                outputs.append(self._end(sequence))
        return outputs

    def _end(self, sequence: _Sequence) -> Output:
        if sequence.slot >= 0:
            self.slots.free(sequence.slot)
            self.running.remove(sequence)
            return sequence.output(self.version, ABORTED)
        self.waiting.remove(sequence)
        output = sequence.output(self.version, ABORTED_WAITING)
        if sequence.stream:
            return output
        # SGLang tells its front of such a sequence at every DELIVERED_EVERY tokens only; the rest is lost
        kept = len(output.output_ids) // DELIVERED_EVERY * DELIVERED_EVERY
        spans = [(version, start, min(end, kept)) for version, start, end in output.spans if start < kept]
        return replace(
            output,
            output_ids=output.output_ids[:kept],
            logprobs=output.logprobs[:kept],
            spans=spans or [(self.version, 0, 0)],
        )

    def pause(self, mode: str) -> list[Output]:
        """Stop stepping until `resume`. `abort` ends all sequences (returned), `retract` takes them off
        their KV so that they start again from prompt and output, `in_place` leaves them as they are.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode must be abort, retract or in_place, not {mode!r}")
        outputs = []
        if mode == "abort":
            self.paused = False  # also what an earlier pause holds in its place ends here
            outputs = self.abort()
        self.paused = True
        if mode == "retract":
            self.retract()
        return outputs

    def resume(self) -> None:
        self.paused = False

    def retract(self) -> None:
        """Send the running sequences back to the head of the queue, keeping their output."""
        for sequence in reversed(self.running):
            self.slots.free(sequence.slot)
            sequence.slot = -1
            sequence.retractions += 1
            self.waiting.appendleft(sequence)
        self.running = []

    def flush(self) -> bool:
        """Drop all cached KV; refused (False) while sequences run on theirs."""
        if self.slots and not self.running:
            self.slots.forget()
        return not self.running

    def load(self, model: Qwen3, version: str | None, *, keep_kv: bool = False) -> None:
        """Continue with other weights. Running sequences are retracted, so that every later token and
        log-prob is the new weights' alone; with `keep_kv` they go on over the KV of the old ones. No older
        KV is ever shared.
        """
        # a published directory may not name the stop tokens: those of the start stay in force
        if replace(model.config, eos=self.config.eos) != self.config:
            raise RequestError("the new weights have another configuration: restart the engine")
        if not keep_kv:
            self.retract()
        if self.slots:
            self.slots.forget()
        self.model = model
        self.version = self.version if version is None else version

    def release(self) -> None:
        """Drop weights and KV. Refused while sequences run, or wait unpaused."""
        if self.running or not self.idle:
            raise RequestError(
                "memory can be released only when no request is running: drain or retract first"
            )
        self.model = self.cache = self.slots = None

    def occupy(self) -> None:
        """Undo `release`, once `load` brought weights."""
        if self.cache is None:
            self._allocate()


def sample(
    logits: torch.Tensor, samplings: list[Sampling], chances: list[random.Random]
) -> tuple[list[int], list[float]]:
    """Draw one token for each row of `logits` (float32 `[R, vocab]`). Returns token ids and their log-probs
    as the module docstring defines them. One uniform number of the row's `chance` decides each draw.
    """

    def column(numbers, **kind) -> torch.Tensor:
        return torch.tensor(numbers, device=logits.device, **kind).unsqueeze(1)

    temperatures = [s.temperature if s.temperature >= GREEDY_BELOW else 1.0 for s in samplings]
    if any(t != 1.0 for t in temperatures):
        logits = logits / column(temperatures)
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = logprobs.exp()
    if any(s.filtered for s in samplings):
        probabilities = _filtered(probabilities, samplings)
    # float64: a float32 sum could round a draw up to the end, onto a token of no probability
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    draws = cumulative[:, -1:] * column([c.random() for c in chances], dtype=torch.float64)
    ids = torch.searchsorted(cumulative, draws, right=True).clamp_(max=logits.shape[1] - 1)
    if any(s.greedy for s in samplings):
        greedy = column([s.greedy for s in samplings])
        ids = torch.where(greedy, logprobs.argmax(dim=-1, keepdim=True), ids)
    return ids.squeeze(1).tolist(), logprobs.gather(1, ids).squeeze(1).tolist()


def _filtered(probabilities: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """Zero what top-k, top-p and min-p exclude; all three look at the unfiltered probabilities, as SGLang's
    do.
    """
    rows, vocab = probabilities.shape

    def column(numbers) -> torch.Tensor:
        return torch.tensor(numbers, device=probabilities.device).unsqueeze(1)

    ordered, order = probabilities.sort(dim=-1, descending=True)
    drop = ordered.cumsum(dim=-1) - ordered > column([s.top_p for s in samplings])
    drop |= torch.arange(vocab, device=probabilities.device) >= column(
        [min(s.top_k or vocab, vocab) for s in samplings]
    )
    drop |= ordered < ordered[:, :1] * column([s.min_p for s in samplings])
    return torch.zeros_like(probabilities).scatter_(1, order, ordered.masked_fill_(drop, 0.0))
