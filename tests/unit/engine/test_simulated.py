"""The simulated GPU driven step by step, on a clock in the test's hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput

from app.engine.simulated import SimulatedExecutor, SimulatedGpu, TokenChooser, simulated_engine_args
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
    return SimulatedGpu(H100, 1.0, chooser(), clock, clock.sleep)


def chooser(words: Sequence[int] = range(20, VOCABULARY)) -> TokenChooser:
    return TokenChooser(VOCABULARY, words, eos=EOS, closers=[QUOTE], blanks=[BLANK])


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
    assert len(gpu.records) == 2


@pytest.mark.parametrize(("late", "made_up_for"), [(0.0002, 0.0002), (0.05, 0.001)])
def test_the_engines_time_counts_and_a_late_timer_does_not(clock: Clock, late: float, made_up_for: float) -> None:
    def oversleep(seconds: float) -> None:
        clock.now += seconds + late

    gpu = SimulatedGpu(H100, 1.0, chooser(), clock, oversleep)
    begin = clock.now
    run(gpu, scheduled({"a": 10}, [new("a", [1] * 10)]))
    for outputs in range(1, 5):
        clock.now += 0.001
        run(gpu, scheduled({"a": 1}, cached={"a": (9 + outputs, outputs)}))
    steps = step_seconds(H100, 0, 0, [(10, 0)], 1) + sum(step_seconds(H100, 1, 10 + outputs) for outputs in range(1, 5))
    assert clock.now - begin == pytest.approx(steps + 4 * (0.001 + late - made_up_for) + late)
    assert [record.idle for record in gpu.records][1:] == pytest.approx([0.001 + late - made_up_for] * 4)


def test_time_scale_stretches_time(clock: Clock) -> None:
    slow = SimulatedGpu(H100, 10.0, chooser(), clock, clock.sleep)
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


def test_a_token_that_the_scheduler_dropped_is_given_again(gpu: SimulatedGpu) -> None:
    """Asynchronous scheduling drops what was on its way when the prefix cache is reset under running requests."""
    first, second = answer(gpu, "a", [1, 2, 3], 2)
    assert run(gpu, scheduled({"b": 3}, [new("b", [1, 2, 3])])).sampled_token_ids == [[first]]
    assert run(gpu, scheduled({"b": 1}, cached={"b": (3, 1)})).sampled_token_ids == [[second]]
    assert run(gpu, scheduled({"b": 4}, cached={"b": (0, 1)})).sampled_token_ids == [[second]]


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


def test_where_a_grammar_does_not_hold_yet_the_answer_goes_on(gpu: SimulatedGpu) -> None:
    """While a model reasons, its grammar's row allows everything, the end of sequence too."""
    grammar = GrammarOutput(["a"], np.full((1, 4), -1, dtype=np.int32))
    ((token,),) = run(gpu, scheduled({"a": 2}, [new("a", [1, 2])]), grammar).sampled_token_ids
    assert [token] == answer(gpu, "b", [1, 2], 1)


def test_allowed_token_ids_are_kept(gpu: SimulatedGpu) -> None:
    assert set(answer(gpu, "a", [1, 2], 20, allowed_token_ids=[40, 41])) == {40, 41}
    assert set(answer(gpu, "b", [1, 2], 20, allowed_token_ids=[40, EOS])) == {40}
    assert set(answer(gpu, "c", [1, 2], 2, allowed_token_ids=[EOS])) == {EOS}


def test_a_grammar_and_allowed_token_ids_hold_together(gpu: SimulatedGpu) -> None:
    grammar = GrammarOutput(["a"], np.stack([bitmask(EOS, 30, 31)]))
    step = scheduled({"a": 2}, [new("a", [1, 2], allowed_token_ids=[31, 32])])
    assert run(gpu, step, grammar).sampled_token_ids == [[31]]


def test_nothing_stops_an_answer_before_min_tokens(clock: Clock) -> None:
    gpu = SimulatedGpu(H100, 1.0, chooser(words=[30, 31]), clock, clock.sleep)
    tokens = answer(gpu, "a", [1, 2], 40, min_tokens=20, max_tokens=40, stop_token_ids=[30])
    assert set(tokens[:20]) == {31}
    assert 30 in tokens[20:]


@pytest.mark.parametrize(("allowed", "expected"), [([EOS, 30], 30), ([EOS], EOS)])
def test_a_grammar_ends_before_min_tokens_only_where_it_must(
    gpu: SimulatedGpu, allowed: list[int], expected: int
) -> None:
    request = new("a", [1, 2], min_tokens=2, stop_token_ids=[EOS])
    grammar = GrammarOutput(["a"], np.stack([bitmask(*allowed)]))
    assert run(gpu, scheduled({"a": 2}, [request]), grammar).sampled_token_ids == [[expected]]


def test_logprobs_have_the_layout_that_the_scheduler_slices(gpu: SimulatedGpu) -> None:
    step = scheduled({"a": 2, "b": 1}, [new("a", [1, 2], logprobs=3), new("b", [1, 2])])
    output = run(gpu, step)
    row = output.logprobs.slice_request(0, 1)
    ids = row.logprob_token_ids[0].tolist()
    # The sampled token, then the three most likely ones, of which it is the first.
    assert ids[:2] == output.sampled_token_ids[0] * 2
    assert len(set(ids[1:])) == 3
    assert row.logprobs.tolist() == [[0.0, 0.0, -9999.0, -9999.0]]
    assert row.sampled_token_ranks.tolist() == [1]


def test_logprobs_have_a_row_for_requests_without_a_token_too(gpu: SimulatedGpu) -> None:
    step = scheduled({"a": 1, "b": 2}, [new("a", [1, 2]), new("b", [3, 4], logprobs=0)])
    output = run(gpu, step)
    assert output.sampled_token_ids[0] == []
    assert output.logprobs.slice_request(1, 1).logprob_token_ids.tolist() == [output.sampled_token_ids[1]]


def test_logprobs_of_the_whole_vocabulary(gpu: SimulatedGpu) -> None:
    output = run(gpu, scheduled({"a": 3}, [new("a", [1, 2, 3], logprobs=-1, prompt_logprobs=-1)]))
    (row,) = output.logprobs.logprob_token_ids.tolist()
    assert row[0] == output.sampled_token_ids[0][0]
    assert sorted(row[1:]) == list(range(VOCABULARY))
    assert output.prompt_logprobs_dict["a"].logprobs.shape == (2, VOCABULARY + 1)


def test_logprobs_of_named_tokens(gpu: SimulatedGpu) -> None:
    fresh = [
        new("a", [1], logprob_token_ids=[7, 40], allowed_token_ids=[40]),
        new("b", [1], logprobs=3, allowed_token_ids=[40]),
    ]
    logprobs = run(gpu, scheduled({"a": 1, "b": 1}, fresh)).logprobs
    assert logprobs.logprob_token_ids[0, :3].tolist() == [40, 7, 40]
    assert logprobs.logprobs[0, :3].tolist() == [0.0, -9999.0, 0.0]
    assert logprobs.logprobs[1].tolist() == [0.0, 0.0, -9999.0, -9999.0]


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

    choose = TokenChooser.for_tokenizer(Tokenizer(), 8)
    assert {choose(bytes([n]), 0) for n in range(50)} == {1, 2}
    assert choose(b"", 0, bitmask(0, 4, 6)) == 0
    assert choose(b"", 0, bitmask(3, 4, 6)) == 4


def test_the_engine_arguments_of_a_profile() -> None:
    args = simulated_engine_args("h200-llama-3.1-8b", 2.0)
    assert args["additional_config"] == {
        "sluice_simulation": {"profile": "h200-llama-3.1-8b", "time_scale": 2.0},
        "sluice_scheduler": {"patience_ms": 10_000.0, "min_residence_ms": 2000.0},
    }
    assert args["hf_overrides"]["num_hidden_layers"] == 32
    own = H100.model_copy(update={"bandwidth": 1e12})
    assert simulated_engine_args(own, 1.0)["additional_config"]["sluice_simulation"]["profile"]["bandwidth"] == 1e12
    with pytest.raises(ConfigError, match="cost profile `a100`"):
        simulated_engine_args("a100", 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"profil": "h100-llama-3.1-8b"}, "additional_config.sluice_simulation: profil: unknown key"),
        ({"time_scale": 0}, "additional_config.sluice_simulation: time_scale: .*greater than 0"),
        ({"time_scale": float("nan")}, "additional_config.sluice_simulation: time_scale: .*finite"),
        ({"profile": "a100"}, "cost profile `a100` is neither"),
        ({"profile": {"layers": 1}}, "additional_config.sluice_simulation.profile: .*this key is missing"),
        ([], "additional_config.sluice_simulation: Input should be a valid dictionary"),
    ],
)
def test_wrong_settings_are_refused_at_start(settings: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulatedExecutor(MagicMock(additional_config={"sluice_simulation": settings}))
