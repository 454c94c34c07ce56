"""Long prompts made shorter: how often a fact that is asked for is kept, by retrieval and by truncation.

Documents are made up: reports of a few thousand sentences about people, places and figures, with one fact planted at a
random place and a question about it that shares only some of its words. Tokens are the built-in model's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.routing.prompts import Way, shorten

_NAMES = (
    "Alvarez", "Brandt", "Chowdhury", "Dufour", "Eriksen", "Fontaine", "Grigoriev", "Haddad", "Ivanova", "Jansen",
    "Kowalski", "Lindqvist", "Moreau", "Nakamura", "Okafor", "Petrov", "Quintero", "Rossi", "Schneider", "Tanaka",
)  # fmt: skip
_PLACES = (
    "Ankara", "Bergen", "Cordoba", "Dresden", "Esbjerg", "Funchal", "Galway", "Hanoi", "Izmir", "Jaipur", "Kyoto",
    "Lagos", "Malmo", "Nantes", "Odense", "Porto", "Quito", "Riga", "Seville", "Tampere",
)  # fmt: skip
_THINGS = (
    "budget", "contract", "delivery", "inspection", "licence", "machine", "meeting", "pipeline", "report", "shipment",
    "survey", "turbine", "valve", "warehouse", "workshop", "bridge", "library", "harbour", "laboratory", "archive",
)  # fmt: skip
_SENTENCES = (
    "{name} said that the {thing} in {place} was delayed by {number} days.",
    "In {place}, the {thing} was reviewed by {name} and found to be in order.",
    "The cost of the {thing} rose to {number} thousand after {name} left {place}.",
    "Nobody in {place} had expected the {thing} to be finished before {name} arrived.",
    "According to {name}, {number} people took part in the {thing} at {place}.",
    "The {thing} which {name} ordered for {place} has {number} parts.",
)
# A fact, and a question that asks for what stands in its place of `secret`.
_FACTS = (
    ("The door code of the {thing} in {place} is {secret}.", "Which code opens the door of the {thing} in {place}?"),
    ("{name} keeps the spare key of the {thing} under {secret}.", "Where does {name} keep the spare key?"),
    ("The {thing} at {place} runs on firmware {secret}.", "What firmware does the {thing} at {place} use?"),
    ("For emergencies at the {place} site, dial {secret}.", "Which number do I dial in emergencies at {place}?"),
    ("{name}'s employee number is {secret}.", "What is the employee number of {name}?"),
    ("The password that {name} chose for the {thing} was {secret}.", "What password did {name} choose?"),
)


def _fill(template: str, random_: random.Random, **fixed: str) -> str:
    words = {
        "name": random_.choice(_NAMES),
        "place": random_.choice(_PLACES),
        "thing": random_.choice(_THINGS),
        "number": str(random_.randint(2, 990)),
    }
    return template.format(**{**words, **fixed})


def case(seed: int, sentences: int) -> tuple[str, str, str]:
    """A document, a question, and the answer that stands in the document once."""
    random_ = random.Random(seed)
    secret = f"{random_.choice(('amber', 'cobalt', 'crimson', 'indigo', 'olive'))}-{random_.randint(1000, 9999)}"
    fixed = {
        "name": random_.choice(_NAMES),
        "place": random_.choice(_PLACES),
        "thing": random_.choice(_THINGS),
        "secret": secret,
    }
    fact, question = (template.format(**fixed) for template in random_.choice(_FACTS))
    lines = [_fill(random_.choice(_SENTENCES), random_) for _ in range(sentences)]
    lines.insert(random_.randrange(len(lines)), fact)
    paragraphs: list[str] = []
    while lines:
        size = random_.randint(2, 8)
        paragraphs.append(" ".join(lines[:size]))
        del lines[:size]
    return "\n\n".join(paragraphs), question, secret


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    from app.model_cache import builtin_model_path

    return AutoTokenizer.from_pretrained(builtin_model_path("smollm2-135m-instruct"))


def main(argv: Sequence[str]) -> int:
    """Print the share of facts that are kept."""
    parser = argparse.ArgumentParser(prog="bench compression", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=100, help="documents (default: %(default)s)")
    parser.add_argument("--sentences", type=int, default=1500, help="per document (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=8.0, help="how much shorter (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args(argv)
    tokenizer = _tokenizer()

    def count(texts: list[str]) -> list[int]:
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    ways: tuple[Way, ...] = ("retrieve", "truncate")
    kept = dict.fromkeys(ways, 0)
    before = after = 0
    for seed in range(options.cases):
        text, question, secret = case(seed, options.sentences)
        body = {"messages": [{"role": "user", "content": f"{text}\n\n{question}"}]}
        budget = int(count([text])[0] / options.ratio)
        for way in ways:
            short = shorten("chat", body, budget, way, count)
            if short is None or short.after > budget:
                raise RuntimeError(f"case {seed}: {way} did not fit")
            kept[way] += secret in short.body["messages"][0]["content"]
            if way == "retrieve":
                before, after = before + short.before, after + short.after
    figures = {
        "cases": options.cases,
        "tokens_before": before / options.cases,
        "ratio": before / after,
        **{f"{way}_keeps_the_fact": kept[way] / options.cases for way in ways},
    }
    for name, value in figures.items():
        print(f"  {name:28} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
