"""Shapes that kernels are measured on: the table, and files of a user's own."""

import pytest

from quantkit.bench.kernels.kernel_shapes import SHAPES, AttentionShape, Shape, find_shapes
from quantkit.bench.kernels.operations import OPERATIONS, cases
from quantkit.errors import ArtefactError


def test_all_has_the_ten_shapes_of_sdxl_flux_and_beyond():
    found = find_shapes("all")
    labels = [shape.label for shape in found if isinstance(shape, Shape)]
    assert len({shape.label for shape in found}) == len(found)
    assert len(labels) == 10
    assert {"8192x640x640", "4608x3072x15360", "8192x8192x8192", "16x1280x1280"} <= set(labels)
    assert find_shapes("flux") == SHAPES["flux"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "[[1, 2, 32], [4, 5, 64]]"),
        ("a.json", '[{"m": 1, "n": 2, "k": 32}, {"k": 64, "n": 5, "m": 4}]'),
        ("a.csv", "m,n,k\n1,2,32\n\n4, 5, 64\n"),
        ("a.csv", "1,2,32\n4,5,64"),
    ],
)
def test_shapes_come_from_files(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert find_shapes(str(tmp_path / name)) == (Shape(1, 2, 32), Shape(4, 5, 64))


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.json", "[[1, 2", "not a table of shapes"),
        ("a.json", "[]", "no shapes"),
        ("a.json", '{"m": 1}', "no shapes"),
        ("a.json", "[[1, 2]]", "shape 1: found .* expected whole numbers m, n, k or batch, heads"),
        ("a.json", "[[1, 2, 32], [1, 2, 3.5]]", "shape 2: found"),
        ("a.json", '[{"m": 1, "n": 2}]', "shape 1: found"),
        ("a.json", "[7]", "shape 1: found"),
        ("a.csv", "m,n,k\n1,x,3\n", "shape 1: found"),
        ("a.csv", "m,n,k\n1,0,3\n", "shape 1: 1x0x3, expected each to be 1 to 2147483647"),
        ("a.csv", "m,n,k\n", "no shapes"),
    ],
)
def test_damaged_shapes_are_named(tmp_path, name, text, match):
    (tmp_path / name).write_text(text)
    with pytest.raises(ArtefactError, match=match):
        find_shapes(str(tmp_path / name))


@pytest.mark.parametrize("text", ["sd14", "absent.json", "absent.csv"])
def test_unknown_shapes_are_refused(text):
    with pytest.raises(ArtefactError, match=text):
        find_shapes(text)


def test_the_shapes_that_the_bars_are_about_are_there():
    labels = {s.label for s in find_shapes("all") if isinstance(s, AttentionShape)}
    assert {
        "2x10x4096x4096x64", "2x20x1024x1024x64", "1x24x4608x4608x128", "2x8x4096x4096x40",
        "2x10x4096x77x64",
    } <= labels  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "[[1, 2, 3, 4, 8], [16, 32, 64]]"),
        (
            "a.json",
            '[{"batch": 1, "heads": 2, "queries": 3, "keys": 4, "head_size": 8}, [16,32,64]]',
        ),
        ("a.csv", "batch,heads,queries,keys,head_size\n1,2,3,4,8\nm,n,k\n16,32,64\n"),
    ],
)
def test_a_file_may_have_both_kinds(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    found = find_shapes(str(tmp_path / name))
    assert found == (AttentionShape(1, 2, 3, 4, 8), Shape(16, 32, 64))
    asked = cases(list(OPERATIONS.values()), found)
    by_kind = {op.name: shape for op, shape in asked}
    assert by_kind["attention_fp8"] == found[0]
    assert by_kind["gemm_fp8"] == found[1]
    assert len(asked) == len(OPERATIONS)


@pytest.mark.parametrize("row", ["[1, 2, 3, 4]", "[1, 2, 3, 4, 0]", '{"batch": 1, "heads": 2}'])
def test_damaged_rows_of_attention_are_named(tmp_path, row):
    (tmp_path / "a.json").write_text(f"[{row}]")
    with pytest.raises(ArtefactError, match="shape 1: "):
        find_shapes(str(tmp_path / "a.json"))
