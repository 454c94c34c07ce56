"""The cost model against published figures of Llama-3.1-8B in bf16."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.step_cost import PROFILES, load_profile, parse_profile, step_seconds
from app.errors import ConfigError

H100 = PROFILES["h100-llama-3.1-8b"]
H200 = PROFILES["h200-llama-3.1-8b"]


@pytest.mark.parametrize(
    ("profile", "decodes", "milliseconds"),
    [
        ("h100-llama-3.1-8b", 1, 6.4),
        ("h100-llama-3.1-8b", 16, 7.3),
        ("h100-llama-3.1-8b", 64, 10.5),
        ("h100-llama-3.1-8b", 128, 15.1),
        ("h100-llama-3.1-8b", 256, 24.7),
        ("h200-llama-3.1-8b", 1, 4.6),
        ("h200-llama-3.1-8b", 16, 5.3),
        ("h200-llama-3.1-8b", 64, 7.8),
        ("h200-llama-3.1-8b", 128, 11.5),
        ("h200-llama-3.1-8b", 256, 19.2),
    ],
)
def test_a_decode_step_at_a_context_of_1024(profile: str, decodes: int, milliseconds: float) -> None:
    seconds = step_seconds(PROFILES[profile], decodes, decodes * 1024)
    assert seconds * 1000 == pytest.approx(milliseconds, abs=0.1)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(1024, 25), (4096, 99), (16_384, 500), (32_768, 1286)])
def test_a_prefill_in_one_step(tokens: int, milliseconds: float) -> None:
    seconds = step_seconds(H100, 0, 0, [(tokens, 0)], finishing_prefills=1)
    assert seconds * 1000 == pytest.approx(milliseconds, rel=0.02)


def test_small_chunks_cost_what_was_measured_for_them() -> None:
    whole = step_seconds(H100, 0, 0, [(2048, 0)], 1)
    chunked = sum(step_seconds(H100, 0, 0, [(512, depth)], depth == 1536) for depth in range(0, 2048, 512))
    assert chunked / whole == pytest.approx(1.22, abs=0.03)


def test_the_shape_gives_the_kv_bytes_that_the_profile_says() -> None:
    for profile in PROFILES.values():
        shape = profile.hf_overrides
        bytes_per_token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        assert bytes_per_token == profile.kv_bytes_per_token
        assert shape["num_attention_heads"] * shape["head_dim"] == profile.attention_width
        assert shape["num_hidden_layers"] == profile.layers


@given(
    decodes=st.integers(0, 512),
    context=st.integers(0, 400_000),
    prefills=st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 120_000)), max_size=4),
)
def test_more_work_never_takes_less_time(decodes: int, context: int, prefills: list[tuple[int, int]]) -> None:
    base = step_seconds(H100, decodes, context, prefills)
    assert step_seconds(H100, decodes + 1, context, prefills) > base
    assert step_seconds(H100, decodes, context + 1, prefills) > base
    assert step_seconds(H100, decodes, context, [*prefills, (1, 0)]) > base
    assert step_seconds(H100, decodes, context, prefills, 1) > base
    assert step_seconds(H200, decodes, context, prefills) < base


def test_a_profile_can_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(H100.model_copy(update={"bandwidth": 2e12}).model_dump_json())
    assert load_profile(str(path)).bandwidth == 2e12
    assert load_profile("h100-llama-3.1-8b") is H100


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "fast", None])
def test_a_bandwidth_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml: bandwidth: "):
        parse_profile({**H100.model_dump(), "bandwidth": value}, "mine.yaml")


def test_a_folder_is_not_a_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a cost profile"):
        load_profile(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "neither a file nor one of `h100-llama-3.1-8b`, `h200-llama-3.1-8b`"),
        ("bandwith: 1", "bandwith: unknown key|this key is missing"),
        ("- 1", "should be a valid dictionary"),
        ("", "should be a valid dictionary"),
        ("{", "cannot be read as a cost profile"),
    ],
)
def test_a_wrong_profile_is_told_in_one_sentence(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(str(path))
    assert "\n" not in str(caught.value)
