"""A simulated GPU: a vLLM executor that takes the time a cost model gives instead of running a model.

vLLM's engine core, scheduler, KV-cache manager, prefix cache and OpenAI layer are the real ones. No weights are loaded
and no KV cache is allocated. Plain vLLM can use it:

    python -m vllm.entrypoints.openai.api_server --model DIR
        --distributed-executor-backend app.engine.simulated.SimulatedExecutor
        --additional-config '{"sluice_simulation": {"profile": "h100-llama-3.1-8b", "time_scale": 1.0}}'

DIR holds a config.json and a tokenizer; `--hf-overrides` can give it the shape of another model.

**Time.** A step begins when the engine hands it over, or when the step before it ends, whichever is later, and ends
after the cost model's seconds times `time_scale`. What the engine's own CPU work takes between steps therefore counts
as it would with a real GPU: in full without asynchronous scheduling, hidden behind the running step with it. What the
simulation itself takes, waking up a little late and choosing tokens, doesn't: the next step begins as much earlier.
Waking up very late means that the machine had no CPU for the engine; that isn't made up for.

**Tokens.** The simulated model is certain: the next token is a function of the prompt, the position and the request's
seed, and has probability 1 (log-probability 0; all others vLLM's floor); so have the prompt's own tokens. It is an
ordinary word, never an end of sequence, so answers are as long as `max_tokens` or a stop makes them. Grammars,
`allowed_token_ids` and `min_tokens` are kept: of what a grammar allows, an end of sequence or of a structure is taken
first, so that structured output ends. Penalties, bad words, logit bias and temperature change nothing, and choices of
one request (`n`) differ only with a seed.

Relies on vLLM's executor interface (v1/executor/abstract.py), SchedulerOutput and ModelRunnerOutput.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from app.config import describe_validation_error
from app.engine.step_cost import CostProfile, load_profile, parse_profile, step_seconds
from app.errors import ConfigError
from app.types import MIN_RESIDENCE_S, PATIENCE_S

_CONFIG_KEY = "sluice_simulation"
_DEFAULT_PROFILE = "h100-llama-3.1-8b"
# GPUs' default; the CPU build would take larger ones.
_BLOCK_SIZE = 16
# How vLLM writes a probability of zero.
_IMPOSSIBLE_LOGPROB = -9999.0
_MAX_STEP_RECORDS = 8192
# Timers are late by about 0.1 ms on an idle machine.
_MAX_TIMER_LATENESS = 1e-3
_PLAIN_WORD = re.compile(r"^[\u0120\u2581 ]?[a-z]{2,}$")
# One of these ends a string, object or array, or at least its present element.
_CLOSERS = ('"', "}", "]", ",", ":")
# A row of a grammar's bitmask that allows everything, as where the grammar doesn't hold yet, has all bits set.
_EVERYTHING_ALLOWED = -1
# What vLLM asks of every worker and a simulated one has nothing to do for.
_NOTHING_TO_DO = frozenset(
    {
        "initialize_from_config", "reset_encoder_cache", "reset_mm_cache", "synchronize_device", "update_max_model_len",
    }
)  # fmt: skip

_T = TypeVar("_T")


class _Settings(BaseModel):
    """What vLLM's `additional_config` says of the simulation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    profile: str | dict[str, Any] = _DEFAULT_PROFILE
    time_scale: float = Field(1.0, gt=0)


def simulated_engine_args(profile: CostProfile | str, time_scale: float) -> dict[str, Any]:
    """The AsyncEngineArgs fields that put an engine on a simulated GPU.

    `profile`: itself, its name or the path of its YAML file; `time_scale`: real seconds per simulated second.

    Raises:
        ConfigError: there is no such profile.
    """
    cost = load_profile(profile) if isinstance(profile, str) else profile
    return {
        "hf_overrides": dict(cost.hf_overrides),
        "distributed_executor_backend": "app.engine.simulated.SimulatedExecutor",
        "additional_config": {
            _CONFIG_KEY: {
                "profile": profile if isinstance(profile, str) else profile.model_dump(),
                "time_scale": time_scale,
            },
            # What DeadlineScheduler does not learn.
            "sluice_scheduler": {
                "patience_ms": PATIENCE_S * time_scale * 1000,
                "min_residence_ms": MIN_RESIDENCE_S * time_scale * 1000,
            },
        },
        "load_format": "dummy",
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": _BLOCK_SIZE,
    }


def _read_settings(additional_config: Any) -> tuple[CostProfile, float]:
    """Profile and time scale from vLLM's `additional_config`.

    Raises:
        ConfigError: an unknown key, or a value that is none.
    """
    where = f"additional_config.{_CONFIG_KEY}"
    try:
        settings = _Settings.model_validate((additional_config or {}).get(_CONFIG_KEY, {}))
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe_validation_error(error)}") from None
    if isinstance(settings.profile, str):
        return load_profile(settings.profile), settings.time_scale
    return parse_profile(settings.profile, f"{where}.profile"), settings.time_scale


@dataclass(slots=True)
class _Request:
    """What a worker keeps of a request. `computed`: its tokens in the KV cache; `outputs`: tokens sampled so far."""

    prompt_token_ids: list[int]
    computed: int
    outputs: int
    digest: bytes
    logprobs: int | None
    logprob_token_ids: list[int] | None
    prompt_logprobs: int | None
    allowed_token_ids: list[int] | None
    min_tokens: int
    stop_token_ids: frozenset[int]

    @property
    def tokens(self) -> int:
        return len(self.prompt_token_ids) + self.outputs


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: what was in it, and how long it should have taken and took, in real seconds.

    `idle`: how long the GPU had nothing to do before it; under load, what the engine's CPU work cost.
    """

    decodes: int
    decode_context_tokens: int
    prefill_tokens: int
    predicted: float
    measured: float
    idle: float


@dataclass(slots=True)
class _Step:
    """A step on its way. `sampling`: the requests that get a token from it; `prompt_done`: whose prompt ends in it."""

    req_ids: list[str]
    begin: float = 0.0
    end: float = 0.0
    idle: float = 0.0
    decodes: int = 0
    decode_context_tokens: int = 0
    prefill_tokens: int = 0
    sampling: set[str] = field(default_factory=set)
    prompt_done: list[str] = field(default_factory=list)
    is_recorded: bool = False


class _WhenStepEnds(Future, Generic[_T]):  # type: ignore[type-arg]
    """A result that is there when the step that computes it has ended. Waiting for it is waiting for the GPU."""

    def __init__(self, wait: Callable[[], None], value: _T) -> None:
        super().__init__()
        self._wait = wait
        self._value = value

    def result(self, timeout: float | None = None) -> _T:
        """The result. A step always ends, so `timeout` is not needed and not kept."""
        if not self.done():
            self._wait()
            self.set_result(self._value)
        return self._value


class SimulatedGpu:
    """Executes scheduler outputs in simulated time. `choose` picks tokens; clock and sleep are in seconds."""

    def __init__(
        self,
        profile: CostProfile,
        time_scale: float,
        choose: TokenChooser,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._profile = profile
        self._time_scale = time_scale
        self._choose = choose
        self._clock = clock
        self._sleep = sleep
        self._requests: dict[str, _Request] = {}
        self._busy_until = 0.0
        # Seconds since the engine last waited for the GPU that the simulation itself took, not the engine.
        self._own_seconds = 0.0
        self._unsampled: deque[_Step] = deque()
        self.records: deque[StepRecord] = deque(maxlen=_MAX_STEP_RECORDS)

    @property
    def live_requests(self) -> int:
        """Requests whose state is kept."""
        return len(self._requests)

    def execute(self, scheduled: Any) -> _WhenStepEnds[ModelRunnerOutput | None]:
        """Begin a step. The result is None, as vLLM has it when tokens are still to be sampled."""
        handed_over = self._clock()
        self._update_requests(scheduled)
        if not scheduled.num_scheduled_tokens:
            self._own_seconds += self._clock() - handed_over
            return _WhenStepEnds(_nothing, EMPTY_MODEL_RUNNER_OUTPUT)
        step = self._begin(scheduled.num_scheduled_tokens, handed_over - self._own_seconds)
        self._unsampled.append(step)
        self._own_seconds = self._clock() - handed_over
        return _WhenStepEnds(lambda: self._wait_for(step), None)

    def sample(self, grammar: Any) -> _WhenStepEnds[ModelRunnerOutput]:
        """The tokens of the oldest step that has not been asked for them."""
        asked = self._clock()
        step = self._unsampled.popleft()
        masks: dict[str, Any] = {}
        if grammar is not None:
            masks = dict(zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True))
        sampled: list[list[int]] = []
        for req_id in step.req_ids:
            if req_id not in step.sampling:
                sampled.append([])
                continue
            request = self._requests[req_id]
            avoided = request.stop_token_ids if request.outputs < request.min_tokens else ()
            sampled.append(
                [self._choose(request.digest, request.outputs, masks.get(req_id), request.allowed_token_ids, avoided)]
            )
            request.outputs += 1
        output = ModelRunnerOutput(
            req_ids=step.req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(step.req_ids)},
            sampled_token_ids=sampled,
            logprobs=self._logprobs(step, sampled),
            prompt_logprobs_dict=self._prompt_logprobs(step),
        )
        self._own_seconds += self._clock() - asked
        return _WhenStepEnds(lambda: self._wait_for(step), output)

    def _update_requests(self, scheduled: Any) -> None:
        for req_id in scheduled.finished_req_ids:
            self._requests.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params
            prompt = list(new.prompt_token_ids)
            self._requests[new.req_id] = _Request(
                prompt_token_ids=prompt,
                computed=new.num_computed_tokens,
                # A request that was preempted may come back as a new one that has outputs already.
                outputs=len(new.prefill_token_ids) - len(prompt) if new.prefill_token_ids else 0,
                digest=_digest(prompt, params.seed),
                logprobs=params.logprobs,
                logprob_token_ids=params.logprob_token_ids,
                prompt_logprobs=params.prompt_logprobs,
                allowed_token_ids=params.allowed_token_ids,
                min_tokens=params.min_tokens,
                stop_token_ids=frozenset(params.all_stop_token_ids),
            )
        cached = scheduled.scheduled_cached_reqs
        for req_id, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            request = self._requests[req_id]
            request.computed = computed
            request.outputs = outputs

    def _begin(self, num_scheduled_tokens: dict[str, int], earliest: float) -> _Step:
        step = _Step(list(num_scheduled_tokens))
        prefills: list[tuple[int, int]] = []
        finishing = 0
        for req_id, tokens in num_scheduled_tokens.items():
            request = self._requests[req_id]
            reached = request.computed + tokens
            is_sampled = reached >= request.tokens
            if tokens == 1 and is_sampled and request.outputs:
                step.decodes += 1
                step.decode_context_tokens += reached
            else:
                prefills.append((tokens, request.computed))
                step.prefill_tokens += tokens
                finishing += is_sampled
                if is_sampled and not request.outputs:
                    step.prompt_done.append(req_id)
            if is_sampled:
                step.sampling.add(req_id)
            request.computed = reached
        seconds = step_seconds(self._profile, step.decodes, step.decode_context_tokens, prefills, finishing)
        step.idle = max(0.0, earliest - self._busy_until)
        step.begin = max(earliest, self._busy_until)
        step.end = self._busy_until = step.begin + seconds * self._time_scale
        return step

    def _wait_for(self, step: _Step) -> None:
        asked = self._clock()
        while (left := step.end - self._clock()) > 0:
            self._sleep(left)
        woken = self._clock()
        if step.end > asked:
            # Whatever the simulation did before has passed while the GPU was busy.
            self._own_seconds = min(woken - step.end, _MAX_TIMER_LATENESS)
        if step.is_recorded:
            return
        step.is_recorded = True
        self.records.append(
            StepRecord(
                step.decodes,
                step.decode_context_tokens,
                step.prefill_tokens,
                step.end - step.begin,
                woken - step.begin,
                step.idle,
            )
        )

    def _logprobs(self, step: _Step, sampled: Sequence[list[int]]) -> LogprobsLists | None:
        """One row per request of the step, as the scheduler slices them; None if nobody wants any."""
        vocabulary = self._choose.vocabulary
        alternatives = -1
        named: dict[int, list[int]] = {}
        for row, req_id in enumerate(step.req_ids):
            if req_id not in step.sampling:
                continue
            request = self._requests[req_id]
            if request.logprob_token_ids:
                named[row] = request.logprob_token_ids
                alternatives = max(alternatives, len(request.logprob_token_ids))
            elif request.logprobs is not None:
                alternatives = max(alternatives, _how_many(request.logprobs, vocabulary))
        if alternatives < 0:
            return None
        tokens = np.array([ids[0] if ids else 0 for ids in sampled], dtype=np.int32)
        ids, logprobs, ranks = _certain(tokens, alternatives, vocabulary)
        for row, wanted in named.items():
            columns = slice(1, len(wanted) + 1)
            ids[row, columns] = wanted
            logprobs[row, columns] = np.where(ids[row, columns] == tokens[row], 0.0, _IMPOSSIBLE_LOGPROB)
        return LogprobsLists(ids, logprobs, ranks)

    def _prompt_logprobs(self, step: _Step) -> dict[str, LogprobsTensors | None]:
        told: dict[str, LogprobsTensors | None] = {}
        vocabulary = self._choose.vocabulary
        for req_id in step.prompt_done:
            request = self._requests[req_id]
            if request.prompt_logprobs is not None:
                tokens = np.array(request.prompt_token_ids[1:], dtype=np.int32)
                arrays = _certain(tokens, _how_many(request.prompt_logprobs, vocabulary), vocabulary)
                told[req_id] = LogprobsTensors(*(torch.from_numpy(array) for array in arrays))
        return told


def _nothing() -> None:
    pass


def _digest(prompt_token_ids: list[int], seed: int | None) -> bytes:
    content = np.asarray(prompt_token_ids, dtype=np.int64).tobytes() + repr(seed).encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def _how_many(logprobs: int, vocabulary: int) -> int:
    """How many of the most likely tokens a request wants to see; -1 is vLLM's word for all."""
    return vocabulary if logprobs == -1 else logprobs


def _certain(tokens: Any, alternatives: int, vocabulary: int) -> tuple[Any, Any, Any]:
    """vLLM's log-probability arrays for tokens with probability 1.

    Shapes: (tokens, alternatives + 1) ids and log-probabilities, (tokens,) ranks. As vLLM's sampler has it, the chosen
    token stands first and then the most likely ones, of which it is the first again.
    """
    ranked = np.arange(alternatives, dtype=np.int32)
    offsets = np.concatenate((np.zeros(1, dtype=np.int32), ranked))
    ids = (tokens[:, None] + offsets[None, :]) % vocabulary
    logprobs = np.tile(np.where(offsets == 0, 0.0, _IMPOSSIBLE_LOGPROB).astype(np.float32), (len(tokens), 1))
    return ids.astype(np.int32), logprobs, np.ones(len(tokens), dtype=np.int32)


class TokenChooser:
    """Picks token ids: a pure function of a request's digest, the position and what is allowed there."""

    def __init__(
        self, vocabulary: int, words: Sequence[int], eos: int | None, closers: Sequence[int], blanks: Sequence[int]
    ) -> None:
        """`vocabulary`: how many ids there are; `words`: ids to choose from freely; `eos`: the end of sequence;
        `closers`: ids that end a structure, best first; `blanks`: ids of white space, taken only where a grammar
        allows nothing else."""
        self.vocabulary = vocabulary
        self._words = list(words)
        self._eos = eos
        self._endings = [*([] if eos is None else [eos]), *closers]
        self._blanks = np.zeros(vocabulary, dtype=bool)
        self._blanks[list(blanks)] = True

    def __call__(
        self,
        digest: bytes,
        position: int,
        mask: Any = None,
        allowed: Sequence[int] | None = None,
        avoided: Collection[int] = (),
    ) -> int:
        """The id at `position`.

        `mask`: a grammar's bitmask, 32 ids per int32; `allowed`: the ids a request allows; `avoided`: ids to take only
        where nothing else is possible.
        """
        content = digest + position.to_bytes(8, "little")
        number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        if mask is None or (mask == _EVERYTHING_ALLOWED).all():
            return self._among(self._words if allowed is None else allowed, number, avoided)
        permitted = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
        permitted = permitted[: self.vocabulary].astype(bool)
        if allowed is not None:
            permitted &= self._only(allowed)
        if avoided:
            others = permitted & ~self._only(avoided)
            permitted = others if others.any() else permitted
        for token_id in self._endings:
            if permitted[token_id]:
                return token_id
        candidates = np.flatnonzero(permitted & ~self._blanks)
        if not len(candidates):
            candidates = np.flatnonzero(permitted)
        # Nothing is allowed by a grammar that cannot be met; the engine then ends the request.
        return int(candidates[number % len(candidates)]) if len(candidates) else 0

    def _among(self, candidates: Sequence[int], number: int, avoided: Collection[int]) -> int:
        for step in range(len(candidates)):
            token_id = candidates[(number + step) % len(candidates)]
            if token_id != self._eos and token_id not in avoided:
                return token_id
        return candidates[number % len(candidates)]

    def _only(self, token_ids: Collection[int]) -> Any:
        """(vocabulary,) bools: which ids are among `token_ids`."""
        only = np.zeros(self.vocabulary, dtype=bool)
        only[[token_id for token_id in token_ids if token_id < self.vocabulary]] = True
        return only

    @classmethod
    def for_tokenizer(cls, tokenizer: Any, vocabulary: int) -> TokenChooser:
        """A chooser of plain words; without a tokenizer, of any ids but the lowest, where special ones are."""
        if tokenizer is None:
            return cls(vocabulary, range(min(1000, vocabulary // 2), vocabulary), None, [], [])
        size = min(vocabulary, len(tokenizer))
        tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
        special = set(tokenizer.all_special_ids)
        words = [index for index, token in enumerate(tokens) if token and _PLAIN_WORD.match(token)]
        by_token = {token: index for index, token in enumerate(tokens)}
        blanks = [index for index in range(size) if index not in special and not tokenizer.decode([index]).strip()]
        eos = tokenizer.eos_token_id
        return cls(
            vocabulary,
            words or [index for index in range(size) if index not in special],
            eos if eos is not None and eos < vocabulary else None,
            [by_token[token] for token in _CLOSERS if token in by_token],
            blanks,
        )


class SimulatedExecutor(Executor):
    """vLLM's executor on one simulated GPU."""

    def _init_executor(self) -> None:
        self._profile, time_scale = _read_settings(self.vllm_config.additional_config)
        self._refuse_what_is_not_simulated()
        vocabulary = self.model_config.get_vocab_size()
        tokenizer = None
        if not self.model_config.skip_tokenizer_init:
            from vllm.tokenizers import cached_tokenizer_from_config

            tokenizer = cached_tokenizer_from_config(self.model_config)
        self._gpu = SimulatedGpu(self._profile, time_scale, TokenChooser.for_tokenizer(tokenizer, vocabulary))

    def _refuse_what_is_not_simulated(self) -> None:
        parallel, model = self.parallel_config, self.model_config
        refused = {
            "tensor, pipeline or data parallelism": parallel.world_size_across_dp > 1,
            "LoRA": self.lora_config is not None,
            "speculative decoding": self.speculative_config is not None,
            "pooling models": model.runner_type != "generate",
            "multi-modal models": model.is_multimodal_model,
            "models other than decoders with full attention": (
                model.is_encoder_decoder or model.is_attention_free or model.is_hybrid or model.is_diffusion
            )
            or model.use_mla,
            "prompt embeddings": model.enable_prompt_embeds,
            "sleep mode": model.enable_sleep_mode,
            "sampling masks": model.return_sampling_mask,
            f"logprobs_mode {model.logprobs_mode}": "logits" in model.logprobs_mode,
            f"kv_cache_dtype {self.cache_config.cache_dtype}": (
                self.cache_config.cache_dtype not in ("auto", "bfloat16", "float16")
            ),
            "KV transfer": self.vllm_config.kv_transfer_config is not None,
            "encoder-cache transfer": self.vllm_config.ec_transfer_config is not None,
        }
        for what, present in refused.items():
            if present:
                raise ValueError(f"The simulated GPU does not support {what}; switch it off or use a real executor.")

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a method of the one simulated worker.

        Raises:
            NotImplementedError: it does not have this method, or `method` is a function for a real worker.
        """
        worker_method = getattr(self, f"_worker_{method}", None) if isinstance(method, str) else None
        if worker_method is None and method not in _NOTHING_TO_DO:
            name = method if isinstance(method, str) else method.__name__
            raise NotImplementedError(f"The simulated GPU's worker does not have `{name}`.")
        result = [None if worker_method is None else worker_method(*args, **(kwargs or {}))]
        if not non_block:
            return result
        future: Future[list[Any]] = Future()
        future.set_result(result)
        return future

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Begin a step; without `non_block`, wait for its end."""
        future = self._gpu.execute(scheduler_output)
        return future if non_block else future.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The tokens of the step that was begun first; without `non_block`, wait for its end."""
        future = self._gpu.sample(grammar_output)
        return future if non_block else future.result()

    def check_health(self) -> None:
        """Nothing can fail."""

    def shutdown(self) -> None:
        """Nothing is held."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Steps can be handed over while the one before still runs."""
        return True

    def _worker_get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        config = self.model_config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size or _BLOCK_SIZE,
            num_kv_heads=config.get_num_kv_heads(self.parallel_config),
            head_size=config.get_head_size(),
            dtype=torch.bfloat16,
        )
        return {f"layer.{index}": spec for index in range(config.get_num_layers(self.parallel_config))}

    def _worker_determine_available_memory(self) -> int:
        """Bytes in which the model's shape, whatever it is, holds as many tokens as the profile's model would."""
        blocks_of_tokens = self.cache_config.block_size or _BLOCK_SIZE
        bytes_per_block = sum(spec.page_size_bytes for spec in self._worker_get_kv_cache_spec().values())
        if self.cache_config.kv_cache_memory_bytes is None:
            return int(self._profile.kv_capacity_tokens * bytes_per_block // blocks_of_tokens)
        tokens_times_bytes = self.cache_config.kv_cache_memory_bytes * bytes_per_block
        return int(tokens_times_bytes // (self._profile.kv_bytes_per_token * blocks_of_tokens))

    def _worker_get_supported_kv_cache_layouts(self) -> Any:
        return WorkerBase.get_supported_kv_cache_layouts(self)

    def _worker_set_kv_cache_layout(self, kv_cache_layout: str) -> None:
        WorkerBase.set_kv_cache_layout(self, kv_cache_layout)

    def _worker_compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def _worker_get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _worker_sluice_step_records(self) -> list[dict[str, Any]]:
        """The last steps' records since the last call, as mappings of `StepRecord`'s fields."""
        records = [asdict(record) for record in self._gpu.records]
        self._gpu.records.clear()
        return records
