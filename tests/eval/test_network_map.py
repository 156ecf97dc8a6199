"""The map of the network: blocks, lengths, colours and marks."""

from dataclasses import replace

import pytest
from quantkit.eval.pages.network_map import block_of, map_network, worst_layers

from tests.support.reports import layer


def row(name, error, *, size=100, words="int8 per channel, input per token"):
    return replace(
        layer(0), name=name, output_error=error, weight_error=error and 2 * error,
        bytes_after=size, format=words,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("down_blocks.0.resnets.1.conv1", "unet.down_blocks.0"),
        ("transformer_blocks.12.attn.to_q", "unet.transformer_blocks.12"),
        ("mid_block.attentions.0.to_q", "unet.mid_block.attentions.0"),
        ("time_embedding.linear_1", "unet.time_embedding"),
        ("conv_in", "unet.conv_in"),
    ],
)
def test_blocks_end_at_the_first_number(name, block):
    assert block_of(replace(layer(0), name=name)) == block


def test_blocks_stand_in_the_order_of_the_model_not_of_the_alphabet():
    names = ("conv_in", "time_embedding.linear_1", "down_blocks.0.x", "down_blocks.2.x",
             "down_blocks.10.x", "mid_block.resnets.0.x", "up_blocks.0.x", "conv_out",
             )  # fmt: skip
    found = map_network([row(name, 0.1) for name in sorted(names)])
    assert [s.words.partition(":")[0] for b in found.blocks for s in b.segments] == list(names)
    flux = ("x_embedder", "transformer_blocks.1.ff", "single_transformer_blocks.0.ff", "proj_out")
    found = map_network([row(name, 0.1) for name in sorted(flux)])
    assert [s.words.partition(":")[0] for b in found.blocks for s in b.segments] == list(flux)
    # A number says which row of the report's table it is.
    assert [s.index for b in found.blocks for s in b.segments] == [3, 2, 1, 0]


def test_length_is_bytes_and_colour_is_error():
    found = map_network([
        row("a.0.x", 0.01, size=300), row("a.0.y", 0.1, size=100),
        row("b.0.x", 1.0, size=100, words="int4 per group of 32, 2:4"),
        row("proj_out", None, size=100, words="F16, not packed"),
    ])  # fmt: skip
    assert [block.name for block in found.blocks] == ["unet.a.0", "unet.b.0", "unet.proj_out"]
    segments = [segment for block in found.blocks for segment in block.segments]
    assert [s.width for s in segments] == [75.0, 25.0, 25.0, 25.0]
    assert [s.heat for s in segments] == [0, 50, 100, None]
    assert [s.mark for s in segments] == ["I8", "I8", "I4", "16"]
    assert [s.sparse for s in segments] == [False, False, True, False]
    assert (found.error, found.span, found.sparse) == ("output error", (0.01, 1.0), True)
    assert found.marks == (("16", "not packed"), ("I4", "int4"), ("I8", "int8"))


def test_without_outputs_the_weights_decide():
    rows = [replace(row(f"a.{i}", 0.1), output_error=None, weight_error=e) for i, e in
            enumerate((0.1, None, 0.3))]  # fmt: skip
    assert map_network(rows).error == "weight error"
    assert [index for index, _ in worst_layers(rows)] == [2, 0]


@pytest.mark.parametrize("errors", [(None,), (0.0, 0.0), (0.1,), (0.1, 0.1), ()])
def test_errors_of_one_value_or_none_have_a_map(errors):
    rows = [row(f"a.{i}", error) for i, error in enumerate(errors)]
    segments = [s for block in map_network(rows).blocks for s in block.segments]
    assert all(s.heat is None or 0 <= s.heat <= 100 for s in segments)
    assert len(worst_layers(rows)) == sum(error is not None for error in errors)
