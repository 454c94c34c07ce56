"""What load is offered: mixes of classes, and the requests that come of them.

A mix is a YAML file:

    interactive:                                # the classes, most important first
      targets: {ttft_ms: 500, ttft_ms_per_1k_tokens: 0, tpot_ms: 50}
      rate: 4                                   # requests per second, Poisson arrivals ...
      prompt_tokens: {min: 120, max: 1600}
      output_tokens: {min: 32, max: 256}
    batch:
      concurrency: 24                           # ... or so many at once, each sent when the one before has ended ...
      prompt_tokens: {min: 200, max: 1000}
      output_tokens: {min: 128, max: 512}
    documents:
      trace: documents.csv                      # ... or arrivals and lengths from a trace
      targets: {ttft_ms: 10000}

Lengths are spread evenly between `min` and `max`, or with `log: true` evenly over their logarithms.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from app.config import TargetsConfig, describe_validation_error, read_yaml
from app.engine.targets import Targets
from app.errors import ConfigError


class Lengths(BaseModel):
    """A distribution of lengths, in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min: int = Field(ge=1, description="Shortest.")
    max: int = Field(ge=1, description="Longest.")
    log: bool = Field(False, description="Spread over the logarithms. Default: no.")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, less than min, {self.min}")
        return self

    def draw(self, random_: random.Random) -> int:
        """One length."""
        if self.log:
            return round(math.exp(random_.uniform(math.log(self.min), math.log(self.max))))
        return random_.randint(self.min, self.max)


class ClassLoad(BaseModel):
    """The load of one class."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    targets: TargetsConfig = Field(default_factory=TargetsConfig, description="Its targets. Default: none.")
    rate: float | None = Field(
        None, gt=0, description="Requests per second; of a trace, in place of its own. Default: none."
    )
    concurrency: int | None = Field(None, ge=1, description="Requests at once, in a closed loop. Default: none.")
    trace: Path | None = Field(
        None, description="CSV file with the columns arrival_s, input_tokens and output_tokens. Default: none."
    )
    prompt_tokens: Lengths | None = Field(None, description="Prompt lengths. Default: the trace's.")
    output_tokens: Lengths | None = Field(None, description="Answer lengths. Default: the trace's.")
    shared_prefix_tokens: int = Field(
        0, ge=0, description="How many tokens all prompts of the class begin with alike. Default: 0."
    )

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.trace is None:
            if (self.rate is None) == (self.concurrency is None):
                raise ValueError("needs one of `rate`, `concurrency` and `trace`")
            if self.prompt_tokens is None or self.output_tokens is None:
                raise ValueError("needs `prompt_tokens` and `output_tokens`, for example {min: 100, max: 500}")
        elif self.concurrency is not None:
            raise ValueError("takes a trace's requests when they come; leave out `concurrency`")
        return self


Mix = dict[str, ClassLoad]

_MIX = TypeAdapter(Annotated[Mix, Field(min_length=1)])

# `mixed` has a long prompt's work far above a chat's; `agents` has prompts of 1,500 tokens for answers of 13, as in
# Azure's code-completion trace; `documents` has prompts as long as the model takes. `cpu` is for a model of 135M
# parameters on one or two cores: what it can carry, and what a person would still wait for.
MIXES: dict[str, dict[str, Any]] = {
    "mixed": {
        "interactive": {
            "targets": {"ttft_ms": 500, "tpot_ms": 50},
            "rate": 4,
            "prompt_tokens": {"min": 120, "max": 1600},
            "output_tokens": {"min": 32, "max": 160},
        },
        "long": {
            "targets": {"ttft_ms": 15_000, "tpot_ms": 100},
            "rate": 0.7,
            "prompt_tokens": {"min": 12_000, "max": 48_000, "log": True},
            "output_tokens": {"min": 32, "max": 160},
        },
        "batch": {
            "concurrency": 24,
            "prompt_tokens": {"min": 100, "max": 600},
            "output_tokens": {"min": 256, "max": 512},
        },
    },
    "agents": {
        "agents": {
            "targets": {"ttft_ms": 200, "tpot_ms": 50},
            "rate": 12,
            "prompt_tokens": {"min": 1000, "max": 2000},
            "output_tokens": {"min": 6, "max": 20},
        },
        "batch": {
            "concurrency": 32,
            "prompt_tokens": {"min": 500, "max": 4000},
            "output_tokens": {"min": 128, "max": 512},
        },
    },
    "documents": {
        "interactive": {
            "targets": {"ttft_ms": 500, "tpot_ms": 50},
            "rate": 6,
            "prompt_tokens": {"min": 120, "max": 1600},
            "output_tokens": {"min": 64, "max": 256},
        },
        "documents": {
            "targets": {"ttft_ms": 30_000, "ttft_ms_per_1k_tokens": 100, "tpot_ms": 100},
            "rate": 0.08,
            "prompt_tokens": {"min": 80_000, "max": 120_000},
            "output_tokens": {"min": 200, "max": 600},
        },
    },
    "batch": {
        "batch": {
            "concurrency": 128,
            "prompt_tokens": {"min": 200, "max": 4000},
            "output_tokens": {"min": 128, "max": 512},
        },
    },
    "cpu": {
        "interactive": {
            "targets": {"ttft_ms": 2000, "tpot_ms": 400},
            "rate": 0.5,
            "prompt_tokens": {"min": 16, "max": 128},
            "output_tokens": {"min": 16, "max": 48},
        },
        "long": {
            "targets": {"ttft_ms": 60_000, "tpot_ms": 1000},
            "rate": 0.06,
            "prompt_tokens": {"min": 2000, "max": 4000},
            "output_tokens": {"min": 8, "max": 32},
        },
        "batch": {
            "concurrency": 8,
            "prompt_tokens": {"min": 32, "max": 256},
            "output_tokens": {"min": 64, "max": 128},
        },
    },
}


@dataclass(frozen=True, slots=True)
class Offer:
    """A request: `at`: seconds from the start; `targets`: None for none; `shared`: how many of its prompt's tokens are
    those that all of its class begin with."""

    at: float
    service_class: str
    prompt_tokens: int
    output_tokens: int
    targets: Targets | None
    shared: int = 0


def load_mix(name: str) -> Mix:
    """The named mix, or the one in a YAML file.

    Raises:
        ConfigError: there is no such mix or file, or the file is not a mix.
    """
    if name in MIXES:
        return parse_mix(MIXES[name], name)
    try:
        document = read_yaml(Path(name), "mix")
    except FileNotFoundError:
        raise ConfigError(f"mix `{name}` is neither a file nor one of {', '.join(MIXES)}") from None
    return parse_mix(document, name)


def parse_mix(document: Any, where: str) -> Mix:
    """The mix that a mapping describes; `where` it stands, for the message.

    Raises:
        ConfigError: it is not one.
    """
    try:
        return _MIX.validate_python(document)
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe_validation_error(error)}") from None


def with_trace(mix: Mix, name: str, path: Path, rate: float | None) -> Mix:
    """The mix with a class's load from a trace; a class that it doesn't have comes last, without targets.

    `rate`: requests per second, None for the trace's own.
    """
    targets = mix[name].targets if name in mix else TargetsConfig()
    return {**mix, name: ClassLoad(trace=path, rate=rate, targets=targets)}


def first_alone(mix: Mix) -> Mix:
    """The mix's first class without the others."""
    name = next(iter(mix))
    return {name: mix[name]}


def most_prompt_tokens(max_model_len: int) -> int:
    """How long a prompt of a trace may be, in tokens: what leaves room for an answer."""
    return max_model_len - min(4096, max_model_len // 32)


def check_lengths(mix: Mix, max_model_len: int) -> None:
    """Refuse a mix with requests that the engine cannot hold.

    Raises:
        ConfigError: a class has longer ones than `max_model_len` tokens.
    """
    for name, load in mix.items():
        if load.prompt_tokens is None or load.output_tokens is None:
            continue
        longest = load.prompt_tokens.max + load.output_tokens.max
        if longest > max_model_len:
            raise ConfigError(f"{name}: up to {longest} tokens per request, and the engine holds {max_model_len}")


def closed_loops(mix: Mix, seed: int) -> dict[str, random.Random]:
    """For each class with a closed loop, what its requests' lengths are drawn from."""
    return {name: random.Random(f"{seed} {name}") for name, load in mix.items() if load.concurrency}


def scaled(mix: Mix, name: str, rate: float) -> Mix:
    """The mix with another rate for one class."""
    return {**mix, name: mix[name].model_copy(update={"rate": rate})}


def open_offers(mix: Mix, seconds: float, seed: int, most_prompt_tokens: int) -> list[Offer]:
    """The requests that come whatever becomes of those before, in the order in which they come.

    `seconds`: how long they come; `most_prompt_tokens`: what a longer prompt of a trace is cut to.

    Raises:
        ConfigError: a trace cannot be read.
    """
    offers: list[Offer] = []
    for name, load in mix.items():
        # A class's requests stay the same whatever the others do.
        random_ = random.Random(f"{seed} {name}")
        if load.trace is not None:
            offers += _from_trace(name, load, seconds, random_, most_prompt_tokens)
        elif load.rate is not None:
            at = random_.expovariate(load.rate)
            while at < seconds:
                offers.append(draw(name, load, at, random_))
                at += random_.expovariate(load.rate)
    return sorted(offers, key=lambda offer: offer.at)


def draw(name: str, load: ClassLoad, at: float, random_: random.Random) -> Offer:
    """One request of a class that has distributions of lengths."""
    assert load.prompt_tokens is not None
    assert load.output_tokens is not None
    return _offer(name, load, at, load.prompt_tokens.draw(random_), load.output_tokens.draw(random_))


def _offer(name: str, load: ClassLoad, at: float, prompt_tokens: int, output_tokens: int) -> Offer:
    targets = load.targets
    promised = Targets(targets.ttft_s(prompt_tokens), targets.tpot_s, name)
    has_targets = promised.ttft_s is not None or promised.tpot_s is not None
    shared = min(load.shared_prefix_tokens, prompt_tokens - 1)
    return Offer(at, name, prompt_tokens, output_tokens, promised if has_targets else None, shared)


def _from_trace(
    name: str, load: ClassLoad, seconds: float, random_: random.Random, most_prompt_tokens: int
) -> Iterable[Offer]:
    """A stretch of the trace that begins at a random place, played at the wanted rate."""
    assert load.trace is not None
    try:
        with load.trace.open(newline="") as file:
            rows = [
                (float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"]))
                for row in csv.DictReader(file)
            ]
    except (OSError, UnicodeDecodeError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{load.trace}: not a trace with the columns arrival_s, input_tokens and output_tokens: {error!r}"
        ) from None
    if len(rows) < 2 or rows[-1][0] <= rows[0][0]:
        raise ConfigError(f"{load.trace}: a trace needs at least two requests at different times")
    own_rate = (len(rows) - 1) / (rows[-1][0] - rows[0][0])
    speed = load.rate / own_rate if load.rate else 1.0
    span = rows[-1][0] - rows[0][0]
    begin = rows[0][0] + random_.uniform(0, max(0.0, span - seconds * speed))
    for arrival, prompt_tokens, output_tokens in rows:
        at = (arrival - begin) / speed
        if 0 <= at < seconds:
            yield _offer(name, load, at, max(1, min(prompt_tokens, most_prompt_tokens)), max(1, output_tokens))
