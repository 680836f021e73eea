"""The engine: what a request is, and the thread that owns a model.

One thread runs `Generation.step` in a loop and, between two steps, every command that other threads sent.
So a command sees no half-done step, and commands take effect in the order in which they were sent. All
methods may be called from any thread; those that return a Future never block.
"""

import hashlib
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gyre_trainer import errors
from gyre_trainer.errors import (
    ContractError,
    EngineError,
    EngineReleased,
    MalformedRequest,
    ModelError,
    RequestError,
    TrainerError,
)
from gyre_trainer.generation import ABORTED_WAITING, RESERVED, Generation, Output, Sampling
from gyre_trainer.model_qwen3 import DTYPES, Qwen3

DEFAULT_CONTEXT = 4096

# Fields of SGLang's requests that would change the answer and are not served; empty or zero they do nothing.
UNSERVED = (
    *("text", "input_embeds", "image_data", "video_data", "audio_data", "lora_path", "session_params"),
    *("custom_logit_processor", "return_hidden_states", "top_logprobs_num", "token_ids_logprob"),
)
UNSERVED_SAMPLING = {
    *(
        "stop",
        "stop_regex",
        "min_new_tokens",
        "frequency_penalty",
        "presence_penalty",
        "json_schema",
        "regex",
    ),
    *("ebnf", "structural_tag", "logit_bias", "custom_params", "beam_width", "watermark", "choice"),
}
NEUTRAL_AT_ONE = {"n", "repetition_penalty"}
# Fields without a meaning where no text is made, or that only pace a stream.
IGNORED_SAMPLING = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}
SERVED_SAMPLING = {
    *("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos"),
    "sampling_seed",
}
KNOWN_SAMPLING = SERVED_SAMPLING | UNSERVED_SAMPLING | NEUTRAL_AT_ONE | IGNORED_SAMPLING


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """The body of one `/generate`. KV is shared only between requests of one `extra_key`."""

    rid: str
    input_ids: list[int]
    sampling: Sampling
    stream: bool = False
    return_logprob: bool = False
    extra_key: str = ""
    arrived: float = field(default_factory=time.monotonic)

    def check(self, vocab: int, context: int) -> None:
        """Raise RequestError if a model with this vocabulary and context length cannot serve it."""
        length, new = len(self.input_ids), self.sampling.max_new_tokens
        if not length:
            raise RequestError("input_ids cannot be empty")
        if min(self.input_ids) < 0 or max(self.input_ids) >= vocab:
            raise RequestError(f"input_ids must lie in the vocabulary, 0 to {vocab - 1}")
        if length >= context:
            raise RequestError(
                f"The input ({length} tokens) is longer than the model's context length ({context} tokens)."
            )
        if new is not None and length + new > context:
            raise RequestError(
                f"Requested token count exceeds the model's context length of {context} tokens: "
                f"{length} tokens of input and {new} new tokens."
            )
        if length >= context - RESERVED:
            raise RequestError(
                f"Input length ({length} tokens) exceeds the maximum allowed length ({context - RESERVED} tokens)."
            )

    def answer(self, output: Output) -> dict:
        """SGLang's answer for `output`; ids and log-probs are cumulative."""
        meta = {
            "id": output.rid,
            "finish_reason": output.finish,
            "weight_version": output.spans[-1][0],
            "completion_tokens": len(output.output_ids),
        }
        if output.finish != ABORTED_WAITING:
            meta["prompt_tokens"] = output.prompt_tokens
            meta["cached_tokens"] = output.cached_tokens
            meta["num_retractions"] = output.retractions
        if self.return_logprob:
            pairs = zip(output.logprobs, output.output_ids, strict=True)
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        if output.finish:
            meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in output.spans]
            meta["e2e_latency"] = time.monotonic() - self.arrived
        return {"output_ids": output.output_ids, "meta_info": meta}

    @staticmethod
    def parse(body: dict) -> "GenerateRequest":
        """Check SGLang's JSON field by field. Raises RequestError naming the first field that cannot be
        served.
        """
        read = GenerateRequest(
            rid=field_of(body, "rid", str, None) or uuid.uuid4().hex,
            input_ids=_parse_ids(body.get("input_ids")),
            stream=field_of(body, "stream", bool, None, ContractError) or False,
            return_logprob=field_of(body, "return_logprob", bool, None) or False,
            extra_key=f"{field_of(body, 'extra_key', str, '')}\0{field_of(body, 'cache_salt', str, '')}",
            sampling=_parse_sampling(field_of(body, "sampling_params", dict, None) or {}),
        )
        for name in UNSERVED:
            if body.get(name):
                raise RequestError(f"{name} is not supported by the embedded engine: send input_ids only")
        if body.get("input_ids") is None:
            raise RequestError("input_ids must be given: the tokens of one prompt")
        start = field_of(body, "logprob_start_len", int, -1)
        if start not in (-1, len(read.input_ids)):
            raise RequestError("logprob_start_len must be -1: log-probs of prompt tokens are not supported")
        return read


def _parse_ids(ids: object) -> list[int]:
    if ids is None:
        return []
    if not isinstance(ids, list):
        raise MalformedRequest(f"input_ids must be a list of integers, not {type(ids).__name__}")
    kinds = set(map(type, ids)) - {int}
    if kinds == {list}:
        raise RequestError(
            "input_ids must be the tokens of one prompt: batches are not supported by the embedded engine"
        )
    if kinds:
        kind = ContractError if kinds == {bool} else MalformedRequest
        raise kind("input_ids must be a list of integers, the tokens of one prompt")
    return ids


def _parse_sampling(raw: dict) -> Sampling:
    unknown = raw.keys() - KNOWN_SAMPLING
    if unknown:
        raise ContractError(f"sampling_params: unknown field {min(unknown)}")
    stop = raw.get("stop")
    if isinstance(stop, list) and not all(isinstance(text, str) for text in stop):
        raise ContractError("stop must be a string or a list of strings")
    unserved = [n for n in raw.keys() & UNSERVED_SAMPLING if raw[n]]
    unserved += [n for n in raw.keys() & NEUTRAL_AT_ONE if raw[n] not in (None, 1)]
    if unserved:
        raise RequestError(f"sampling_params: {min(unserved)} is not supported by the embedded engine")
    stops = field_of(raw, "stop_token_ids", list, [], ContractError)
    if set(map(type, stops)) - {int}:
        raise ContractError("stop_token_ids must be a list of integers")
    for name in IGNORED_SAMPLING - {"stream_interval"}:
        field_of(raw, name, bool, None, ContractError)
    top_k = _number(raw, "top_k", -1, lambda k: k == -1 or k >= 1, "-1 (off) or at least 1", int)
    return Sampling(
        max_new_tokens=_new_tokens(raw),
        temperature=_number(raw, "temperature", 1.0, lambda t: t >= 0, "at least 0"),
        top_p=_number(raw, "top_p", 1.0, lambda p: 0 < p <= 1, "in (0, 1]"),
        top_k=max(top_k, 0),
        min_p=_number(raw, "min_p", 0.0, lambda p: 0 <= p <= 1, "in [0, 1]"),
        stop_token_ids=frozenset(stops),
        ignore_eos=field_of(raw, "ignore_eos", bool, False, ContractError),
        seed=field_of(raw, "sampling_seed", int, None, ContractError),
    )


def _new_tokens(raw: dict) -> int | None:
    """An explicit null means "up to the context", as in SGLang; a missing field 128."""
    if "max_new_tokens" in raw and raw["max_new_tokens"] is None:
        return None
    return _number(raw, "max_new_tokens", 128, lambda n: n >= 0, "at least 0", int)


def _number(raw: dict, name: str, default, fits: Callable[[float], bool], range_: str, kind: type = float):
    value = raw.get(name)
    if value is None:
        return default
    allowed = (int,) if kind is int else (int, float)
    if type(value) not in allowed:
        raise ContractError(f"{name} must be a number {range_}, got {value!r}")
    if not math.isfinite(value) or not fits(value):
        raise RequestError(f"{name} must be {range_}, got {value!r}")
    return value


_REQUIRED = object()


def field_of(body: dict, name: str, kind: type, default=_REQUIRED, error: type = MalformedRequest):
    """`body[name]`, which must be of exactly `kind`, else `error`; null and missing count as `default` where
    there is one.
    """
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if type(value) is not kind:
        raise error(f"{name} must be given as {kind.__name__}, not {type(value).__name__}")
    return value


class Engine:
    """Serves the Hugging Face directory `model_path`.

    `deliver` receives outputs (see `Generation.step`) and `failed` the error that ended the loop, both on the
    engine's thread. Raises ModelError for a model that cannot be served, SettingsError for a context it has not.
    """

    def __init__(
        self,
        model_path: str | Path,
        deliver: Callable[[list[Output]], None],
        failed: Callable[[BaseException], None],
        *,
        version: str = "default",
        max_running: int = 32,
        context_length: int | None = None,
        threads: int = 1,
        device: str = "cpu",
        dtype: str = "float32",
        seed: int | None = None,
    ):
        self.model_path = str(model_path)
        self.device, self.dtype = device, dtype
        self._threads = threads
        self._deliver, self._failed = deliver, failed
        torch.set_num_threads(threads)
        with torch.inference_mode():
            model = self._load(self.model_path)
            longest = model.config.max_positions
            context = min(longest, DEFAULT_CONTEXT) if context_length is None else context_length
            if not 1 < context <= longest:
                raise errors.SettingsError(
                    f"context length must lie between 2 and {longest} here, not {context}"
                )
            self.generation = Generation(
                model, version, context=context, max_running=max_running, cached=max_running, seed=seed
            )
        self._commands: deque[tuple[Callable[[], object], Future]] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _load(self, path: str) -> Qwen3:
        try:
            return Qwen3.load(Path(path), self.device, DTYPES[self.dtype])
        except (RuntimeError, MemoryError) as error:  # torch: no memory, of any kind
            raise ModelError(f"{path} cannot be loaded: {str(error).partition(chr(10))[0]}") from None

    def start(self) -> None:
        self._thread.start()

    def close(self, deadline_s: float = 10.0) -> None:
        """End the thread after the step in hand. Raises EngineError if it is not over in `deadline_s`."""
        self._closed = True
        self._wake.set()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise EngineError(f"the engine's thread did not finish its step within {deadline_s} s")

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def released(self) -> bool:
        return self.generation.cache is None

    @property
    def ready(self) -> bool:
        """Whether a new request would run now."""
        return self.alive and not self.generation.paused and not self.released

    def model_info(self) -> dict:
        return {
            "model_path": self.model_path,
            "tokenizer_path": None,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.generation.version,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
        }

    def server_info(self) -> dict:
        generation = self.generation
        state = {
            "running": len(generation.running),
            "waiting": len(generation.waiting),
            "paused": generation.paused,
            "released": self.released,
        }
        return {
            "server": "gyre-embedded",
            "model_path": self.model_path,
            "weight_version": generation.version,
            "device": self.device,
            "dtype": self.dtype,
            "skip_tokenizer_init": True,
            "vocab_size": generation.config.vocab,
            "context_length": generation.context,
            "max_req_input_len": generation.context - RESERVED,
            "max_running_requests": generation.max_running,
            "internal_states": [state],
        }

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request; its `rid` must not be in use.

        Raises RequestError if it can never be served, EngineReleased if not now. A request that a release
        overtakes is aborted.
        """
        if self.released:
            raise EngineReleased("the engine's memory is released: call /resume_memory_occupation first")
        r = request
        r.check(self.generation.config.vocab, self.generation.context)

        def add() -> None:
            self.generation.add(r.rid, r.input_ids, r.sampling, stream=r.stream, extra_key=r.extra_key)
            if self.released:
                self._deliver(self.generation.abort(r.rid))

        self._send(add)

    def abort(self, rid: str | None = None) -> Future:
        """End one request, or all; each is delivered with what it has."""
        return self._send(lambda: self._deliver(self.generation.abort(rid)))

    def pause(self, mode: str) -> Future:
        """See `Generation.pause`; requests submitted from now on wait."""
        return self._send(lambda: self._deliver(self.generation.pause(mode)))

    def resume(self) -> Future:
        return self._send(self.generation.resume)

    def flush(self) -> Future:
        """Resolves to whether the cached KV could be dropped."""
        return self._send(self.generation.flush)

    def update(self, model_path: str, version: str | None, *, keep_kv: bool = False) -> Future:
        """Load other weights of the same shape. On any error the old ones stay in force, whole.

        Resolves to whether KV was treated as asked: what a pause holds in its place keeps its KV.
        """

        def load() -> bool:
            in_place = self.generation.paused and bool(self.generation.running)
            self.generation.load(self._load(model_path), version, keep_kv=keep_kv or in_place)
            self.model_path = model_path
            return keep_kv or not in_place

        return self._send(load)

    def set_version(self, version: str) -> Future:
        def label() -> None:
            self.generation.version = version

        return self._send(label)

    def release(self) -> Future:
        """Give back the memory of weights and KV. Fails with RequestError unless idle."""
        return self._send(self.generation.release)

    def occupy(self) -> Future:
        """Undo `release`: with the weights of the last `update`, even one that came in between."""

        def occupy() -> None:
            if self.generation.model is None:
                self.generation.load(self._load(self.model_path), None)
            self.generation.occupy()

        return self._send(occupy)

    def checksums(self) -> Future:
        """Resolves to the SHA-256 of every tensor in force, by name."""

        def digest() -> dict[str, str]:
            if self.generation.model is None:
                raise RequestError("the weights are released: call /resume_memory_occupation first")
            parameters = self.generation.model.parameters()
            return {name: _digest(tensor) for name, tensor in parameters.items()}

        return self._send(digest)

    def _send(self, command: Callable[[], object]) -> Future:
        future: Future = Future()
        self._commands.append((command, future))
        self._wake.set()
        return future

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps the number for each thread
        try:
            with torch.inference_mode():
                while not self._closed:
                    self._obey()
                    outputs = self.generation.step()
                    if outputs:
                        self._deliver(outputs)
                    if self.generation.idle and not self._commands:
                        self._wake.wait()
                    self._wake.clear()
        except BaseException as error:
            self._failed(error)
            raise

    def _obey(self) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            try:
                future.set_result(command())
            except TrainerError as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().cpu().view(torch.uint8).numpy()).hexdigest()
