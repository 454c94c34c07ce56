"""The middle of plain answers, written without vLLM's response objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.deltas import DeltaTap, DeltaTemplate, is_plain, template_of

CHAT = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    '"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
COMPLETION = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"Hi",'
    '"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)


class TestTemplate:
    """From a chunk of vLLM's to any other."""

    @pytest.mark.parametrize(("route", "event"), [("chat", CHAT), ("completions", COMPLETION)])
    def test_it_writes_the_chunk_that_it_came_from(self, route: Any, event: str) -> None:
        template = template_of(route, event)
        assert template is not None
        assert template.event("Hi") == event.encode()

    @given(text=st.text(st.characters(exclude_categories=["Cs"])))
    def test_any_text_comes_back(self, text: str) -> None:
        template = template_of("chat", CHAT)
        assert template is not None
        chunk = json.loads(template.event(text).removeprefix(b"data: "))
        assert chunk["choices"][0]["delta"]["content"] == text
        assert b"\n" not in template.event(text)[:-2]

    @pytest.mark.parametrize(
        "event",
        [
            "data: [DONE]\n\n",
            'data: {"error":{"message":"m"}}\n\n',
            CHAT.replace('"finish_reason":null', '"finish_reason":"stop"'),
            CHAT.replace('{"content":"Hi"}', '{"role":"assistant"}'),
            CHAT.replace('{"content":"Hi"}', '{"tool_calls":[]}'),
            CHAT.replace('"content":"Hi"', '"content":null'),
            CHAT.replace('"m"', '"\\"content\\":\\"Hi\\""').replace('"content":"Hi"', '"content":"Hi","content":"Hi"'),
            'data: {"choices":[]}\n\n',
            "data: not json\n\n",
            ": a comment\n\n",
        ],
    )
    def test_other_events_give_none(self, event: str) -> None:
        assert template_of("chat", event) is None


@pytest.mark.parametrize(
    ("route", "extra", "expected"),
    [
        ("chat", {}, True),
        ("completions", {}, True),
        ("chat", {"stream_options": {"include_usage": True}}, True),
        ("chat", {"n": 2}, False),
        ("chat", {"logprobs": True}, False),
        ("completions", {"logprobs": 0}, False),
        ("chat", {"tools": [{}]}, False),
        ("chat", {"echo": True}, False),
        ("completions", {"echo": True}, False),
        ("chat", {"return_token_ids": True}, False),
        ("chat", {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, False),
    ],
)
def test_plain_answers_tell_nothing_per_token_but_text(route: Any, extra: dict[str, Any], expected: bool) -> None:
    assert is_plain(route, {"model": "m", **extra}) is expected


class Collector:
    """vLLM's RequestOutputCollector, as far as it is relied on."""

    def __init__(self) -> None:
        self.output: Any = None
        self.ready = asyncio.Event()

    def put(self, output: Any) -> None:
        if self.output is None or isinstance(output, Exception):
            self.output = output
            self.ready.set()
        else:
            self.output.outputs[0].text += output.outputs[0].text
            self.output.outputs[0].token_ids += output.outputs[0].token_ids
            self.output.finished |= output.finished

    def get_nowait(self) -> Any:
        output, self.output = self.output, None
        self.ready.clear()
        return output


def output(text: str, *token_ids: int, finished: bool = False) -> Any:
    return SimpleNamespace(finished=finished, outputs=[SimpleNamespace(text=text, token_ids=list(token_ids))])


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.paused = False
        self.event = asyncio.Event()

    async def resumed(self) -> None:
        await self.event.wait()

    def add(self, text: str, write: Callable[[str], bytes]) -> None:
        self.texts.append(text)


TEMPLATE = DeltaTemplate(b"<", b">")


class TestTake:
    """Asked for by the reader."""

    async def test_texts_come_merged_until_the_end_which_stays_for_vllm_with_all_tokens(self) -> None:
        collector = Collector()
        tap = DeltaTap(collector)
        collector.put(output("a", 1))
        assert await tap.take() == "a"
        collector.put(output("b", 2))
        collector.put(output("c", 3))
        assert await tap.take() == "bc"
        end = output("d", 4, finished=True)
        collector.put(end)
        assert await tap.take() is None
        assert collector.output is end
        assert end.outputs[0].token_ids == [1, 2, 3, 4]
        assert end.outputs[0].text == "d"

    async def test_a_failure_stays_for_vllm(self) -> None:
        collector = Collector()
        tap = DeltaTap(collector)
        failure = ValueError("engine")
        collector.put(failure)
        assert await tap.take() is None
        assert collector.output is failure


class TestPour:
    """Given to a sink as the engine gives it."""

    async def test_each_output_reaches_the_sink_at_once(self) -> None:
        collector, sink = Collector(), Sink()
        collector.put(output("a", 1))
        task = asyncio.ensure_future(DeltaTap(collector).pour(sink, TEMPLATE))
        await asyncio.sleep(0)
        assert sink.texts == ["a"]
        collector.put(output("b", 2))
        # No task ran between.
        assert sink.texts == ["a", "b"]
        end = output("c", 3, finished=True)
        collector.put(end)
        await task
        assert sink.texts == ["a", "b"]
        assert collector.output is end
        assert end.outputs[0].token_ids == [1, 2, 3]
        assert "put" not in vars(collector)

    async def test_text_that_is_held_back_by_the_detokeniser_is_no_event(self) -> None:
        collector, sink = Collector(), Sink()
        task = asyncio.ensure_future(DeltaTap(collector).pour(sink, TEMPLATE))
        await asyncio.sleep(0)
        collector.put(output("", 1))
        collector.put(output("", 2, finished=True))
        await task
        assert sink.texts == []
        assert collector.output.outputs[0].token_ids == [1, 2]

    async def test_while_the_sink_is_paused_outputs_accumulate_and_none_is_lost(self) -> None:
        collector, sink = Collector(), Sink()
        task = asyncio.ensure_future(DeltaTap(collector).pour(sink, TEMPLATE))
        await asyncio.sleep(0)
        sink.paused = True
        collector.put(output("a", 1))
        collector.put(output("b", 2))
        for _ in range(3):
            await asyncio.sleep(0)
        assert sink.texts == []
        assert collector.output.outputs[0].text == "ab"
        sink.paused = False
        sink.event.set()
        for _ in range(3):
            await asyncio.sleep(0)
        assert sink.texts == ["ab"]
        collector.put(output("c", 3))
        assert sink.texts == ["ab", "c"]
        collector.put(output("", 4, finished=True))
        await task
        assert collector.output.outputs[0].token_ids == [1, 2, 3, 4]

    async def test_leaving_it_gives_the_collector_back(self) -> None:
        collector, sink = Collector(), Sink()
        task = asyncio.ensure_future(DeltaTap(collector).pour(sink, TEMPLATE))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        collector.put(output("a", 1))
        assert sink.texts == []
        assert collector.output is not None
