"""A config.json from a stranger: what is missing is named, what is hostile is refused within bounded time."""

import json
import time

import pytest

from kvledger.data import catalogue
from kvledger.errors import ConfigError, KvledgerError, UnsupportedModel
from kvledger.spec.config_fields import MAX_TEXT_BYTES, parse_config, read_config
from kvledger.spec.from_config import load_config, model_from_config

LLAMA = dict(catalogue.find("llama-3.1-8b").row.config)


def build(**changes):
    config = {k: v for k, v in {**LLAMA, **changes}.items() if v is not ...}
    return model_from_config(config, "m", "here/config.json")


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
              "max_position_embeddings"],
)  # fmt: skip
def test_a_missing_field_is_named_with_its_file(field):
    with pytest.raises(ConfigError, match=f"here/config.json: field '{field}' is missing"):
        build(**{field: ...})


def test_a_missing_field_in_a_section_is_named_with_its_path():
    inner = {k: v for k, v in catalogue.find("gemma-3-4b").row.config["text_config"].items() if k != "hidden_size"}
    with pytest.raises(ConfigError, match=r"field 'text_config\.hidden_size' is missing"):
        model_from_config({"model_type": "gemma3", "text_config": inner}, "g", "g")


def test_a_missing_family_and_an_unknown_one():
    with pytest.raises(ConfigError, match="'model_type' is missing"):
        build(model_type=...)
    with pytest.raises(UnsupportedModel, match=r"'kv_lora_rank' is of no usual decoder; nearest: .*qwen3"):
        build(model_type="qwen33", kv_lora_rank=512)
    with pytest.raises(UnsupportedModel, match="no 'intermediate_size'"):
        build(model_type="brandnew", intermediate_size=...)


def test_an_unknown_family_of_the_usual_plan_is_counted_and_marked():
    model = build(model_type="brandnew")
    assert model.num_params == 8_030_261_248
    assert "'brandnew' is not known here" in model.notes[0]
    assert "assumed" in model.notes[0]
    experts = build(model_type="brandnew", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=512)
    assert experts.layers[0].num_experts == 4
    slides = build(model_type="brandnew", sliding_window=4096)
    assert {x.cache.kind for x in slides.layers} == {"window"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -1}, "must be from 1"),
        ({"hidden_size": 0}, "must be from 1"),
        ({"hidden_size": "4096"}, "must be a whole number, is '4096'"),
        ({"hidden_size": 4096.5}, "must be a whole number"),
        ({"hidden_size": True}, "must be a whole number"),
        ({"hidden_size": [4096]}, "must be a whole number, is a list of 1"),
        ({"hidden_size": 1 << 60}, "must be from 1 to"),
        ({"hidden_size": 10**4000}, "an integer of 13288 bits"),
        ({"num_hidden_layers": 10**6}, "must be from 1 to 1024"),
        ({"num_key_value_heads": 5}, "does not divide the 32 attention heads"),
        ({"num_attention_heads": 33, "num_key_value_heads": 33}, "does not divide the hidden size"),
        ({"tie_word_embeddings": "no"}, "must be true or false"),
        ({"layer_types": ["full_attention"] * 3}, "has 3 entries for 32 layers"),
        ({"layer_types": ["odd_attention"] * 32}, "names 'odd_attention'"),
        ({"layer_types": list(range(32))}, "must hold texts only"),
        ({"layer_types": ["x"] * 5000}, "must be a list of at most 1024"),
        ({"layer_types": "full"}, "must be a list"),
        ({"rope_scaling": []}, "must be an object, is a list of 0"),
        ({"model_type": ["llama"]}, "must be a short text"),
    ],
)
def test_values_that_cannot_be_meant(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(**changes)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        '{"hidden_size": NaN}',
        '{"hidden_size": Infinity}',
        '{"hidden_size": ' + "9" * 100_000 + "}",
        "[1, 2]",
        "12",
        "",
        "{",
        '{"a": "\\ud800"',
        b"\xff\xfe\x00",
        b"GGUF\x03\x00\x00\x00",
        '{"a": "' + "x" * MAX_TEXT_BYTES + '"}',
    ],
)
def test_hostile_json_is_an_error_in_bounded_time(text):
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="evil"):
        parse_config(text, "evil")
    assert time.perf_counter() - start < 2.0


def test_sections_within_sections_end(tmp_path):
    config: dict = {"model_type": "x"}
    for _ in range(400):
        config = {"model_type": "x", "text_config": config}
    with pytest.raises(KvledgerError, match="nested 3 deep"):
        model_from_config(config, "deep", "deep")


def test_files_and_folders(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_config(tmp_path).name == tmp_path.name
    assert load_config(tmp_path / "config.json").num_params == 8_030_261_248
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_config(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)


ONE_PER_FAMILY = {row.config["model_type"]: row for row in catalogue.rows()}


@pytest.mark.parametrize("family", sorted(ONE_PER_FAMILY))
def test_any_field_of_any_family_may_be_damaged(family):
    """Every field in turn becomes nonsense: the answer is a model or an error for people, never a traceback."""
    row = ONE_PER_FAMILY[family]
    for path in _leaves(row.config):
        for nonsense in ("?", -1, 0, [], {}, 1 << 50, None, True, 0.5):
            message = _build_error(_replaced(row.config, path, nonsense))
            assert message is None or "damaged" in message, (path, nonsense, message)


def _build_error(config):
    try:
        model_from_config(config, "m", "damaged")
    except KvledgerError as error:
        return str(error)
    return None


def _leaves(config, path=()):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        yield (*path, key)


def _replaced(config, path, value):
    head, *rest = path
    return {**config, head: _replaced(config[head], rest, value) if rest else value}
