"""Writes the middle of a streamed answer without building and serialising a response object per token.

vLLM's OpenAI layer writes the first chunks of a stream, its last ones and every error. Between them, the chunks of a
plain text answer differ in nothing but the text, so they are written here, from vLLM's own first chunk as a template.
The layer is asked for nothing meanwhile; the output that ends the answer is handed back to it with the token ids that
it has not seen, so that its counts are right.

Relies on vLLM's RequestOutputCollector: `put`, which the engine calls with a RequestOutput (`outputs[0].text`,
`.token_ids`, `finished`) or an exception, `get_nowait`, `get`, `output` and `ready`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

# What json.dumps(text, ensure_ascii=False) calls in the end, ten times faster.
from json.encoder import encode_basestring
from typing import Any, Protocol

from app.types import JsonObject, Route

_DATA = "data: "


@dataclass(frozen=True, slots=True)
class DeltaTemplate:
    """A chunk of a stream as server-sent event, cut open where its text is."""

    before: bytes
    after: bytes

    def event(self, text: str) -> bytes:
        """The event that carries `text`, as vLLM would write it."""
        return self.before + encode_basestring(text).encode() + self.after


class DeltaSink(Protocol):
    """Takes what an answer gains, without waiting."""

    @property
    def paused(self) -> bool:
        """Whether it wants nothing for now."""

    async def resumed(self) -> None:
        """Wait until it wants more."""

    def add(self, text: str, write: Callable[[str], bytes]) -> None:
        """More text of the answer; `write` makes an event of any amount of it."""


def is_plain(route: Route, body: JsonObject) -> bool:
    """Whether all of a stream's middle chunks differ in their text only: one answer, and nothing told per token."""
    options = body.get("stream_options") or {}
    return (
        (body.get("n") or 1) == 1
        and not body.get("echo")
        and not options.get("continuous_usage_stats")
        and not body.get("return_token_ids")
        and (body.get("logprobs") is None or body["logprobs"] is False)
        and not (route == "chat" and (body.get("tools") or body.get("functions")))
    )


def template_of(route: Route, event: str) -> DeltaTemplate | None:
    """The template that a stream's first chunk with text gives; None where it is not an ordinary one."""
    if not event.startswith(_DATA):
        return None
    try:
        choices = json.loads(event.removeprefix(_DATA)).get("choices", [])
        if len(choices) != 1 or choices[0].get("finish_reason") is not None:
            return None
        name = "content" if route == "chat" else "text"
        text = choices[0]["delta"]["content"] if route == "chat" else choices[0]["text"]
    except (ValueError, KeyError, AttributeError):
        return None
    if not isinstance(text, str):
        return None
    before, mark, after = event.partition(f'"{name}":{json.dumps(text, ensure_ascii=False)}')
    if not mark or f'"{name}":' in after or f'"{name}":' in before:
        return None
    return DeltaTemplate(f'{before}"{name}":'.encode(), after.encode())


class DeltaTap:
    """Takes an answer's outputs from its collector, up to the one that ends it, which it leaves there for vLLM."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector
        self._skipped: list[int] = []

    async def take(self) -> str | None:
        """The text that accumulated since it was asked for last; None when the answer has ended or failed."""
        collector = self._collector
        while collector.output is None:
            await collector.ready.wait()
        if not self._may_take(collector.output):
            self._hand_back(collector.output)
            return None
        return self._take(collector.get_nowait())

    async def pour(self, sink: DeltaSink, template: DeltaTemplate) -> None:
        """Give each output's text to a sink at the moment the engine's output is processed, until the answer ends.

        No task runs for it. While the sink is paused, outputs accumulate in the collector, merged.
        """
        collector = self._collector
        put = collector.put

        def poured_put(output: Any) -> None:
            if collector.output is None and self._may_take(output) and not sink.paused:
                self._feed(sink, template, output)
            else:
                put(output)

        collector.put = poured_put
        try:
            while True:
                while collector.output is None:
                    await collector.ready.wait()
                if not self._may_take(collector.output):
                    break
                if sink.paused:
                    await sink.resumed()
                    continue
                self._feed(sink, template, collector.get_nowait())
        finally:
            del collector.put
        self._hand_back(collector.output)

    @staticmethod
    def _may_take(output: Any) -> bool:
        return not isinstance(output, Exception) and not output.finished

    def _feed(self, sink: DeltaSink, template: DeltaTemplate, output: Any) -> None:
        text = self._take(output)
        if text:
            sink.add(text, template.event)

    def _take(self, output: Any) -> str:
        completion = output.outputs[0]
        self._skipped.extend(completion.token_ids)
        text: str = completion.text
        return text

    def _hand_back(self, output: Any) -> None:
        if not isinstance(output, Exception) and output.outputs:
            completion = output.outputs[0]
            completion.token_ids = [*self._skipped, *completion.token_ids]
            self._skipped = []
