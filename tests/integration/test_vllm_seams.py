"""What app/engine relies on in vLLM. When an upgrade moves one of these, the failing test says which."""

from __future__ import annotations

import inspect

import pytest
import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.renderers.base import BaseRenderer
from vllm.renderers.hf import HfRenderer
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger
from vllm.v1.metrics.stats import RequestStateStats, SchedulerStats

pytestmark = pytest.mark.integration


def test_the_pinned_version_is_installed() -> None:
    assert vllm.__version__.startswith("0.32.0")


def test_request_states_hold_the_timestamps() -> None:
    stats = RequestStateStats(arrival_time=1.0)
    for name in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"):
        assert getattr(stats, name) == 0.0
    assert (stats.num_generation_tokens, stats.num_preemptions) == (0, 0)
    source = inspect.getsource(RequestState.__init__)
    for name in ("self.stats", "self.parent_req", "self.prompt_len", "self.num_cached_tokens", "self.request_id"):
        assert f"{name} = " in source, name


def test_a_sequence_gets_its_state_in_one_synchronous_call() -> None:
    assert not inspect.iscoroutinefunction(OutputProcessor.add_request)
    assert list(inspect.signature(OutputProcessor.add_request).parameters)[1] == "request"
    for method in (AsyncLLM._add_request, AsyncLLM.add_request):
        assert "self.output_processor.add_request(" in inspect.getsource(method)


def test_aborting_takes_internal_ids() -> None:
    assert "internal" in inspect.signature(AsyncLLM.abort).parameters


@pytest.mark.parametrize("request_class", [ChatCompletionRequest, CompletionRequest])
def test_token_ids_can_replace_rendering(request_class: type) -> None:
    assert "kv_transfer_params" in request_class.model_fields  # type: ignore[attr-defined]
    source = inspect.getsource(inspect.getmodule(OnlineRenderer))  # type: ignore[arg-type]
    assert 'kv.pop("prompt_token_ids", None)' in source


@pytest.mark.parametrize("serving", [OpenAIServingChat, OpenAIServingCompletion])
def test_stream_events_look_as_expected(serving: type) -> None:
    source = inspect.getsource(serving)
    assert 'yield f"data: {data}\\n\\n"' in source
    assert 'yield "data: [DONE]\\n\\n"' in source
    assert "id=request_id" in source  # the first field of a chunk
    assert "choices=[]" in source  # only in the usage chunk


def test_executors_have_the_methods_that_the_simulation_overrides() -> None:
    for name in ("_init_executor", "collective_rpc", "execute_model", "sample_tokens", "check_health"):
        assert callable(getattr(Executor, name))


def test_metrics_can_go_through_ray() -> None:
    assert inspect.isclass(RayPrometheusStatLogger)


def test_gaps_between_tokens_are_observed_one_by_one() -> None:
    source = inspect.getsource(PrometheusStatLogger.record)
    assert "self.histogram_inter_token_latency[engine_idx].observe(itl)" in source


def test_collectors_take_outputs_as_the_tap_expects() -> None:
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    assert collector.output is None
    assert not collector.ready.is_set()
    assert "req_state.queue.put(request_output)" in inspect.getsource(OutputProcessor.process_outputs)
    # What the tap has handed back is taken from where it lay.
    assert "q.get_nowait() or await q.get()" in inspect.getsource(AsyncLLM.generate)
    source = inspect.getsource(RequestOutputCollector)
    for line in ("self.output = output", "self.ready.set()", "self.ready.clear()", "self.output.add(output"):
        assert line in source


def test_counts_of_a_stream_come_from_its_outputs_token_ids() -> None:
    for serving in (OpenAIServingChat, OpenAIServingCompletion):
        assert "previous_num_tokens[i] += len(output.token_ids)" in inspect.getsource(serving)


def test_rendering_hands_over_to_threads_where_it_can_be_intercepted() -> None:
    assert "self._tokenize_prompt_async(prompt, params)" in inspect.getsource(BaseRenderer)
    assert "self._apply_chat_template_async(" in inspect.getsource(HfRenderer)
    assert "safe_apply_chat_template, executor=self._executor" in inspect.getsource(HfRenderer.__init__)


def test_the_scheduler_asks_about_each_request_before_it_settles_its_tokens() -> None:
    """Of running and of waiting ones; 0 passes a running one over."""
    source = inspect.getsource(Scheduler.schedule)
    assert source.count("self._reserve_prefill_lookahead(") == 2
    parameters = list(inspect.signature(Scheduler._reserve_prefill_lookahead).parameters)
    assert parameters == ["self", "request", "num_computed_tokens", "num_new_tokens"]


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("schedule", ["throttle_prefills"]),
        ("update_from_output", ["scheduler_output", "model_runner_output"]),
        ("add_request", ["request"]),
        ("_free_request", ["request"]),
        ("_preempt_request", ["request", "timestamp"]),
        ("_update_request_with_output", ["request", "new_token_ids"]),
        ("_handle_blocked_waiting_request", ["request"]),
        ("_is_blocked_waiting_status", ["status"]),
        ("_get_local_prefix_cache_hit", ["request"]),
        ("make_stats", []),
    ],
)
def test_the_scheduler_has_the_methods_that_ours_extends(method: str, parameters: list[str]) -> None:
    assert not hasattr(AsyncScheduler.__dict__.get(method), "__isabstractmethod__")
    found = [name for name in inspect.signature(getattr(Scheduler, method)).parameters if name != "self"]
    assert found[: len(parameters)] == parameters


def test_the_scheduler_keeps_what_ours_reads() -> None:
    source = inspect.getsource(Scheduler)
    for name in (
        "self.running: list[Request]", "self.waiting = create_request_queue", "self.kv_holding_waiting",
        "self.max_num_active_reqs", "self.max_num_scheduled_tokens", "self.policy", "self.num_spec_tokens",
        "self.num_prefill_lookahead", "self.num_waiting_for_streaming_input", "self.need_mamba_block_aligned_split",
        "self.current_step", "self._pause_state",
    ):  # fmt: skip
        assert name in source, name


def test_every_end_of_a_request_frees_it_through_one_method() -> None:
    source = inspect.getsource(Scheduler)
    assert source.count("self._free_request(") >= 2
    assert "self.requests[request.request_id]" in inspect.getsource(Scheduler._free_blocks)


def test_queues_of_waiting_requests_have_the_methods_that_ours_has() -> None:
    assert RequestQueue.__abstractmethods__ == {
        "add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests", "remove_request",
        "remove_requests", "__bool__", "__len__", "__iter__",
    }  # fmt: skip


def test_outputs_carry_what_a_request_waited_for_and_pass_through_one_method() -> None:
    fields = EngineCoreOutput.__struct_fields__
    for name in ("request_id", "new_token_ids", "kv_transfer_params", "events"):
        assert name in fields, name
    assert EngineCoreEventType.PREEMPTED
    # Nothing between the engine core and there looks at it.
    assert list(inspect.signature(OutputProcessor.process_outputs).parameters)[1:3] == [
        "engine_core_outputs",
        "engine_core_timestamp",
    ]
    assert "output_processor.process_outputs(" in inspect.getsource(AsyncLLM)
    assert "outputs[request.client_index].append(" in inspect.getsource(Scheduler.update_from_output)


def test_scheduler_statistics_carry_a_mapping_of_names_to_integers() -> None:
    assert "num_kv_fetch_reqs_by_stage: dict[str, int]" in inspect.getsource(SchedulerStats)


def test_ray_metrics_are_made_of_classes_that_ours_uses() -> None:
    assert "scheduler_stats" in inspect.signature(RayPrometheusStatLogger.record).parameters
    for name in ("_counter_cls", "_gauge_cls"):
        assert hasattr(RayPrometheusStatLogger, name)
