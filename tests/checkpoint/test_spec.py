"""The tensors of a packed layer, and schemes as config.json has them."""

import json

import pytest

from quantkit.checkpoint.schemes import parse_scheme
from quantkit.checkpoint.spec import (
    Kind,
    TensorSpec,
    layer_tensors,
    make_config,
    parse_config,
)
from quantkit.errors import CheckpointError
from quantkit.numerics.formats import E4M3FN, E5M2
from quantkit.numerics.granularity import PerChannel, PerGroup, PerTensor
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme

pytestmark = pytest.mark.usefixtures("any_model")


DENSE = Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)

SPARSE = Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, Activation.TOKEN)


@pytest.mark.parametrize(
    ("scheme", "shape", "wanted"),
    [
        (DENSE, (32, 64), {"weight": ("F8_E4M3", (32, 64)), "weight_scale": ("F32", (32,))}),
        (
            DENSE,
            (32, 16, 3, 1),
            {"weight": ("F8_E4M3", (32, 3, 1, 16)), "weight_scale": ("F32", (32,))},
        ),
        (
            Scheme(E5M2, PerTensor(), TWO_OF_FOUR, Activation.STATIC),
            (32, 16, 3, 3),
            {
                "weight": ("F8_E5M2", (32, 72)),
                "weight_meta": ("U8", (32, 18)),
                "weight_scale": ("F32", ()),
                "input_scale": ("F32", ()),
            },
        ),
        (
            Scheme(E4M3FN, PerGroup(8), None, Activation.STATIC, (250.0, 500.0), smooth=True),
            (32, 16, 3, 3),
            {
                "weight": ("F8_E4M3", (32, 3, 3, 16)),
                "weight_scale": ("F32", (32, 18)),
                "input_scale": ("F32", (3,)),
                "input_smooth": ("F32", (16,)),
            },
        ),
    ],
    ids=["linear", "conv", "sparse-static", "group-buckets-smooth"],
)
def test_layer_tensors_are_those_of_the_table(scheme, shape, wanted):
    kind: Kind = "conv2d" if len(shape) == 4 else "linear"
    specs = layer_tensors("a.b", scheme, kind, shape, bias_dtype="BF16")
    wanted = {**wanted, "bias": ("BF16", (shape[0],))}
    assert {s.name: (s.dtype, s.shape) for s in specs} == {
        f"a.b.{part}": value for part, value in wanted.items()
    }


@pytest.mark.parametrize(
    ("scheme", "kind", "shape", "match"),
    [
        (SPARSE, "conv2d", (8, 6, 4, 4), "l: C 6 is not a multiple of 4"),
        (SPARSE, "linear", (8, 12), "l: K 12 is not a multiple of 8"),
        (SPARSE, "linear", (8, 20), "l: K 20 is not a multiple of 8"),
        (Scheme(E4M3FN, PerGroup(24), None, Activation.NONE), "conv2d", (8, 16, 3, 3), "size 24"),
        (DENSE, "conv2d", (8, 16), "not that of a conv2d weight"),
        (DENSE, "linear", (0, 16), "not that of a linear weight"),
    ],
)
def test_layer_tensors_refuse_shapes_that_do_not_divide(scheme, kind, shape, match):
    with pytest.raises(CheckpointError, match=match):
        layer_tensors("l", scheme, kind, shape, bias_dtype=None)


BLOCKS = {
    "weight": "q4_0", "granularity": "group:32", "sparsity": None, "activation": "none",
    "buckets": None, "smooth": False, "layers": ["a"],
}  # fmt: skip


@pytest.mark.parametrize("weight", ["q4_0", "q8_0"])
def test_blocks_are_weights_alone(weight):
    item = {**BLOCKS, "weight": weight}
    scheme, _ = parse_scheme(item, "scheme 0")
    scales = layer_tensors("a", scheme, "linear", (8, 64), bias_dtype=None)[1]
    assert scales == TensorSpec("a.weight_scale", "F16", (8, 2))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"granularity": "channel"}, "granularity channel of weight q4_0, expected group:32"),
        ({"granularity": "group:64"}, "expected group:32"),
        ({"sparsity": "2:4"}, "sparsity 2:4 and activation none of weight q4_0"),
        ({"activation": "token", "activation_format": "int8"}, "expected null and none"),
    ],
)
def test_blocks_with_anything_else_are_refused(change, match):
    with pytest.raises(CheckpointError, match=match):
        parse_scheme({**BLOCKS, **change}, "scheme 0")


def test_config_round_trips_and_gathers_equal_schemes():
    buckets = Scheme(E5M2, PerGroup(32), None, Activation.STATIC, (1.0, 2.5), smooth=True)
    config = make_config({"b": SPARSE, "a": DENSE, "c": SPARSE, "d": buckets})
    again = parse_config(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert [entry.layers for entry in config.schemes] == [("a",), ("b", "c"), ("d",)]
    assert again.scheme_of("c") == SPARSE
    assert again.scheme_of("e") is None
