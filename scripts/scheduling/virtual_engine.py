"""vLLM's real scheduler in virtual time: `VirtualEngine`.

Does around a scheduler what vLLM's engine core does, synchronously or asynchronously, without processes, executor and
waiting: a step takes the time that a cost model gives, and nothing else takes any. The scheduler, the KV cache manager
and the prefix cache are vLLM's.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from app.engine.scheduler import CONFIG_KEY, DeadlineScheduler
from app.engine.step_cost import PROFILES, CostProfile, step_seconds
from app.engine.targets import Targets, to_extra_args
from app.model_cache import builtin_model_path

EPOCH = 1_700_000_000.0
BLOCK = 16
H100 = PROFILES["h100-llama-3.1-8b"]


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        """The same, since the Unix epoch."""
        return EPOCH + self.now


@dataclass
class Seen:
    """What the driver saw of a request.

    `frontier`: tokens computed; `recomputed`: of them, again after a preemption; `tokens`: (token, when).
    """

    request: Request
    arrived: float
    frontier: int = 0
    recomputed: int = 0
    first_scheduled: float | None = None
    tokens: list[tuple[int, float]] = field(default_factory=list)
    finished: float | None = None
    status: Any = None
    preemptions: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0][1] - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0.0 if there is none."""
        return (self.tokens[-1][1] - self.tokens[0][1]) / max(1, len(self.tokens) - 1)


@dataclass
class _Flight:
    output: Any
    drafts: dict[str, int]
    sampled: dict[str, list[int]]
    end: float


@functools.cache
def _engine_config(max_model_len: int) -> Any:
    return AsyncEngineArgs(
        model=str(builtin_model_path("smollm2-135m-instruct")), max_model_len=max_model_len, enforce_eager=True,
        max_num_batched_tokens=max_model_len, load_format="dummy", block_size=BLOCK, skip_tokenizer_init=True,
        hf_overrides=dict(H100.hf_overrides),
    ).create_engine_config()  # fmt: skip


class VirtualEngine:
    """One scheduler of class `scheduler_cls`, or of vLLM's own with None.

    `blocks`: KV blocks of 16 tokens; `policy`: vLLM's own, `fcfs` or `priority`; `drafts`: speculative tokens per
    step; `settings`: the deadline scheduler's; other arguments are vLLM's.
    """

    def __init__(
        self,
        scheduler_cls: Any = DeadlineScheduler,
        *,
        is_asynchronous: bool = False,
        blocks: int = 2048,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 8192,
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        policy: str = "fcfs",
        max_loras: int = 0,
        drafts: int = 0,
        profile: CostProfile = H100,
        settings: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        config = copy.deepcopy(_engine_config(max_model_len))
        limits = config.scheduler_config
        limits.async_scheduling = is_asynchronous
        limits.max_num_seqs = max_num_seqs
        limits.max_num_batched_tokens = max_num_batched_tokens
        limits.enable_chunked_prefill = chunked_prefill
        limits.long_prefill_token_threshold = long_prefill_token_threshold
        limits.policy = policy
        config.cache_config.enable_prefix_caching = prefix_caching
        config.cache_config.num_gpu_blocks = blocks
        config.additional_config = {CONFIG_KEY: settings or {}}
        if max_loras:
            from vllm.config.lora import LoRAConfig

            config.lora_config = LoRAConfig(max_loras=max_loras, max_cpu_loras=8, max_lora_rank=8)
        if drafts:
            from vllm.config import SpeculativeConfig

            config.speculative_config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=3,
                target_model_config=config.model_config, target_parallel_config=config.parallel_config,
            )  # fmt: skip
        if scheduler_cls is None:
            scheduler_cls = AsyncScheduler if is_asynchronous else Scheduler
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
        self.config = config
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.clock = VirtualClock()
        if isinstance(self.scheduler, DeadlineScheduler):
            self.scheduler.clock = self.clock
            self.scheduler.wall_clock = self.clock.wall
        self.seen: dict[str, Seen] = {}
        self.busy_s = 0.0
        self._alive: dict[str, Seen] = {}
        self._random = random.Random(seed)
        self._profile = profile
        self._drafts = drafts
        self._in_flight: deque[_Flight] = deque()
        self._busy_until = 0.0
        self._depth = 2 if is_asynchronous else 1
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)

    def add(
        self,
        name: str,
        prompt: int | list[int],
        output: int,
        targets: Targets | None = None,
        priority: int = 0,
        lora: int = 0,
        arrived: float | None = None,
    ) -> Seen:
        """A request arrives; a prompt given as a number is that many tokens like no other's."""
        number = len(self.seen) + 1
        arrived = self.clock() if arrived is None else arrived
        request = Request(
            request_id=name,
            prompt_token_ids=[number] * prompt if isinstance(prompt, int) else prompt,
            sampling_params=SamplingParams(
                max_tokens=output, ignore_eos=True, extra_args=to_extra_args(targets) if targets else None
            ),
            pooling_params=None,
            arrival_time=EPOCH + arrived,
            priority=priority,
            lora_request=LoRARequest(f"lora{lora}", lora, "/none") if lora else None,
            block_hasher=self._hasher if self.config.cache_config.enable_prefix_caching else None,
        )
        self.seen[name] = self._alive[name] = seen = Seen(request, arrived)
        self.scheduler.add_request(request)
        return seen

    def abort(self, name: str) -> None:
        """Its client went away."""
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self._note_ends()

    def step(self) -> bool:
        """What an engine core does in one round of its loop; False if there was nothing to do."""
        if not self.scheduler.has_requests() and not self._in_flight:
            return False
        if self.scheduler.has_requests():
            output = self._schedule()
            if output.total_num_scheduled_tokens:
                self._in_flight.append(self._execute(output))
                if len(self._in_flight) < self._depth:
                    return True
            elif not self._in_flight:
                self.scheduler.update_from_output(output, _model_output({}))
                self._note_ends()
                return bool(self.scheduler.has_requests())
        if self._in_flight:
            self._finish(self._in_flight.popleft())
        return True

    def _schedule(self) -> Any:
        output = self.scheduler.schedule()
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, number in output.num_scheduled_tokens.items():
            seen = self.seen[name]
            seen.recomputed += max(0, seen.frontier - begins[name]) if name in cached.resumed_req_ids else 0
            seen.frontier = begins[name] + number
            if seen.first_scheduled is None:
                seen.first_scheduled = self.clock()
        return output

    def _execute(self, output: Any) -> _Flight:
        begin = max(self.clock(), self._busy_until)
        decodes, context, finishing = 0, 0, 0
        prefills: list[tuple[int, int]] = []
        sampled: dict[str, list[int]] = {}
        drafts = output.scheduled_spec_decode_tokens
        for name, number in output.num_scheduled_tokens.items():
            seen = self.seen[name]
            request = seen.request
            speculative = len(drafts.get(name, ()))
            known = request.num_tokens + request.num_output_placeholders - speculative
            is_sampled = not request.is_prefill_chunk
            if number == 1 + speculative and seen.tokens:
                decodes += 1
                context += seen.frontier
            else:
                prefills.append((number, seen.frontier - number))
                finishing += is_sampled
            accepted = self._random.randint(0, speculative)
            sampled[name] = [100 + (known + index) % 1000 for index in range(1 + accepted)] if is_sampled else []
        seconds = step_seconds(self._profile, decodes, context, prefills, finishing)
        self.busy_s += seconds
        self._busy_until = begin + seconds
        return _Flight(output, {name: len(ids) for name, ids in drafts.items()}, sampled, self._busy_until)

    def _finish(self, flight: _Flight) -> None:
        self.clock.now = max(self.clock.now, flight.end)
        for name, drafted in flight.drafts.items():
            self.seen[name].frontier -= drafted - (len(flight.sampled[name]) - 1)
        outputs = self.scheduler.update_from_output(flight.output, _model_output(flight.sampled))
        for client in outputs.values():
            for output in client.outputs:
                self.seen[output.request_id].tokens += [(token, self.clock()) for token in output.new_token_ids]
        self._note_ends()
        if self._drafts and self._depth == 1:
            alive = [name for name, ids in flight.sampled.items() if ids and name in self.scheduler.requests]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(alive, [[7] * self._random.randint(0, self._drafts) for _ in alive])
            )

    def _note_ends(self) -> None:
        for name, seen in list(self._alive.items()):
            if seen.request.is_finished():
                seen.finished = self.clock()
                seen.status = seen.request.status
                del self._alive[name]


def _model_output(sampled: dict[str, list[int]]) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={name: index for index, name in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
    )
