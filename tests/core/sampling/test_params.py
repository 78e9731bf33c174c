from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import math
from typing import Any, get_type_hints

import numpy as np
import pytest

from weft._core.sampling.filters import CUTS
from weft._core.sampling.params import (
    DRAW_RULE,
    NAMES,
    PARAMETERS,
    SERVER_SAMPLING,
    BranchOptions,
    SamplingParams,
)
from weft.constraints import JsonSchema
from weft.errors import ConfigError


def test_default_params_are_neutral() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature) == (1, 256, 1.0)
    assert (params.top_p, params.top_k, params.min_p, params.typical_p) == (1.0, 0, 0.0, 1.0)
    assert (params.logit_bias, params.stop, params.seed, params.constraint) == ((), (), None, None)
    assert repr(params) == "SamplingParams()"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, bad) for name in ("n", "max_tokens") for bad in (0, -1, 1.5, True, "2", None)],
        *[("temperature", bad) for bad in (-0.1, math.nan, math.inf, True, "1", None)],
        *[(name, bad) for name in ("top_p", "typical_p") for bad in (0, -1, 1.01, math.nan, None)],
        *[("min_p", bad) for bad in (-0.1, 1.1, math.nan, None)],
        *[(name, 10**23) for name in ("n", "top_k")],
        *[("top_k", bad) for bad in (-1, 2.5, False, None)],
        *[("repetition_penalty", bad) for bad in (0, -1, math.inf, math.nan)],
        *[("presence_penalty", bad) for bad in (math.inf, math.nan, "x")],
        *[("frequency_penalty", bad) for bad in (-math.inf, math.nan)],
        *[("logit_bias", bad) for bad in ({-1: 1.0}, {1: math.nan}, {"a": 1.0}, {1: "x"}, 3)],
        *[("stop", bad) for bad in ("", ["a", ""], [1], 5)],
        *[("seed", bad) for bad in (-1, 2**64, 1.0, True)],
        *[("temperature_first", bad) for bad in (1, None, "yes")],
    ],
)
def test_value_out_of_range_raises_and_names_the_parameter(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "allowed" in str(caught.value)


def test_stop_string_of_half_a_character_raises() -> None:
    with pytest.raises(ConfigError, match="stop has half a character at 1"):
        SamplingParams(stop="a\ud800")


def test_numpy_numbers_become_plain_numbers() -> None:
    params = SamplingParams(n=np.int64(3), temperature=np.float32(0.5), seed=np.uint64(2**63))
    assert type(params.n) is int
    assert type(params.temperature) is float
    assert params.seed == 2**63


def test_constraint_is_stored_as_a_value() -> None:
    params = SamplingParams(constraint={"type": "object"})
    assert params.constraint == JsonSchema({"type": "object"})
    assert params == SamplingParams(constraint=JsonSchema('{"type": "object"}'))
    assert hash(params) == hash(SamplingParams(constraint=JsonSchema('{"type": "object"}')))
    with pytest.raises(ConfigError, match="constraint is 3"):
        SamplingParams(constraint=3)


def test_equal_params_written_differently_are_equal_and_hash_alike() -> None:
    one = SamplingParams(stop="a", logit_bias={5: 1, 2: -math.inf})
    two = SamplingParams(stop=["a", "a"], logit_bias={2: -math.inf, 5: 1.0})
    assert one == two
    assert hash(one) == hash(two)
    assert one.stop == ("a",)
    assert one.logit_bias == ((2, -math.inf), (5, 1.0))
    assert dataclasses.replace(one, n=4).logit_bias == one.logit_bias


@pytest.mark.parametrize(
    ("foreign", "right"),
    [
        ("max_new_tokens", "Here it is max_tokens"),
        ("num_return_sequences", "Here it is n"),
        ("temp", "Here it is temperature"),
        ("stop_strings", "Here it is stop"),
        ("do_sample", "0 is greedy"),
        ("logprobs", "always recorded"),
        ("temprature", "Did you mean temperature?"),
        ("mirostat_tau", "a draw depends on stream, position and logits only"),
        ("nsigma", "Here it is top_n_sigma"),
        ("nonsense", "Allowed are: n, max_tokens"),
    ],
)
def test_keyword_of_another_library_raises_and_names_the_right_one(
    foreign: str, right: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams.resolve({foreign: 1})
    message, hint = str(caught.value), caught.value.hint
    assert right in hint
    assert message.endswith(hint) or hint == "Did you mean temperature?"
    assert repr(foreign) not in hint
    assert f"{foreign}?" not in hint


def test_given_values_replace_defaults_and_other_defaults_stay() -> None:
    defaults = SamplingParams(temperature=0.5, stop="x", logit_bias={1: 2.0})
    resolved = SamplingParams.resolve({"temperature": 0, "n": 2}, defaults)
    assert resolved == SamplingParams(n=2, temperature=0, stop="x", logit_bias={1: 2.0})
    assert SamplingParams.resolve({"stop": None}, defaults).stop == ()
    assert SamplingParams.resolve({}) == SamplingParams()


def test_params_after_a_json_round_trip_are_equal() -> None:
    params = SamplingParams(
        n=3, top_k=5, stop=["\n", "é"], seed=2**64 - 1, logit_bias={7: -math.inf, 9: 0.1}
    )
    text = json.dumps(params.to_dict(), allow_nan=False)
    assert SamplingParams.from_dict(json.loads(text)) == params
    assert json.loads(text)["draw_rule"] == DRAW_RULE == params.draw_rule
    # Version 1 saved no draw rule; a second save records draw_rule=1.
    first = SamplingParams.from_dict({"seed": 3})
    assert first.draw_rule == 1
    assert SamplingParams.from_dict(first.to_dict()) == first != SamplingParams(seed=3)
    assert SamplingParams.resolve({}, first) == SamplingParams(seed=3)
    with pytest.raises(ConfigError, match="logit_bias"):
        SamplingParams.from_dict({"logit_bias": [1]})
    with pytest.raises(ConfigError, match="max_tokens"):
        SamplingParams.from_dict({"max_new_tokens": 3})


def test_repr_shows_fields_that_differ_from_neutral() -> None:
    assert repr(SamplingParams(n=2, stop="a")) == "SamplingParams(n=2, stop=('a',))"


def test_generation_config_without_do_sample_is_ignored() -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_length": 20, "min_p": None}
    assert SamplingParams.from_generation_config(config) == SamplingParams()
    taken = SamplingParams.from_generation_config({**config, "do_sample": True})
    assert taken == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)


def test_repetition_penalty_without_do_sample_is_used() -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.2}
    for given in (config, {**config, "do_sample": False}):
        assert SamplingParams.from_generation_config(given) == SamplingParams(
            repetition_penalty=1.2
        )


def test_unsupported_rules_of_generation_config_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    followed = {"temperature": 0.7, "top_k": 7, "repetition_penalty": 1.1, "max_new_tokens": 5}
    neutral = {"no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": [], "min_length": 0}
    also_neutral = {"epsilon_cutoff": 0.0, "bad_words_ids": None, "guidance_scale": 1.0}
    rules = {
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [1, 2],
        "begin_suppress_tokens": [220],
        "bad_words_ids": [[5]],
        "exponential_decay_length_penalty": [5, 1.1],
        "min_new_tokens": 3,
    }
    cuts = {"epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4}

    def warnings_of(config: dict[str, object]) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="weft"):
            SamplingParams.from_generation_config(config)
        return [record.getMessage() for record in caplog.records]

    plain = {**followed, **neutral, **also_neutral}
    assert warnings_of(plain) == warnings_of({**plain, "do_sample": True}) == []
    (warning,) = warnings_of({**plain, **rules, **cuts, "do_sample": True})
    assert all(name in warning for name in [*rules, *cuts])
    assert not any(name in warning for name in [*followed, "num_beams", "guidance_scale"])
    (warning,) = warnings_of({**plain, **rules, **cuts})  # greedy decoding has no filters
    assert all(name in warning for name in rules)
    assert not any(name in warning for name in cuts)


def test_invalid_value_in_generation_config_is_dropped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="weft"):
        taken = SamplingParams.from_generation_config(
            {"do_sample": True, "top_p": 0, "temperature": 0.7}
        )
    assert taken == SamplingParams(temperature=0.7)
    assert "top_p" in caplog.text


def test_options_name_exactly_the_fields() -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    names.remove("draw_rule")  # recorded, not chosen
    assert list(inspect.signature(SamplingParams).parameters) == names
    names.remove("unset")  # of a model's defaults, not of calls
    assert {"n", *get_type_hints(BranchOptions)} == set(names)


def test_given_values_are_not_unset() -> None:
    server = SamplingParams(unset=SERVER_SAMPLING)
    assert server.summary() == "the server's sampling"
    assert SamplingParams.from_dict(server.to_dict()) == server != SamplingParams()
    assert dataclasses.replace(server, seed=1).unset == SERVER_SAMPLING
    assert "temperature" not in dataclasses.replace(server, temperature=0.5).unset
    given = SamplingParams.resolve({"temperature": 1.0, "top_k": 5}, server)
    assert not {"temperature", "top_k"} & set(given.unset)
    assert given.summary() == "temperature 1, top-k 5, the server's sampling"
    assert SamplingParams.resolve({"temperature": 0}, server).summary() == "greedy"


def test_every_keyword_has_a_table_row_and_every_filter_a_function() -> None:
    assert sorted(PARAMETERS) == sorted(NAMES)
    in_order = [name for name, row in PARAMETERS.items() if row.is_filter]
    assert list(CUTS) == in_order, "a filter's row and its line in CUTS stand in the same order"
    for name, row in PARAMETERS.items():
        assert name in (SamplingParams.__doc__ or "")
        assert row.flag is None or f"--{name.replace('_', '-')}" in row.flag.names


def test_foreign_keywords_are_unique_and_not_our_own() -> None:
    foreign = [name for row in PARAMETERS.values() for name in (*row.aliases, *row.near_aliases)]
    assert len(set(foreign)) == len(foreign)
    assert not set(foreign) & set(NAMES)
