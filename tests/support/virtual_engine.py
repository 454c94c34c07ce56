"""VirtualEngine that asserts, after every step, what must hold whatever the load."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from scripts.scheduling.virtual_engine import VirtualEngine


class CheckedEngine(VirtualEngine):
    """`steps`: for each step so far, how many tokens each request got."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[dict[str, int]] = []
        self._free_at_start = self._free_blocks()

    def run(self, seconds: float = float("inf"), most_steps: int = 200_000) -> None:
        """Step until nothing is left or this much virtual time has passed."""
        end = self.clock() + seconds
        idle = 0
        for _ in range(most_steps):
            steps = len(self.steps)
            if self.clock() >= end or not self.step():
                return
            idle = 0 if len(self.steps) > steps or self._in_flight else idle + 1
            assert idle < 50, f"no progress: running {self.scheduler.running}, waiting {list(self.scheduler.waiting)}"
        raise AssertionError("it does not end")

    def check_all_is_returned(self) -> None:
        """Every request ended, and every KV block is free again."""
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.scheduler.requests
        assert self._free_blocks() == self._free_at_start
        for name, seen in self.seen.items():
            assert seen.finished is not None, name
            if seen.status != RequestStatus.FINISHED_ABORTED:
                assert len(seen.tokens) == seen.request.max_tokens, name

    def _free_blocks(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def _schedule(self) -> Any:
        preemptions = {name: seen.request.num_preemptions for name, seen in self._alive.items()}
        frontiers = {name: seen.frontier for name, seen in self._alive.items()}
        new = {name for name, seen in self._alive.items() if seen.first_scheduled is None}
        output = super()._schedule()
        if output.total_num_scheduled_tokens:
            self.steps.append(dict(output.num_scheduled_tokens))
        limits = self.config.scheduler_config
        tokens = output.num_scheduled_tokens
        assert sum(tokens.values()) == output.total_num_scheduled_tokens <= limits.max_num_batched_tokens
        assert len(self.scheduler.running) <= limits.max_num_seqs
        running = [request.request_id for request in self.scheduler.running]
        assert len(set(running)) == len(running)
        waiting = [request.request_id for request in self.scheduler.waiting]
        assert len(set(waiting)) == len(waiting)
        assert not set(running) & set(waiting)
        assert set(tokens) <= set(running)
        adapters = set()
        for name, number in tokens.items():
            seen = self.seen[name]
            request = seen.request
            begin = seen.frontier - number
            assert seen.finished is None
            assert number > 0
            if not limits.enable_chunked_prefill and begin < request.num_prompt_tokens:
                assert begin + number >= request.num_prompt_tokens
            is_back = request.num_preemptions > seen.preemptions
            seen.preemptions = request.num_preemptions
            if name in new or is_back:
                # A prefix may come from the cache.
                assert begin < request.num_tokens
            else:
                assert begin == frontiers[name], "a token is left out, or computed again without a preemption"
            if request.lora_request:
                adapters.add(request.lora_request.lora_int_id)
        if self.config.lora_config:
            assert len(adapters) <= self.config.lora_config.max_loras
        for name, before in preemptions.items():
            if self.seen[name].finished is None and self.seen[name].request.num_preemptions > before:
                assert name not in tokens, "preempted and resumed in the same step"
        return output
