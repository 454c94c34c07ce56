"""What is kept of prompts that are too long."""

from __future__ import annotations

import random
from typing import Any

import pytest

from app.routing.prompts import Way, shorten, shorten_ids, split

WORDS = (
    "river", "stone", "market", "window", "teacher", "garden", "winter", "engine", "paper", "silver", "cloud", "road",
    "music", "coffee", "letter",
)  # fmt: skip


def count(texts: list[str]) -> list[int]:
    """A token per word."""
    return [len(text.split()) for text in texts]


def document(seed: int, sentences: int, planted: str | None = None) -> str:
    """Paragraphs of nonsense, with a sentence somewhere in the middle half."""
    random_ = random.Random(seed)
    lines = [" ".join(random_.choices(WORDS, k=12)).capitalize() + "." for _ in range(sentences)]
    if planted is not None:
        lines.insert(random_.randint(sentences // 4, 3 * sentences // 4), planted)
    return "\n\n".join(" ".join(lines[begin : begin + 5]) for begin in range(0, len(lines), 5))


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], "temperature": 0}


@pytest.mark.parametrize("text", [document(0, 40), "a" * 5000, "", "one\n\n\n  two\n", "x. " * 999, document(1, 3)])
def test_passages_are_the_text(text: str) -> None:
    assert "".join(split(text)) == text
    assert all(0 < len(piece) <= 1000 for piece in split(text))


@pytest.mark.parametrize("way", ["truncate", "retrieve"])
class TestWhatIsKept:
    """Whichever way it is chosen."""

    def test_it_fits_and_is_in_order_and_gaps_are_marked(self, way: Way) -> None:
        text = document(3, 200)
        short = shorten("completions", {"prompt": text}, 400, way, count)
        assert short is not None
        assert short.before == count([text])[0]
        assert sum(count([short.body["prompt"]])) <= short.after <= 400
        assert "tokens left out" in short.body["prompt"]
        sentences = [one for one in short.body["prompt"].split("\n") if one and "left out" not in one]
        positions = [text.index(sentence[:40]) for sentence in sentences]
        assert positions == sorted(positions)

    def test_instructions_and_the_latest_turns_stay(self, way: Way) -> None:
        body = chat(
            ("system", "Answer in verse."),
            ("user", document(4, 300)),
            ("assistant", "What about it?"),
            ("user", "Where is the window?"),
        )
        short = shorten("chat", body, 500, way, count)
        assert short is not None
        first, _, third, last = [message["content"] for message in short.body["messages"]]
        assert (first, third, last) == ("Answer in verse.", "What about it?", "Where is the window?")
        assert short.body["temperature"] == 0
        assert "left out" not in body["messages"][1]["content"]

    def test_what_must_stay_may_be_too_much(self, way: Way) -> None:
        assert shorten("chat", chat(("system", document(5, 100)), ("user", "Hm?")), 300, way, count) is None

    def test_text_parts_are_shortened_and_others_left(self, way: Way) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:x"}}
        content = [{"type": "text", "text": document(6, 200)}, image, {"type": "text", "text": "What is it?"}]
        short = shorten("chat", {"messages": [{"role": "user", "content": content}]}, 300, way, count)
        assert short is not None
        parts = short.body["messages"][0]["content"]
        assert parts[1:] == content[1:]
        assert "left out" in parts[0]["text"]


def test_truncation_keeps_both_ends() -> None:
    text = document(7, 200)
    short = shorten("completions", {"prompt": text}, 400, "truncate", count)
    assert short is not None
    assert short.body["prompt"].startswith(text[:300])
    assert short.body["prompt"].endswith(text[-300:])
    assert short.body["prompt"].count("left out") == 1


@pytest.mark.parametrize("seed", range(20))
def test_retrieval_finds_what_is_asked_for(seed: int) -> None:
    fact = f"The access code of laboratory {seed} is violet-{seed * 37}."
    body = chat(("user", document(seed, 300, fact)), ("user", f"Which access code does laboratory {seed} have?"))
    short = shorten("chat", body, count([document(seed, 300)])[0] // 8, "retrieve", count)
    assert short is not None
    assert fact in short.body["messages"][0]["content"]


def test_token_ids_are_cut_in_the_middle() -> None:
    assert shorten_ids(range(10), 5) == [0, 1, 7, 8, 9]
    assert shorten_ids([1, 2], 5) == [1, 2]
