"""Mistakes in the configuration: every one is refused, with a message that names the place."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from app.config import CpuExecutor, Dials, SluiceConfig, parse_config, reconfigured
from app.errors import ConfigError
from tests.support.configs import minimal_args, put


def refusal(args: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(args)
    return str(caught.value)


def test_the_smallest_configuration_gets_documented_defaults() -> None:
    config = parse_config(minimal_args())
    assert {name: entry.service_tier for name, entry in config.classes.items()} == {
        "interactive": "priority",
        "standard": "default",
        "batch": "flex",
    }
    pool = config.pools["interactive"]
    assert pool.executor == CpuExecutor(kind="cpu", threads=1)
    assert (pool.num_replicas, pool.num_gpus, pool.engine.enable_prefix_caching) == (1, 0.0, True)
    # Who waits for another's slot does so in the engine.
    assert pool.most_ongoing_requests >= 2 * pool.engine.max_num_seqs
    assert config.tracing.exporter is None


def test_a_configuration_cannot_be_changed() -> None:
    config = parse_config(minimal_args())
    with pytest.raises(ValidationError, match="frozen"):
        config.model.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "path",
    [
        "nonsense",
        "model.nonsense",
        "routing.nonsense",
        "routing.lengths.1.nonsense",
        "routing.rules.0.nonsense",
        "pools.batch.nonsense",
        "pools.batch.engine.nonsense",
        "pools.batch.executor.nonsense",
    ],
)
def test_unknown_keys_are_refused_at_every_depth(path: str) -> None:
    args = minimal_args()
    put(args, path, 1)
    assert refusal(args) == f"args: {path}: unknown key; remove it or correct its spelling"


@pytest.mark.parametrize("section", ["ingress", "tracing"])
def test_unknown_keys_are_refused_in_optional_sections(section: str) -> None:
    assert refusal({**minimal_args(), section: {"nonsense": 1}}).startswith(f"args: {section}.nonsense: unknown key")


@pytest.mark.parametrize("path", ["model", "model.name", "routing.rules", "pools.batch.engine.max_model_len"])
def test_missing_keys_are_named(path: str) -> None:
    args = minimal_args()
    parent: Any = args
    *parents, last = path.split(".")
    for part in parents:
        parent = parent[part]
    del parent[last]
    assert refusal(args) == f"args: {path}: this key is missing; add it"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.name", "", "model.name: "),
        ("routing.lengths", [], "routing.lengths: "),
        ("routing.lengths.1.max_prompt_tokens", 2000, "routing.lengths: the last length class must have no"),
        ("routing.lengths.0.max_prompt_tokens", None, "routing.lengths: max_prompt_tokens must rise"),
        ("routing.lengths.0.max_prompt_tokens", 0, "routing.lengths.0.max_prompt_tokens: "),
        ("routing.lengths.1.name", "short", "routing.lengths: two length classes have the same name"),
        ("routing.rules", [], "routing.rules: "),
        ("routing.rules.0.pool", "fast", "routing.rules.0.pool: no pool `fast` is defined; defined are `interactive`"),
        ("routing.rules.0.class", "gold", "routing.rules.0.class: no class `gold` is defined; defined are `inter"),
        ("routing.rules.0.length", "huge", "routing.rules.0.length: no length class `huge` is defined; defined are"),
        ("routing.rules.1.length", "short", "routing.rules: no rule matches class `interactive` with length `long`"),
        ("pools", {}, "pools: "),
        ("pools.batch.num_replicas", 0, "pools.batch.num_replicas: "),
        ("pools.batch.executor", {"kind": "tpu"}, "pools.batch.executor: "),
        ("pools.batch.executor", {}, "pools.batch.executor: "),
        ("pools.batch.engine.max_model_len", "long", "pools.batch.engine.max_model_len: "),
        ("pools.batch.engine.gpu_memory_utilization", 1.5, "pools.batch.engine.gpu_memory_utilization: "),
        ("pools.batch.num_gpus", 1, "pools.batch: num_gpus must be 0 with executor.kind: cpu"),
        ("pools.batch.executor", {"kind": "gpu"}, "pools.batch: num_gpus must be above 0 with executor.kind: gpu"),
        ("pools.batch.engine.kv_cache_memory_mib", None, "pools.batch: engine.kv_cache_memory_mib is needed with"),
        ("ingress", {"max_body_mib": 0}, "ingress.max_body_mib: "),
        ("tracing", {"exporter": "jaeger"}, "tracing.exporter: "),
        ("tracing", {"sample_ratio": 2}, "tracing.sample_ratio: "),
    ],
)
def test_wrong_values_are_refused_with_their_path(path: str, value: Any, message: str) -> None:
    args = minimal_args()
    put(args, path, value)
    assert refusal(args).startswith(f"args: {message}")


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (
            {"a": {"service_tier": "default"}, "b": {"service_tier": "default"}},
            "two classes have the same service_tier",
        ),
        ({"a": {"service_tier": "flex"}}, "one class must have service_tier: default"),
    ],
)
def test_classes_have_each_their_tier_and_one_is_the_default(classes: dict[str, Any], message: str) -> None:
    assert refusal({**minimal_args(), "classes": classes}).startswith(f"args: classes: {message}")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"ttft_ms": float("inf")}, "finite"),
        ({"tpot_ms": 0}, "greater than 0"),
        ({"ttft_ms_per_1k_tokens": 100}, "needs ttft_ms"),
        ({"ttft": 100}, "ttft"),
    ],
)
def test_targets_are_finite_and_above_zero(targets: dict[str, Any], message: str) -> None:
    args = minimal_args()
    args["classes"] = {"standard": {"service_tier": "default", "targets": targets}}
    text = refusal(args)
    assert "classes.standard.targets" in text
    assert message in text


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dials": {"preset": "fast"}}, "dials.preset: "),
        ({"dials": {"running_share": 1.5}}, "dials.running_share: "),
        ({"dials": {"step_tpot_share": 0}}, "dials.step_tpot_share: must be above 0, or `none`"),
        ({"dials": {"max_output_tokens": -1}}, "dials.max_output_tokens: must be above 0, or `none`"),
        ({"limits": {"max_helt": 1}}, "limits.max_helt: unknown key"),
        ({"long_prompts": {"mode": "shred"}}, "long_prompts.mode: "),
        ({"degrade": {"prompt_share": 1}}, "degrade.prompt_share: "),
        ({"collect_ms": -1}, "collect_ms: "),
        ({"admit_share": 0}, "admit_share: "),
    ],
)
def test_mistakes_in_a_class_are_named(entry: dict[str, Any], message: str) -> None:
    classes = {"standard": {"service_tier": "default", **entry}}
    args = {
        **minimal_args(),
        "classes": classes,
        "routing": {"lengths": [{"name": "any"}], "rules": [{"pool": "batch"}]},
    }
    assert f"classes.standard.{message}" in refusal(args)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("classes.standard.spill_to", ["fast"], "classes.standard.spill_to: no pool `fast` is defined"),
        ("classes.standard.degrade", {"demote_to": "gold"}, "classes.standard.degrade.demote_to: no class `gold`"),
        ("pools.batch.reserve", {"gold": 0.1}, "pools.batch.reserve: no class `gold` is defined"),
        ("pools.batch.reserve", {"standard": 0.6, "batch": 0.6}, "pools.batch.reserve: the shares add up to more than"),
    ],
)
def test_what_classes_and_pools_say_of_each_other_must_exist(path: str, value: Any, message: str) -> None:
    args = minimal_args()
    args["classes"] = {"standard": {"service_tier": "default"}, "batch": {"service_tier": "flex"}}
    put(args, path, value)
    assert message in refusal(args)


def test_presets_set_all_dials_and_given_ones_replace_them() -> None:
    args = minimal_args()
    args["classes"] = {
        "chat": {
            "service_tier": "priority",
            "targets": {"ttft_ms": 500},
            "dials": {"preset": "latency", "hold_ms": 50},
        },
        "standard": {"service_tier": "default", "targets": {"ttft_ms": 500}},
        "batch": {"service_tier": "flex", "dials": {"max_output_tokens": 9, "step_tpot_share": 2}},
    }
    dials = {name: entry.effective_dials for name, entry in parse_config(args).classes.items()}
    assert dials == {
        "chat": Dials(0.05, 0.5, 0.5, 2048),
        "standard": Dials(1.0, 1.0, 1.0, None),
        "batch": Dials(60.0, 1.0, 2, 9),
    }


def test_the_first_classes_may_be_predicted_to_take_more_of_their_targets() -> None:
    config = parse_config(minimal_args())
    assert [config.admit_share(name) for name in config.classes] == pytest.approx([0.8, 0.65, 0.5])
    args = minimal_args()
    args["classes"] = {"batch": {"service_tier": "flex"}, "standard": {"service_tier": "default", "admit_share": 0.5}}
    assert parse_config(args).admit_share("standard") == 0.5


class TestChanges:
    """A deployment's `user_config`."""

    def test_sections_take_the_place_of_their_own(self) -> None:
        before = parse_config(minimal_args())
        classes = {**before.model_dump()["classes"], "batch": {"service_tier": "flex", "collect_ms": 5}}
        after = reconfigured(before, {"classes": classes})
        assert after.classes["batch"].collect_ms == 5
        assert after.classes["interactive"] == before.classes["interactive"]
        assert after.pools == before.pools

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"pools": {}}, "user_config.pools: only `classes` and `routing` can change"),
            ({"classes": {}}, "user_config: classes: "),
            ({"routing": {"rules": []}}, "user_config: routing.lengths: "),
        ],
    )
    def test_mistakes_are_named(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            reconfigured(parse_config(minimal_args()), changes)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["Fast", "9lives", "with-dash", "a" * 33])
def test_names_are_short_lower_case_identifiers(name: str) -> None:
    args = minimal_args()
    args["pools"][name] = args["pools"]["batch"]
    assert f"pools.{name}" in refusal(args)


def test_a_pool_may_not_take_the_ingress_name() -> None:
    args = minimal_args()
    args["pools"]["ingress"] = args["pools"]["batch"]
    assert "a pool may not be called `ingress`" in refusal(args)


def test_one_sentence_tells_how_many_mistakes_more_there_are() -> None:
    args = {**minimal_args(), "one": 1, "two": 2, "three": 3}
    assert refusal(args) == "args: one: unknown key; remove it or correct its spelling (and 2 more)"


@pytest.mark.parametrize("alias", ["class", "service_class"])
def test_a_rule_names_its_class_by_the_files_key_or_the_field(alias: str) -> None:
    args = minimal_args()
    args["routing"]["rules"][0] = {alias: "batch", "pool": "batch"}
    assert parse_config(args).routing.rules[0].service_class == "batch"


def test_the_configuration_survives_its_own_dump() -> None:
    config = parse_config(minimal_args())
    assert SluiceConfig.model_validate(config.model_dump(by_alias=True)) == config
