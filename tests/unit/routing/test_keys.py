"""API keys and their limits."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import ConfigError, InvalidKey, NotAllowed, QuotaExceeded
from app.routing.keys import Caller, Grant, KeyConfig, Keys, hash_key, keys_from_text, parse_keys


def keys(parts: int = 1, **limits: Any) -> tuple[Keys, Caller]:
    known = Keys([KeyConfig(name="a", sha256=hash_key("sk-a"), **limits)], parts)
    known.is_open = False
    return known, known.identify("Bearer sk-a")


def refusal(known: Keys, caller: Caller, tokens: int, now: float) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        known.take(caller, tokens, now)
    return caught.value


def test_a_key_tells_whose_a_request_is() -> None:
    _, caller = keys(weight=3, classes=("batch",))
    assert caller == Caller("a", 3, ("batch",))


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "Bearer sk-b", "Basic sk-a", "sk-a"])
def test_others_do_not(given: str | None) -> None:
    known, _ = keys()
    with pytest.raises(InvalidKey):
        known.identify(given)


def test_without_keys_anybody_may_come() -> None:
    known = Keys(())
    known.configure(None)
    assert known.identify(None) == Caller()
    known.release(known.take(Caller(), 10**9, 0.0), 10**9)


def test_an_empty_keys_file_lets_nobody_in() -> None:
    known = Keys(())
    known.configure(())
    with pytest.raises(InvalidKey):
        known.identify("Bearer sk-a")


def test_a_key_has_its_classes() -> None:
    known, caller = keys(classes=("batch",))
    known.check_class(caller, "batch")
    with pytest.raises(NotAllowed, match="`interactive`; it may for `batch`"):
        known.check_class(caller, "interactive")


class TestLimits:
    """What a key may have in a minute, and at once."""

    def test_requests_per_minute(self) -> None:
        known, caller = keys(requests_per_minute=2)
        for _ in range(2):
            known.take(caller, 1, 0.0)
        assert refusal(known, caller, 1, 0.0).retry_after == pytest.approx(30)
        assert refusal(known, caller, 1, 20.0).retry_after == pytest.approx(10)
        known.take(caller, 1, 30.1)

    def test_tokens_per_minute_count_what_was_used_in_the_end(self) -> None:
        known, caller = keys(tokens_per_minute=1000)
        grant = known.take(caller, 900, 0.0)
        assert refusal(known, caller, 200, 0.0).details == {"reason": "tokens_per_minute"}
        known.release(grant, 100)
        known.release(grant, 100)
        known.take(caller, 900, 0.0)
        assert refusal(known, caller, 10, 0.0)

    def test_a_request_larger_than_a_minutes_worth_needs_all_of_it(self) -> None:
        known, caller = keys(tokens_per_minute=1000)
        known.take(caller, 5000, 0.0)
        assert refusal(known, caller, 1, 60.0).retry_after == pytest.approx(180.06)

    def test_requests_at_once(self) -> None:
        known, caller = keys(max_concurrent=1)
        grant = known.take(caller, 1, 0.0)
        assert refusal(known, caller, 1, 0.0).details == {"reason": "concurrent_requests"}
        known.release(grant, 1)
        known.release(grant, 1)
        known.take(caller, 1, 0.0)

    def test_a_refused_request_has_taken_nothing(self) -> None:
        known, caller = keys(requests_per_minute=1, tokens_per_minute=100)
        known.take(caller, 100, 0.0)
        refusal(known, caller, 1, 0.0)
        assert refusal(known, caller, 1, 59.0).retry_after == pytest.approx(1.0, abs=0.01)

    def test_replicas_share_them(self) -> None:
        known, caller = keys(parts=2, requests_per_minute=4)
        for _ in range(2):
            known.take(caller, 1, 0.0)
        assert refusal(known, caller, 1, 0.0)

    def test_a_new_file_forgets_nothing(self) -> None:
        known, caller = keys(max_concurrent=2, requests_per_minute=1)
        known.take(caller, 1, 0.0)
        known.configure([KeyConfig(name="a", sha256=hash_key("sk-new"), max_concurrent=1, requests_per_minute=1)])
        with pytest.raises(InvalidKey):
            known.identify("Bearer sk-a")
        again = known.identify("Bearer sk-new")
        assert refusal(known, again, 1, 0.0).details == {"reason": "concurrent_requests"}

    def test_a_key_that_is_gone_gives_back_nothing(self) -> None:
        known, caller = keys(max_concurrent=1)
        grant = known.take(caller, 1, 0.0)
        known.configure([])
        known.release(grant, 1)
        assert isinstance(known.take(caller, 1, 0.0), Grant)


class TestFiles:
    """Where keys come from; what is wrong is named, and no secret told."""

    def test_a_file(self) -> None:
        (key,) = parse_keys({"keys": [{"name": "a", "sha256": hash_key("x"), "weight": 2}]}, "keys.yaml")
        assert (key.name, key.weight) == ("a", 2)

    @pytest.mark.parametrize(
        ("document", "words"),
        [
            (None, "keys.yaml: .*dictionary"),
            ({"keys": [{"name": "a"}]}, r"keys\.0\.sha256: this key is missing"),
            ({"keys": [{"name": "a", "sha256": "sk-plain-secret"}]}, r"keys\.0\.sha256"),
            ({"keys": [{"name": "a", "sha256": "0" * 64, "rpm": 5}]}, r"keys\.0\.rpm: unknown key"),
            ({"keys": [{"name": "a", "sha256": c * 64} for c in "01"]}, "two keys have the same name"),
            ({"keys": [{"name": n, "sha256": "0" * 64} for n in "ab"]}, "two keys have the same sha256"),
        ],
    )
    def test_mistakes_in_it(self, document: Any, words: str) -> None:
        with pytest.raises(ConfigError, match=words) as caught:
            parse_keys(document, "keys.yaml")
        assert "secret" not in str(caught.value)

    def test_an_environment_variable(self) -> None:
        assert [key.name for key in keys_from_text("a=sk-1, b=sk=2,")] == ["a", "b"]
        with pytest.raises(ConfigError, match="pairs name=key"):
            keys_from_text("sk-secret")
