"""Making prompts shorter than they came: what is kept of a text that is too long. Pure.

A prompt is cut into passages (paragraphs, long ones at sentences). Instructions, the latest turns and the question are
kept; of the rest, what fits: nearest to the beginning and the end (`truncate`), or most relevant to the question by
BM25 (`retrieve`; Robertson, Zaragoza 2009, as bm25s has it), in the original order either way. Every gap is marked.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.errors import InvalidRequest
from app.types import JsonObject, Route

# Tokens of each of some texts.
Count = Callable[[list[str]], list[int]]
# Summaries of some texts, each of at most so many tokens.
Summaries = Callable[[list[tuple[str, int]]], Awaitable[list[str]]]
Way = Literal["truncate", "retrieve"]

_PASSAGE_CHARS = 480
_PARAGRAPH = re.compile(r".*?(?:\n[ \t]*\n\s*|\Z)", re.DOTALL)
_SENTENCE = re.compile(r".*?(?:[.!?][\"')\]]*\s+|\n|\Z)", re.DOTALL)
_INSTRUCTIONS = ("system", "developer")
# Of the budget, what a latest turn may take to be kept whole.
_TURN_SHARE = 0.25
_MARKER_TOKENS = 12
# Of what is summarised at once; what a summary's frame takes; the least that says anything.
_PIECE_TOKENS = 1500
_SUMMARY_TOKENS = 12
_LEAST_SUMMARY_TOKENS = 24
# Parts of its length to which a piece is summarised. Few, so that a text that has grown a little gives the same pieces
# the same summaries; and none smaller, for what is left of a piece then says nothing.
_SUMMARY_SHARES = (1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8)
# What a chat template adds to a message.
MESSAGE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Shortened:
    """A shorter request. `before`, `after`: tokens of its texts."""

    body: JsonObject
    before: int
    after: int


@dataclass(slots=True)
class _Text:
    """One piece of text in a request. `put` places another one there."""

    role: str
    text: str
    put: Callable[[str], None]


@dataclass(slots=True)
class _Passage:
    text: int
    content: str
    tokens: int = 0
    is_kept: bool = False


def texts_of(route: Route, body: JsonObject) -> list[str]:
    """All texts of a request's prompt."""
    return [one.text for one in _texts(route, body)]


def shorten(route: Route, body: JsonObject, budget: int, way: Way, count: Count) -> Shortened | None:
    """A request whose texts take at most `budget` tokens; None where what must be kept takes more.

    `body` stays as it is.
    """
    body = copy.deepcopy(body)
    texts = _texts(route, body)
    passages = [_Passage(index, piece) for index, one in enumerate(texts) for piece in split(one.text)]
    for passage, tokens in zip(passages, count([one.content for one in passages]), strict=True):
        passage.tokens = tokens
    before = sum(one.tokens for one in passages)
    questions = _keep_what_matters(texts, passages, budget)
    spare = budget - _cost(passages)
    if spare < 0:
        return None
    rest = [one for one in passages if not one.is_kept]
    if way == "truncate":
        _keep_ends(rest, spare)
    else:
        _keep_relevant(rest, questions, spare)
    for index, one in enumerate(texts):
        one.put(_joined([passage for passage in passages if passage.text == index]))
    return Shortened(body, before, _cost(passages))


async def with_summaries(
    route: Route, body: JsonObject, budget: int, count: Count, summaries: Summaries
) -> tuple[JsonObject, int]:
    """A request with summaries in place of what need not be kept, and the tokens of its texts.

    Pieces are summarised one by one, each to the same part of its length; where all summaries together are still too
    long, neighbouring ones are joined and summarised again. What must be kept stays as it is.

    Raises:
        InvalidRequest: what must be kept is too long, or summaries don't get short enough.
    """
    body = copy.deepcopy(body)
    texts = _texts(route, body)
    passages = [_Passage(index, piece) for index, one in enumerate(texts) for piece in split(one.text)]
    for passage, tokens in zip(passages, count([one.content for one in passages]), strict=True):
        passage.tokens = tokens
    _keep_what_matters(texts, passages, budget)
    kept = sum(passage.tokens for passage in passages if passage.is_kept)
    before = math.inf
    while True:
        pieces = _pieces(passages)
        sizes = [sum(passage.tokens for passage in piece) for piece in pieces]
        spare = budget - kept - _SUMMARY_TOKENS * len(pieces)
        if before < math.inf and sum(sizes) <= spare:
            break
        if sum(sizes) >= before or spare < _LEAST_SUMMARY_TOKENS:
            raise InvalidRequest(
                f"What must be kept of the prompt has {kept} tokens, which leaves too little room for summaries of the "
                "rest.",
                param="messages",
            )
        before = sum(sizes)
        share = next((share for share in _SUMMARY_SHARES if share * before <= spare), _SUMMARY_SHARES[-1])
        wanted = [max(_LEAST_SUMMARY_TOKENS, int(share * size)) for size in sizes]
        contents = ["\n".join(passage.content.strip() for passage in piece) for piece in pieces]
        made = [text.strip() for text in await summaries(list(zip(contents, wanted, strict=True)))]
        gone: set[int] = set()
        for piece, text, tokens in zip(pieces, made, count(made), strict=True):
            piece[0].content, piece[0].tokens = text, tokens
            gone.update(id(passage) for passage in piece[1:])
        passages = [passage for passage in passages if id(passage) not in gone]
    for piece in pieces:
        content = "\n".join(passage.content for passage in piece)
        piece[0].content, piece[0].is_kept = f"\n[summary: {content}]\n\n", True
        piece[0].tokens = count([piece[0].content])[0]
        for passage in piece[1:]:
            passage.content, passage.tokens, passage.is_kept = "", 0, True
    for index, one in enumerate(texts):
        one.put(_joined([passage for passage in passages if passage.text == index]))
    return body, sum(passage.tokens for passage in passages)


def _pieces(passages: Sequence[_Passage]) -> list[list[_Passage]]:
    """Neighbouring passages of one text that need not be kept, in pieces that a model can summarise well."""
    pieces: list[list[_Passage]] = []
    size = 0
    previous: _Passage | None = None
    for passage in passages:
        if not passage.is_kept:
            joins = previous is not None and not previous.is_kept and previous.text == passage.text
            if joins and size + passage.tokens <= _PIECE_TOKENS:
                pieces[-1].append(passage)
                size += passage.tokens
            else:
                pieces.append([passage])
                size = passage.tokens
        previous = passage
    return pieces


def split(text: str) -> list[str]:
    """Passages of a text; together they are the text."""
    pieces: list[str] = []
    for paragraph in _PARAGRAPH.findall(text):
        if not paragraph:
            continue
        current = ""
        for sentence in _SENTENCE.findall(paragraph) if len(paragraph) > _PASSAGE_CHARS else [paragraph]:
            for begin in range(0, len(sentence), 2 * _PASSAGE_CHARS):
                part = sentence[begin : begin + 2 * _PASSAGE_CHARS]
                if current and len(current) + len(part) > _PASSAGE_CHARS:
                    pieces.append(current)
                    current = ""
                current += part
        if current:
            pieces.append(current)
    return pieces


def shorten_ids(token_ids: Sequence[int], budget: int) -> list[int]:
    """The beginning and the end of a prompt of token ids, which cannot be cut elsewhere."""
    if len(token_ids) <= budget:
        return list(token_ids)
    head = budget // 2
    return [*token_ids[:head], *token_ids[len(token_ids) - (budget - head) :]]


def _texts(route: Route, body: JsonObject) -> list[_Text]:
    if route == "completions":
        prompt = body.get("prompt")
        return [_Text("user", prompt, _setter(body, "prompt"))] if isinstance(prompt, str) else []
    found: list[_Text] = []
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            continue
        role, content = str(message.get("role")), message.get("content")
        if isinstance(content, str):
            found.append(_Text(role, content, _setter(message, "content")))
        elif isinstance(content, list):
            found += [
                _Text(role, part["text"], _setter(part, "text"))
                for part in content
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            ]
    return found


def _setter(place: dict[str, Any], name: str) -> Callable[[str], None]:
    def put(text: str) -> None:
        place[name] = text

    return put


def _keep_what_matters(texts: Sequence[_Text], passages: Sequence[_Passage], budget: int) -> list[str]:
    """Mark instructions, the latest turns and the question as kept; what may be the question."""
    of_text: dict[int, list[_Passage]] = {}
    for passage in passages:
        of_text.setdefault(passage.text, []).append(passage)
    last_user = max((index for index, one in enumerate(texts) if one.role == "user"), default=len(texts) - 1)
    questions: list[str] = []
    for index, one in enumerate(texts):
        mine = of_text.get(index, [])
        if not mine:
            continue
        if one.role in _INSTRUCTIONS:
            kept = mine
        elif index == last_user:
            whole = sum(passage.tokens for passage in mine) <= _TURN_SHARE * budget
            # A document with a question before or after it.
            kept = mine if whole else list({id(passage): passage for passage in (mine[0], mine[-1])}.values())
            asked = [one.text] if whole else [passage.content for passage in kept]
            questions = [text for text in asked if "?" in text] or asked
        elif index >= last_user - 2 and sum(passage.tokens for passage in mine) <= _TURN_SHARE * budget / 2:
            kept = mine
        else:
            continue
        for passage in kept:
            passage.is_kept = True
    return questions


def _keep_ends(rest: Sequence[_Passage], spare: int) -> None:
    """From both ends inwards, as far as it goes."""
    first, last = 0, len(rest) - 1
    takes_first = True
    while first <= last:
        passage = rest[first] if takes_first else rest[last]
        if passage.tokens > spare:
            return
        passage.is_kept = True
        spare -= passage.tokens
        first, last = (first + 1, last) if takes_first else (first, last - 1)
        takes_first = not takes_first


def _keep_relevant(rest: Sequence[_Passage], questions: Sequence[str], spare: int) -> None:
    """Those that the questions' words single out, best first; then what is nearest to the ends."""
    for index in _by_relevance([one.content for one in rest], questions):
        passage = rest[index]
        # Each may open a gap of its own.
        if passage.tokens + _MARKER_TOKENS <= spare:
            passage.is_kept = True
            spare -= passage.tokens + _MARKER_TOKENS


def _by_relevance(contents: list[str], questions: Sequence[str]) -> Iterable[int]:
    """Places of the contents, the most relevant first.

    Each question gives an order; they are merged by reciprocal ranks (Cormack, Clarke, Buettcher 2009).
    """
    if not contents:
        return []
    import bm25s

    words = bm25s.tokenize(contents, stopwords="en", return_ids=False, show_progress=False)
    middle = (len(contents) - 1) / 2
    merged = [0.0] * len(contents)
    if any(words):
        index = bm25s.BM25()
        index.index(words, show_progress=False)
        for asked in bm25s.tokenize(list(questions), stopwords="en", return_ids=False, show_progress=False):
            known = [word for word in asked if word in index.vocab_dict]
            if not known:
                continue
            scores = index.get_scores(known)
            order = sorted(range(len(contents)), key=lambda at: -scores[at])
            for rank, at in enumerate(order):
                if scores[at] > 0:
                    merged[at] += 1 / (1 + rank)
    return sorted(range(len(contents)), key=lambda at: (-merged[at], -abs(at - middle)))


def _cost(passages: Sequence[_Passage]) -> int:
    """Tokens of what is kept, and of the marks for gaps."""
    cost, in_gap = 0, False
    for before, passage in zip([None, *passages], passages, strict=False):
        if passage.is_kept:
            cost += passage.tokens
        if not passage.is_kept and (not in_gap or (before is not None and before.text != passage.text)):
            cost += _MARKER_TOKENS
        in_gap = not passage.is_kept
    return cost


def _joined(passages: Sequence[_Passage]) -> str:
    parts: list[str] = []
    left_out = 0
    for passage in passages:
        if passage.is_kept:
            if left_out:
                parts.append(_mark(left_out))
            left_out = 0
            parts.append(passage.content)
        else:
            left_out += passage.tokens
    if left_out:
        parts.append(_mark(left_out))
    return "".join(parts)


def _mark(tokens: int) -> str:
    return f"\n[... {tokens} tokens left out ...]\n\n"
