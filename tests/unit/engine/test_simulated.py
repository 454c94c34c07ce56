"""The simulated GPU driven step by step, on a clock in the test's hands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput

from app.engine.simulated import SimulatedGpu, TokenChooser, simulated_engine_args
from app.engine.step_cost import PROFILES, step_seconds
from app.errors import ConfigError

H100 = PROFILES["h100-llama-3.1-8b"]
VOCABULARY = 100
EOS, QUOTE, BLANK = 2, 10, 11


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gpu(clock: Clock) -> SimulatedGpu:
    chooser = TokenChooser(VOCABULARY, range(20, VOCABULARY), endings=[EOS, QUOTE], blanks=[BLANK])
    return SimulatedGpu(H100, 1.0, chooser, clock, clock.sleep)


def new(req_id: str, prompt: list[int], computed: int = 0, **params: Any) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=SamplingParams(**params),
        pooling_params=None,
        block_ids=([],),
        num_computed_tokens=computed,
        lora_request=None,
    )


def scheduled(
    tokens: dict[str, int],
    fresh: list[NewRequestData] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    finished: set[str] | None = None,
) -> SchedulerOutput:
    """`cached`: per request, computed tokens and outputs so far."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = fresh or []
    output.num_scheduled_tokens = tokens
    output.total_num_scheduled_tokens = sum(tokens.values())
    output.finished_req_ids = finished or set()
    data = CachedRequestData.make_empty()
    for req_id, (computed, outputs) in (cached or {}).items():
        data.req_ids.append(req_id)
        data.num_computed_tokens.append(computed)
        data.num_output_tokens.append(outputs)
    output.scheduled_cached_reqs = data
    return output


def run(gpu: SimulatedGpu, step: SchedulerOutput, grammar: GrammarOutput | None = None) -> Any:
    assert gpu.execute(step).result() is None
    return gpu.sample(grammar).result()


def answer(gpu: SimulatedGpu, req_id: str, prompt: list[int], length: int, **params: Any) -> list[int]:
    """A whole answer, one request at a time."""
    tokens = run(gpu, scheduled({req_id: len(prompt)}, [new(req_id, prompt, **params)])).sampled_token_ids[0]
    while len(tokens) < length:
        position = len(prompt) + len(tokens) - 1
        tokens += run(gpu, scheduled({req_id: 1}, cached={req_id: (position, len(tokens))})).sampled_token_ids[0]
    run_finished(gpu, req_id)
    return list(tokens)


def run_finished(gpu: SimulatedGpu, *req_ids: str) -> None:
    gpu.execute(scheduled({}, finished=set(req_ids))).result()


def test_the_same_prompt_gets_the_same_answer_and_others_get_others(gpu: SimulatedGpu) -> None:
    first = answer(gpu, "a", [1, 2, 3], 8)
    assert answer(gpu, "b", [1, 2, 3], 8) == first
    assert answer(gpu, "c", [1, 2, 4], 8) != first
    assert answer(gpu, "d", [1, 2, 3], 8, seed=1) != first
    assert answer(gpu, "e", [1, 2, 3], 8, seed=1) == answer(gpu, "f", [1, 2, 3], 8, seed=1)
    assert all(20 <= token < VOCABULARY for token in first)


def test_a_step_takes_what_the_cost_model_says(gpu: SimulatedGpu, clock: Clock) -> None:
    begin = clock.now
    run(gpu, scheduled({"a": 1000}, [new("a", [1] * 1000)]))
    assert clock.now - begin == pytest.approx(step_seconds(H100, 0, 0, [(1000, 0)], 1))
    begin = clock.now
    step = scheduled({"a": 1, "b": 300}, [new("b", [2] * 500, computed=100)], {"a": (1000, 1)})
    output = run(gpu, step)
    # b's chunk starts behind 100 cached tokens and does not reach the end of its prompt.
    assert clock.now - begin == pytest.approx(step_seconds(H100, 1, 1001, [(300, 100)], 0))
    assert [len(tokens) for tokens in output.sampled_token_ids] == [1, 0]
    record = gpu.records[-1]
    assert (record.decodes, record.decode_context_tokens, record.prefill_tokens) == (1, 1001, 300)
    assert record.measured == pytest.approx(record.predicted)


def test_time_scale_stretches_time(clock: Clock) -> None:
    slow = SimulatedGpu(H100, 10.0, TokenChooser(VOCABULARY, [30], [], []), clock, clock.sleep)
    begin = clock.now
    run(slow, scheduled({"a": 10}, [new("a", [1] * 10)]))
    assert clock.now - begin == pytest.approx(10 * step_seconds(H100, 0, 0, [(10, 0)], 1))


def test_chunks_of_a_prompt_give_no_token_before_its_end(gpu: SimulatedGpu) -> None:
    whole = answer(gpu, "a", list(range(20, 60)), 1)
    prompt = list(range(20, 60))
    assert run(gpu, scheduled({"b": 30}, [new("b", prompt)])).sampled_token_ids == [[]]
    assert run(gpu, scheduled({"b": 10}, cached={"b": (30, 0)})).sampled_token_ids == [whole]


def test_a_preempted_request_continues_as_if_nothing_had_happened(gpu: SimulatedGpu) -> None:
    prompt = [1, 2, 3]
    undisturbed = answer(gpu, "a", prompt, 6)
    tokens = run(gpu, scheduled({"b": 3}, [new("b", prompt)])).sampled_token_ids[0]
    tokens += run(gpu, scheduled({"b": 1}, cached={"b": (3, 1)})).sampled_token_ids[0]
    # Its KV cache was taken: prompt and outputs are computed again, in two chunks, before the next token.
    assert run(gpu, scheduled({"b": 2}, cached={"b": (0, 2)})).sampled_token_ids == [[]]
    tokens += run(gpu, scheduled({"b": 3}, cached={"b": (2, 2)})).sampled_token_ids[0]
    for count in range(3, 6):
        tokens += run(gpu, scheduled({"b": 1}, cached={"b": (2 + count, count)})).sampled_token_ids[0]
    assert tokens == undisturbed


def test_finished_and_aborted_requests_leave_nothing(gpu: SimulatedGpu) -> None:
    run(gpu, scheduled({"a": 3, "b": 2}, [new("a", [1, 2, 3]), new("b", [1, 2, 3])]))
    assert gpu.live_requests == 2
    run_finished(gpu, "a", "b")
    assert gpu.live_requests == 0


def test_steps_handed_over_early_run_one_after_the_other(gpu: SimulatedGpu, clock: Clock) -> None:
    """Asynchronous scheduling: the second step is begun before the first one's result is asked for."""
    begin = clock.now
    first_run = gpu.execute(scheduled({"a": 100}, [new("a", [1] * 100)]))
    first = gpu.sample(None)
    second_run = gpu.execute(scheduled({"a": 1}, cached={"a": (100, 1)}))
    second = gpu.sample(None)
    assert not any(future.done() for future in (first_run, first, second_run, second))
    first_seconds = step_seconds(H100, 0, 0, [(100, 0)], 1)
    assert len(first.result().sampled_token_ids[0]) == 1
    assert clock.now - begin == pytest.approx(first_seconds)
    assert len(second.result().sampled_token_ids[0]) == 1
    assert clock.now - begin == pytest.approx(first_seconds + step_seconds(H100, 1, 101))
    assert len(gpu.records) == 2


def bitmask(*allowed: int) -> Any:
    bits = np.zeros(128, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [([30], 30), ([30, QUOTE], QUOTE), ([30, QUOTE, EOS], EOS), ([BLANK, 30], 30), ([BLANK], BLANK), ([], 0)],
)
def test_grammars_are_kept_and_ended_as_soon_as_they_allow(
    gpu: SimulatedGpu, allowed: list[int], expected: int
) -> None:
    grammar = GrammarOutput(["b"], np.stack([bitmask(*allowed)]))
    step = scheduled({"a": 2, "b": 2}, [new("a", [1, 2]), new("b", [1, 2])])
    (free,), (constrained,) = run(gpu, step, grammar).sampled_token_ids
    assert constrained == expected
    assert free >= 20


def test_allowed_token_ids_are_kept(gpu: SimulatedGpu) -> None:
    assert set(answer(gpu, "a", [1, 2], 10, allowed_token_ids=[40, 41])) <= {40, 41}


def test_logprobs_have_the_layout_that_the_scheduler_slices(gpu: SimulatedGpu) -> None:
    step = scheduled({"a": 2, "b": 1}, [new("a", [1, 2], logprobs=3), new("b", [1, 2])])
    output = run(gpu, step)
    row = output.logprobs.slice_request(0, 1)
    assert row.logprob_token_ids.shape == (1, 4)
    assert row.logprob_token_ids[0, 0] == output.sampled_token_ids[0][0]
    assert len(set(row.logprob_token_ids[0])) == 4
    assert row.logprobs[0].tolist() == [0.0, -9999.0, -9999.0, -9999.0]
    assert row.sampled_token_ranks.tolist() == [1]


def test_prompt_logprobs_come_with_the_first_token(gpu: SimulatedGpu) -> None:
    prompt = [5, 6, 7, 8]
    assert run(gpu, scheduled({"a": 2}, [new("a", prompt, prompt_logprobs=0)])).prompt_logprobs_dict == {}
    told = run(gpu, scheduled({"a": 2}, cached={"a": (2, 0)})).prompt_logprobs_dict["a"]
    assert told.logprob_token_ids.tolist() == [[6], [7], [8]]
    assert told.logprobs.tolist() == [[0.0], [0.0], [0.0]]
    assert run(gpu, scheduled({"a": 1}, cached={"a": (4, 1)})).prompt_logprobs_dict == {}


def test_words_are_plain_and_endings_come_from_the_tokenizer() -> None:
    class Tokenizer:
        eos_token_id = 0
        all_special_ids = (0,)
        tokens = ("<eos>", "\u0120hello", "world", "\u0120", '"', "X9", "}")

        def __len__(self) -> int:
            return len(self.tokens)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [self.tokens[index] for index in ids]

        def decode(self, ids: list[int]) -> str:
            return self.tokens[ids[0]].replace("\u0120", " ")

    chooser = TokenChooser.for_tokenizer(Tokenizer(), 8)
    assert {chooser(bytes([n]), 0, None, None) for n in range(50)} == {1, 2}
    assert chooser(b"", 0, bitmask(0, 4, 6), None) == 0
    assert chooser(b"", 0, bitmask(3, 4, 6), None) == 4


def test_the_engine_arguments_of_a_profile() -> None:
    args = simulated_engine_args("h200-llama-3.1-8b", 2.0)
    assert args["additional_config"] == {"sluice_simulation": {"profile": "h200-llama-3.1-8b", "time_scale": 2.0}}
    assert args["hf_overrides"]["num_hidden_layers"] == 32
    with pytest.raises(ConfigError, match="cost profile `a100`"):
        simulated_engine_args("a100", 1.0)
