import math
import pickle

import numpy as np
import pytest

from fledge.decoding.params import SamplingParams
from fledge.errors import ConfigError


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), None)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (
        False,
        False,
        True,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 5.0),
        ("top_k", True),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: 1.0, "1": 2.0}),
        ("seed", 1.5),
        ("seed", 2**63),
        ("seed", False),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 12),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
    ],
)
def test_bad_value_is_refused_in_one_line_that_names_it(name, value):
    with pytest.raises(ConfigError) as error:
        SamplingParams.from_dict({name: value})
    message = str(error.value)
    assert message.startswith(name)
    assert "found" in message
    assert "allowed" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 3},
        {"top_p": 1},
        {"top_k": 1},
        {"min_p": 1.0},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": None, "min_tokens": 1000},
        {"min_tokens": 16},
    ],
)
def test_edges_of_the_ranges_are_allowed(values):
    params = SamplingParams.from_dict(values)
    assert all(getattr(params, name) == value for name, value in values.items())


def test_values_are_normalised():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=-1,
        logit_bias={"5": 1, 7: -2.5},
        seed=-1,
        stop="end",
        stop_token_ids=[np.int64(3), 4],
    )
    assert params.temperature == 0.5
    assert type(params.temperature) is float
    assert params.top_k == 0
    assert params.logit_bias == {5: 1.0, 7: -2.5}
    assert params.seed is None
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams.from_dict({"stop": None, "stop_token_ids": None, "logit_bias": {}}) == SamplingParams()


def test_unknown_name_gets_a_hint():
    with pytest.raises(ConfigError, match=r"'temprature'.*'temperature'"):
        SamplingParams.from_dict({"temprature": 1.0})
    with pytest.raises(ConfigError):
        SamplingParams.from_dict(["temperature"])


def test_greedy_threshold():
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_params_hash_and_pickle():
    params = SamplingParams(logit_bias={3: 1.0}, stop=["a"])
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1.0}, stop=["a"]))
    assert pickle.loads(pickle.dumps(params)) == params


def test_a_temperature_is_a_number_in_float32_too() -> None:
    assert math.isfinite(np.float32(SamplingParams(temperature=1e300).temperature))
