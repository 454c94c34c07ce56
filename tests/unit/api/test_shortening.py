"""Prompts that are too long for their class, by what its `long_prompts` says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.api.shortening import Shortener, check_length
from app.config import SluiceConfig
from app.errors import InvalidRequest, Saturated
from app.types import Rendered
from tests.support.fakes import FakeRenderer
from tests.support.fleet import fleet_config

LONG = " ".join(f"Fact number {number} is about colour {number % 7}.\n\n" for number in range(400))
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": LONG}, {"role": "user", "content": "What about fact number 217?"}]
}


def config(mode: str, most: int | None = 600) -> SluiceConfig:
    return fleet_config(
        classes__interactive__long_prompts={"mode": mode}, classes__interactive__limits={"max_prompt_tokens": most}
    )


class Model:
    """Says how long what it was asked was."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def complete(self, config: SluiceConfig, text: str, max_tokens: int) -> str:
        self.asked.append(text)
        return "all about colours"


@pytest.mark.parametrize("mode", ["truncate", "retrieve", "summarize"])
async def test_a_long_prompt_becomes_one_that_fits_and_it_is_told(mode: str) -> None:
    body, note = await Shortener(FakeRenderer(), Model().complete).fit(config(mode), "interactive", "chat", BODY)
    assert note is not None
    assert note.before > 2000
    total = sum(len(message["content"].split()) for message in body["messages"])
    assert total <= note.after <= 600
    assert str(note) == f"prompt={mode}:{note.before}->{note.after}"
    assert body["messages"][1] == BODY["messages"][1]
    assert ("Fact number 217 " in body["messages"][0]["content"]) == (mode == "retrieve")


@pytest.mark.parametrize("mode", ["truncate", "retrieve", "summarize", "reject"])
async def test_a_short_one_is_left_alone(mode: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    assert await Shortener(FakeRenderer(), Model().complete).fit(config(mode), "interactive", "chat", body) == (
        body,
        None,
    )


async def test_where_long_ones_are_rejected_the_counts_are_told() -> None:
    body, note = await Shortener(FakeRenderer(), Model().complete).fit(config("reject"), "interactive", "chat", BODY)
    assert (body, note) == (BODY, None)
    with pytest.raises(InvalidRequest, match=r"2500 tokens; at most 600") as caught:
        check_length(config("reject"), "interactive", Rendered("m", False, None, 2500, 2500, None, 1, {}))
    assert caught.value.details == {"prompt_tokens": 2500, "max_prompt_tokens": 600}


async def test_without_a_limit_of_its_own_a_class_has_its_pools_context_less_the_answer() -> None:
    shortener = Shortener(FakeRenderer(), Model().complete)
    assert shortener.limit(config("truncate", None), "interactive", {}) == 8192 - 512
    assert shortener.limit(config("truncate", None), "interactive", {"max_tokens": 92}) == 8100


async def test_summaries_are_made_once() -> None:
    model = Model()
    shortener = Shortener(FakeRenderer(), model.complete)
    for _ in range(2):
        await shortener.fit(config("summarize"), "interactive", "chat", BODY)
    assert len(model.asked) == len(set(model.asked)) > 0


async def test_summaries_that_are_too_long_together_are_summarised_again() -> None:
    asked: list[tuple[int, int]] = []

    async def complete(config: SluiceConfig, text: str, max_tokens: int) -> str:
        words = text.split("\n\n", 1)[1].split()
        asked.append((len(words), max_tokens))
        return " ".join(words[:max_tokens])

    messages = [{"role": "user", "content": LONG * 20}, BODY["messages"][1]]
    body, note = await Shortener(FakeRenderer(), complete).fit(
        config("summarize"), "interactive", "chat", {"messages": messages}
    )
    assert note is not None
    assert note.before > 40_000
    assert note.after <= 600
    assert len(body["messages"][0]["content"].split()) > 100
    # 1,500 tokens at a time, and no piece to less than an eighth of its length at once.
    assert all(size <= 1500 and most >= size // 8 for size, most in asked)
    assert len(asked) > 40_000 / 1500 + 3


async def test_a_summary_that_fails_fails_the_request_and_asks_for_few_others() -> None:
    asked: list[str] = []

    async def complete(config: SluiceConfig, text: str, max_tokens: int) -> str:
        asked.append(text)
        await asyncio.sleep(0)
        raise Saturated("No room.", retry_after=1.0)

    with pytest.raises(Saturated):
        await Shortener(FakeRenderer(), complete).fit(
            config("summarize"), "interactive", "chat", {"messages": [{"role": "user", "content": LONG * 20}]}
        )
    # Of 38, those on their way, and what took their places before the first failure was seen.
    assert len(asked) <= 16


async def test_a_model_whose_summaries_are_no_shorter_is_a_mistake() -> None:
    async def complete(config: SluiceConfig, text: str, max_tokens: int) -> str:
        return text

    with pytest.raises(InvalidRequest, match="too little room"):
        await Shortener(FakeRenderer(), complete).fit(config("summarize"), "interactive", "chat", BODY)


@pytest.mark.parametrize("mode", ["truncate", "retrieve", "summarize"])
async def test_instructions_that_do_not_fit_are_a_mistake(mode: str) -> None:
    body = {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "Hm?"}]}
    with pytest.raises(InvalidRequest, match="must be kept"):
        await Shortener(FakeRenderer(), Model().complete).fit(config(mode), "interactive", "chat", body)


async def test_token_ids_lose_their_middle() -> None:
    shortener = Shortener(FakeRenderer(), Model().complete)
    body, note = await shortener.fit(config("retrieve"), "interactive", "completions", {"prompt": list(range(1000))})
    assert body["prompt"] == [*range(300), *range(700, 1000)]
    assert str(note) == "prompt=truncate:1000->600"
