import pytest

from fledge.engine.config import EngineConfig, SpeculativeConfig
from fledge.errors import ConfigError


def test_vllms_own_keys_are_understood() -> None:
    config = SpeculativeConfig.from_json(
        '{"model": "d", "method": "eagle3", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1,'
        ' "quantization": null, "max_model_len": 100, "rejection_sample_method": "block",'
        ' "draft_sample_method": "probabilistic"}'
    )
    assert (config.model, config.method, config.num_speculative_tokens) == ("d", "eagle3", 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "d", "num_speculative_token": 3}, "Did you mean 'num_speculative_tokens'?"),
        ({"model": "d", "num_speculative_tokens": 0}, "give no drafter"),
        ({"model": "d", "num_speculative_tokens": 1000}, "1 to 16"),
        ({"model": "d", "num_speculative_tokens": True}, "1 to 16"),
        ({"model": "d", "num_speculative_tokens": None}, "1 to 16"),
        ({"model": "d", "tree_width": 2, "tree_budget": None}, "1 to 1024"),
        ({"model": "d", "method": "medusa"}, "'eagle' or 'eagle3'"),
        ({"model": "d", "draft_tensor_parallel_size": 4}, "vLLM"),
        ({"model": "d", "rejection_sample_method": "synthetic"}, "vLLM"),
        ({"model": "d", "quantization": "fp8"}, "vLLM"),
        ({"model": "d", "tree_width": 4, "draft_sample_method": "probabilistic"}, "trees are not sampled"),
        ({"model": "d", "num_speculative_tokens_per_batch_size": [[1, 2]]}, "first batch size"),
        ({"model": "d", "num_speculative_tokens_per_batch_size": 4}, "expected a list of rows"),
        ({"method": "eagle3"}, "'model' is missing"),
        ({"model": 7}, "'model' must name"),
        (["model"], "found list"),
    ],
)
def test_mistakes_get_one_clear_line(values: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_dict(values)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_json() -> None:
    with pytest.raises(ConfigError, match="not valid JSON"):
        SpeculativeConfig.from_json("{model: d}")


def test_the_depth_table_decides_for_the_batch_sizes_it_names() -> None:
    config = SpeculativeConfig(
        model="d", num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[[1, 4, 5], [64, 512, 0]]
    )
    assert [config.depth_at(size) for size in (1, 4, 5, 64)] == [5, 5, 3, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cudagraph_capture_sizes": [0, 4]},
            "cudagraph_capture_sizes: found [0, 4], allowed is a list of batch sizes",
        ),
        ({"cudagraph_capture_sizes": 4}, "cudagraph_capture_sizes: found 4"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization: found '0.9'"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization: found True"),
        ({"device": None}, "device: found None, allowed is auto, cpu or cuda"),
    ],
)
def test_engine_options_of_another_type_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert EngineConfig(cudagraph_capture_sizes=(1, 4), gpu_memory_utilization=1).cudagraph_capture_sizes == (1, 4)
