"""Shortens prompts that are too long for their class, as its `long_prompts` says."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

from app.config import SluiceConfig
from app.errors import InvalidRequest
from app.routing.classify import longest_context
from app.routing.prompts import MESSAGE_TOKENS, shorten, shorten_ids, texts_of, with_summaries
from app.types import JsonObject, Rendered, Route

if TYPE_CHECKING:
    from app.api.generation import RendererPort

# The template's own text, tools, and what tokens of pieces differ from those of the whole.
_MARGIN_TOKENS = 64
_MARGIN_SHARE = 0.02
_MOST_SUMMARIES = 512
# Of one prompt, so that it does not take the place of all others of the class.
_SUMMARIES_AT_ONCE = 8
_SUMMARIZE = "Summarize the following text. Keep names, numbers and facts. Write nothing but the summary."

Mode = Literal["truncate", "retrieve", "summarize"]
# Asks a model for an answer of at most so many tokens.
Complete = Callable[[SluiceConfig, str, int], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Note:
    """What was done to a prompt: how, and its tokens before and after."""

    mode: Mode
    before: int
    after: int

    def __str__(self) -> str:
        return f"prompt={self.mode}:{self.before}->{self.after}"


class Shortener:
    """Shortens prompts. `complete` is used for summaries."""

    def __init__(self, renderer: RendererPort, complete: Complete) -> None:
        self._renderer = renderer
        self._complete = complete
        self._summaries: OrderedDict[bytes, str] = OrderedDict()

    def limit(self, config: SluiceConfig, service_class: str, body: JsonObject) -> int:
        """How many prompt tokens a request of the class may have."""
        entry = config.classes[service_class]
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        cap = entry.effective_dials.max_output_tokens
        room = asked if isinstance(asked, int) and asked > 0 else entry.long_prompts.output_room
        longest = longest_context(config, service_class) - (room if cap is None else min(room, cap))
        most = entry.limits.max_prompt_tokens
        return max(1, longest if most is None else min(longest, most))

    async def fit(
        self, config: SluiceConfig, service_class: str, route: Route, body: JsonObject, limit: int | None = None
    ) -> tuple[JsonObject, Note | None]:
        """The request as it is, or shorter.

        `limit`: tokens of the prompt, in place of the class's own; then a class that rejects long ones retrieves.

        Raises:
            InvalidRequest: what must be kept is too long.
        """
        mode = config.classes[service_class].long_prompts.mode
        if mode == "reject":
            if limit is None:
                return body, None
            mode = "retrieve"
        limit = self.limit(config, service_class, body) if limit is None else limit
        prompt = body.get("prompt")
        if route == "completions" and isinstance(prompt, list):
            return _fit_ids(body, prompt, limit)
        texts = texts_of(route, body)
        # A token has at least one byte.
        if sum(len(text.encode()) for text in texts) <= limit:
            return body, None
        budget = int(limit * (1 - _MARGIN_SHARE)) - _MARGIN_TOKENS - MESSAGE_TOKENS * len(texts)
        if body.get("tools"):
            budget -= sum(await asyncio.to_thread(self._renderer.count, [str(body["tools"])]))
        before = sum(await asyncio.to_thread(self._renderer.count, texts))
        if before <= budget:
            return body, None
        if mode == "summarize":
            body, after = await self._summarize(config, route, body, budget)
        else:
            short = await asyncio.to_thread(shorten, route, body, budget, mode, self._renderer.count)
            if short is None:
                raise _too_long(before, limit, "What must be kept, instructions and the latest turn, is too long.")
            body, after = short.body, short.after
        return body, Note(mode, before, after)

    async def _summarize(
        self, config: SluiceConfig, route: Route, body: JsonObject, budget: int
    ) -> tuple[JsonObject, int]:
        """Summaries in place of the long parts; those that were made before are not made again."""

        async def one(text: str, tokens: int, slots: asyncio.Semaphore) -> str:
            key = blake2b(f"{tokens}:{text}".encode()).digest()
            if key in self._summaries:
                self._summaries.move_to_end(key)
                return self._summaries[key]
            async with slots:
                made = await self._complete(config, f"{_SUMMARIZE}\n\n{text}", tokens)
            self._summaries[key] = made
            while len(self._summaries) > _MOST_SUMMARIES:
                self._summaries.popitem(last=False)
            return made

        async def all_of(wanted: list[tuple[str, int]]) -> list[str]:
            slots = asyncio.Semaphore(_SUMMARIES_AT_ONCE)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(text, tokens, slots)) for text, tokens in wanted]
            except ExceptionGroup as failed:
                # The others are cancelled; the first says why.
                raise failed.exceptions[0] from None
            return [task.result() for task in tasks]

        return await with_summaries(route, body, budget, self._renderer.count, all_of)


def check_length(config: SluiceConfig, service_class: str, rendered: Rendered) -> None:
    """Raises InvalidRequest, with the counts, for a prompt that is longer than its class allows."""
    most = config.classes[service_class].limits.max_prompt_tokens
    if most is not None and rendered.longest_prompt > most:
        raise _too_long(rendered.longest_prompt, most, f"Class `{service_class}` allows no longer ones.")


def _fit_ids(body: JsonObject, prompt: list[object], limit: int) -> tuple[JsonObject, Note | None]:
    """Token ids have no sentences; only their middle can be left out."""
    if prompt and all(isinstance(token, int) for token in prompt):
        ids: list[int] = prompt  # type: ignore[assignment]
        if len(ids) > limit:
            short = shorten_ids(ids, limit)
            return {**body, "prompt": short}, Note("truncate", len(ids), len(short))
    return body, None


def _too_long(tokens: int, limit: int, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The prompt has {tokens} tokens; at most {limit} are allowed. {why}",
        param="messages",
        details={"prompt_tokens": tokens, "max_prompt_tokens": limit},
    )
