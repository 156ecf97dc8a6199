"""No model is larger than its files: what is counted while it is built, and what before."""

import json
import time
from threading import Thread

import pytest
from torch import nn

from quantkit.errors import CheckpointError
from quantkit.models.building import read_skeleton
from quantkit.models.sizes import at_most, most_modules, oversized, tensors_below
from quantkit.models.skeleton import on_meta
from tests.support.headers import GOLDEN, golden_keys


def linears(count):
    return [nn.Linear(2, 2, bias=False) for _ in range(count)]


@pytest.mark.parametrize("count", [3, 4])
def test_modules_and_parameters_are_counted_apart(count):
    with at_most(count):
        nn.ModuleList(linears(count))
    for build in (
        lambda: nn.Sequential(*(nn.ReLU() for _ in range(count + 1))),
        # A list of them is no module yet.
        lambda: linears(count + 1),
    ):
        with pytest.raises(ValueError, match=f"more than {count} "), at_most(count):
            build()
    # The limit went with the body.
    nn.ModuleList(linears(count + 1))


def test_other_threads_build_what_they_like():
    thread = Thread(target=linears, args=(50,))
    with at_most(1):
        thread.start()
        thread.join()
        linears(1)


def test_parameters_take_no_memory():
    with on_meta(2):
        assert nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_layers": 1006}, ""),
        ({"num_layers": 1007}, "num_layers is 1,?007"),
        ({"layers_per_block": [2, 10**9]}, "layers_per_block is 1000000000, but its files hold 3"),
        ({"transformer_layers_per_block": 1e8}, "transformer_layers_per_block is 100000000.0"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is"),
        ({"parts": [{"depth": 2000}]}, "depth is 2000"),
        ({"block_out_channels": [32] * 3000}, "block_out_channels has 3,000 entries"),
        ({"vocab_size": 10**6, "sample_size": 4096, "num_layers": None, "depth": "x"}, ""),
        ({"layers": True}, ""),
    ],
    ids=str,
)
def test_a_config_repeats_nothing_more_often_than_there_are_tensors(config, found):
    import re

    problem = oversized(config, 3)
    assert bool(problem) == bool(found)
    assert re.search(found, problem)


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("", {"_class_name": "UNet2DConditionModel", "layers_per_block": 10**9}),
        ("", {"_class_name": "UNet2DConditionModel", "layers_per_block": 1000}),
        ("", {"_class_name": "UNet2DConditionModel", "transformer_layers_per_block": 10**8}),
        ("", {"_class_name": "UNet2DConditionModel", "block_out_channels": [32] * 900,
              "down_block_types": ["DownBlock2D"] * 900, "up_block_types": ["UpBlock2D"] * 900}),
        ("CLIPTextModel", {"num_hidden_layers": 10**8}),
        ("T5EncoderModel", {"num_layers": 1001, "d_model": 8, "d_ff": 8, "d_kv": 8}),
        ("Qwen2ForCausalLM", {"num_hidden_layers": 10**10}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_hostile_config_ends_at_once(class_name, config, tmp_path):
    import diffusers  # noqa: F401  built in this process
    import transformers  # noqa: F401

    (tmp_path / "config.json").write_text(json.dumps(config))
    before = time.process_time()
    with pytest.raises(CheckpointError, match=r"config\.json: .*its files (hold|have no tensors)"):
        read_skeleton(tmp_path / "config.json", class_name, ["a", "b"])
    assert time.process_time() - before < 10


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("keys_*.json.gz")), ids=lambda p: p.name[5:-8])
def test_published_models_are_not_too_large(path):
    keys = golden_keys(path.name.split(".")[0].removeprefix("keys_"))
    assert oversized(keys["config"], len(keys["tensors"])) == ""


def test_tensors_are_counted_in_all_files(pipeline_dir, tmp_path):
    from safetensors import safe_open

    files = list(pipeline_dir.rglob("*.safetensors"))
    count = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            count += len(opened.keys())
    assert tensors_below(pipeline_dir) == count > 0
    (tmp_path / "x.safetensors").write_bytes(b"garbage!")
    assert tensors_below(tmp_path) == 0
    assert most_modules(0) == 1000
