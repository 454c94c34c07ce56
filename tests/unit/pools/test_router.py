"""Which replica Ray Serve is told to give a call to."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import RequestRouter

from app.pools import members
from app.pools.router import PoolRouter
from app.types import OpenChannel
from tests.unit.pools.test_client import request


@dataclass(frozen=True)
class Id:
    unique_id: str


@dataclass(frozen=True)
class Replica:
    replica_id: Id


@dataclass(frozen=True)
class Pending:
    args: tuple[Any, ...]


ONE, TWO, THREE = (Replica(Id(name)) for name in ("one", "two", "three"))


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> PoolRouter:
    async def two_of_them(self: Any, candidates: Any, pending: Any) -> list[list[Replica]]:
        return [[TWO, THREE]]

    monkeypatch.setattr(PowerOfTwoChoicesRequestRouter, "choose_replicas", two_of_them)
    return PoolRouter.__new__(PoolRouter)


async def test_a_request_goes_where_it_was_placed_and_elsewhere_if_that_is_full(router: PoolRouter) -> None:
    placed = replace(request(), replica_id="one")
    assert await router.choose_replicas([ONE, TWO, THREE], Pending((placed,))) == [[ONE], [TWO, THREE]]


async def test_where_that_is_gone_or_none_serve_chooses(router: PoolRouter) -> None:
    for replica_id in ("gone", ""):
        one = replace(request(), replica_id=replica_id)
        assert await router.choose_replicas([ONE, TWO, THREE], Pending((one,))) == [[TWO, THREE]]


async def test_what_is_for_one_replica_goes_to_no_other(router: PoolRouter) -> None:
    for replica_id, expected in (("one", [[ONE]]), ("gone", [[]])):
        call = OpenChannel(replica_id, "ingress", 1)
        assert await router.choose_replicas([ONE, TWO, THREE], Pending((call,))) == expected


def test_the_pools_client_is_told_of_its_replicas(router: PoolRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)
    monkeypatch.setattr(members, "_members", {})
    monkeypatch.setattr(members, "_told", {})
    monkeypatch.setattr(router, "_deployment_id", type("Id", (), {"name": "batch"}), raising=False)
    told: list[frozenset[str]] = []
    router.update_replicas([ONE])
    members.watch("batch", told.append)
    router.update_replicas([ONE, TWO])
    assert told == [frozenset({"one"}), frozenset({"one", "two"})]


def test_ray_serve_still_has_what_this_relies_on() -> None:
    assert "self._deployment_id = deployment_id" in inspect.getsource(RequestRouter.__init__)
    assert list(inspect.signature(RequestRouter.update_replicas).parameters) == ["self", "replicas"]
