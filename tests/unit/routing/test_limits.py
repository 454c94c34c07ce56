"""What a class allows one request."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import InvalidRequest
from app.routing.limits import within_limits
from app.types import Rendered
from tests.support.fleet import fleet_config


def rendered(output: int | None = None, sequences: int = 1) -> Rendered:
    return Rendered("m", False, None, 10, 10, output, sequences, {})


def capped(**limits: Any) -> Any:
    return fleet_config(classes__interactive__dials={"max_output_tokens": 100}, classes__interactive__limits=limits)


@pytest.mark.parametrize(("asked", "notes"), [(500, ["max_tokens=100"]), (None, [])])
def test_an_output_is_capped_and_only_a_broken_wish_is_told(asked: int | None, notes: list[str]) -> None:
    body = {} if asked is None else {"max_tokens": asked}
    for route, name in (("chat", "max_completion_tokens"), ("completions", "max_tokens")):
        new, after, told = within_limits(capped(), route, "interactive", body, rendered(asked))  # type: ignore[arg-type]
        assert new == {name: 100}
        assert (after.max_output_tokens, told) == (100, notes)


def test_what_is_allowed_is_left_alone() -> None:
    body, before = {"max_tokens": 100}, rendered(100)
    assert within_limits(capped(), "chat", "interactive", body, before) == (body, before, [])
    assert within_limits(fleet_config(), "chat", "interactive", body, rendered(10**6))[2] == []


def test_a_strict_class_refuses() -> None:
    with pytest.raises(InvalidRequest, match="at most 100"):
        within_limits(capped(over_max_output="reject"), "chat", "interactive", {}, rendered(101))
    # Who names no number breaks no rule.
    assert within_limits(capped(over_max_output="reject"), "chat", "interactive", {}, rendered())[2] == []


def test_choices_are_limited() -> None:
    config = capped(max_choices=2)
    assert within_limits(config, "chat", "interactive", {}, rendered(5, 2))[2] == []
    with pytest.raises(InvalidRequest, match="3 sequences"):
        within_limits(config, "chat", "interactive", {}, rendered(5, 3))
