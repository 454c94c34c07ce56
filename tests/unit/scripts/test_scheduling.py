"""The scheduling benchmark: its loads, its bound, its figures, and that its arms do what they say."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from app.engine.step_cost import PROFILES
from app.engine.targets import Targets
from app.errors import ConfigError
from scripts.bench_scheduling import main
from scripts.scheduling.arms import ARMS, DEADLINE, FCFS, Setting, run_virtual
from scripts.scheduling.bound import Job, decode_work, goodput_bound, most_in_time, prefill_work
from scripts.scheduling.figures import Outcome, Pooled, Run
from scripts.scheduling.workload import MIXES, Offer, load_mix, open_offers, parse_mix, scaled, with_trace

H100 = PROFILES["h100-llama-3.1-8b"]
CHAT = {"rate": 5, "prompt_tokens": {"min": 10, "max": 20}, "output_tokens": {"min": 2, "max": 4}}


def test_loads_are_the_same_for_the_same_seed_whatever_the_other_classes_do() -> None:
    alone = open_offers(parse_mix({"chat": CHAT}, "mix"), 20, 1, 1000)
    beside = open_offers(parse_mix({"chat": CHAT, "more": CHAT}, "mix"), 20, 1, 1000)
    assert alone == [offer for offer in beside if offer.service_class == "chat"]
    assert alone != open_offers(parse_mix({"chat": CHAT}, "mix"), 20, 2, 1000)
    assert 50 < len(alone) < 150
    assert all(10 <= offer.prompt_tokens <= 20 and 2 <= offer.output_tokens <= 4 for offer in alone)
    assert all(before.at <= after.at < 20 for before, after in itertools.pairwise(alone))


def test_a_rate_can_be_scaled() -> None:
    mix = parse_mix({"chat": CHAT}, "mix")
    assert len(open_offers(scaled(mix, "chat", 50), 20, 1, 1000)) > 5 * len(open_offers(mix, 20, 1, 1000))


def test_a_trace_gives_arrivals_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},{100 + i},7\n" for i in range(100)))
    mix = with_trace(parse_mix({"chat": {**CHAT, "targets": {"ttft_ms": 100}}}, "mix"), "chat", path, 10.0)
    offers = open_offers(mix, 5, 0, 150)
    assert len(offers) in (49, 50, 51)
    assert all(offer.output_tokens == 7 and offer.prompt_tokens <= 150 for offer in offers)
    assert offers[0].targets == Targets(0.1, None, "chat")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"chat": {**CHAT, "concurrency": 3}}, "one of"),
        ({"chat": {"rate": 1}}, "prompt_tokens"),
        ({"chat": {**CHAT, "speed": 1}}, "speed"),
        ({"chat": {**CHAT, "prompt_tokens": {"min": 5, "max": 2}}}, "less than min"),
        ("chat", "mix"),
        ({}, "at least 1"),
    ],
)
def test_a_mix_that_is_none_is_refused_with_the_reason(document: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_mix(document, "mix")


def test_an_unknown_mix_and_a_broken_trace_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="neither a file nor one of mixed"):
        load_mix("none")
    path = tmp_path / "trace.csv"
    path.write_text("when,tokens\n1,2\n")
    with pytest.raises(SystemExit):
        main(["--trace", f"chat={path}"])
    assert "not a trace with the columns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "cpu", "--mix", "mixed"], "the engine holds 8192"),
        (["--profile", "none"], "neither a file nor one of"),
        (["--arms", "none"], "no arm none"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--seeds", "0"], "--seeds at least 1"),
        (["--mix", "batch", "--sweep"], "--sweep needs a mix whose first class has a rate"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "FCFS ..." not in errors


def test_all_named_mixes_are_mixes() -> None:
    for name in MIXES:
        assert load_mix(name)


def test_the_bound_counts_what_fits_and_parts_of_what_does_not() -> None:
    jobs = [Job(0.0, 1.0, 0.5), Job(0.0, 1.0, 0.5)]
    assert most_in_time(jobs) == 2
    assert most_in_time([*jobs, Job(0.0, 1.0, 0.6)]) == pytest.approx(2, abs=0.01)
    assert most_in_time([*jobs, Job(0.0, 1.3, 0.6)]) == pytest.approx(2.5, abs=0.01)
    # The short one goes in between, though it comes later.
    assert most_in_time([Job(0.0, 10.0, 9.0), Job(4.0, 4.5, 0.5)]) == 2
    assert most_in_time([]) == 0


def test_the_bound_is_what_is_offered_where_there_is_room_for_it() -> None:
    offers = [Offer(float(i), "chat", 500, 20, Targets(0.5, 0.05, "chat")) for i in range(10)]
    assert goodput_bound(H100, offers, 10.0) == pytest.approx(1.0)
    assert goodput_bound(H100, [Offer(0.0, "batch", 500, 20, None)], 10.0) == 0.0
    assert 0.010 < prefill_work(H100, offers[0]) < 0.012
    assert decode_work(H100, offers[0]) > 0


def test_no_arm_exceeds_the_bound_and_the_deadline_arm_serves_the_first_class_best() -> None:
    setting = Setting(H100, load_mix("mixed"), 8.0)
    runs = {name: Pooled([run_virtual(ARMS[name], setting, 3)]) for name in (FCFS, DEADLINE)}
    bound = goodput_bound(H100, open_offers(setting.mix, 8.0, 3, 100_000), 8.0)
    for pooled in runs.values():
        assert pooled.goodput() <= bound + 1e-6
    figures = {name: pooled.figures("interactive") for name, pooled in runs.items()}
    assert figures[DEADLINE]["attainment"] > figures[FCFS]["attainment"]
    assert figures[DEADLINE]["requests"] == figures[FCFS]["requests"]


def test_attainment_counts_all_that_was_offered_and_both_targets() -> None:
    def outcome(first: float | None, last: float | None) -> Outcome:
        return Outcome(Offer(1.0, "chat", 10, 11, Targets(0.5, 0.1, "chat")), first, last, 11)

    met, late, slow, lost = outcome(1.4, 2.4), outcome(1.6, 2.6), outcome(1.4, 3.0), outcome(None, None)
    assert [one.met for one in (met, late, slow, lost)] == [True, False, False, False]
    figures = Pooled([Run(2.0, [met, late, slow, lost])]).figures("chat")
    assert (figures["attainment"], figures["goodput"], figures["requests"]) == (0.25, 0.5, 3)
    assert figures["ttft_p50_ms"] == pytest.approx(400)
    assert math.isnan(Pooled([Run(2.0, [])]).figures("chat")["ttft_p50_ms"])
