"""All that is written stays as it is, to the byte; all that is compiled, to the instruction.

``python -m tests.golden`` writes and compares whole tables; here is what takes seconds.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from quantkit.recipe.load import recipe_names
from tests.golden import artefacts, digests, kernels
from tests.golden.made import DENOISERS
from tests.golden.table import differences
from tests.support.kernel_cases import need

#: Variants that are compiled of each target.
SAMPLED = 2
#: Both read the fixture, which one worker of several is to make.
TOGETHER = pytest.mark.xdist_group("golden")


@pytest.fixture(scope="module")
def found():
    return artefacts.run(quick=True)


def expected_of(found, *, sums):
    rows = artefacts.read().rows
    return {
        name: rows.get(name, "no row")
        for name in found
        if artefacts.depends_on_libraries(name) == sums
    }


def changed(found, *, sums):
    expected = expected_of(found, sums=sums)
    assert expected
    return differences(expected, {name: found[name] for name in expected}, artefacts.RENEW)


@TOGETHER
@pytest.mark.slow
def test_what_is_written_stays_as_it_is(found):
    said = changed(found, sums=False)
    assert not said, said


@TOGETHER
@pytest.mark.slow
def test_what_sums_of_floats_decide_stays_as_it_is(found):
    here, then = artefacts.made_with(), artefacts.read().made_with
    if here != then:
        pytest.skip(f"the table was made with {then}, here is {here}")
    said = changed(found, sums=True)
    assert not said, said


def test_the_table_has_a_row_for_each_bundled_recipe():
    """One that comes without a row is not held to anything."""
    packed = {name.split("/", 1)[1] for name in artefacts.read().rows if name.startswith("packed/")}
    missing = [
        f"{model}/{generic}"
        for model in DENOISERS
        for generic in recipe_names()
        if artefacts.recipe_for(model, generic) and f"{model}/{generic}" not in packed
    ]
    assert not missing, f"no rows of {', '.join(missing)}: {artefacts.RENEW}"


@pytest.mark.parametrize("target", kernels.TARGETS)
def test_instructions_stay_as_they_are(target):
    table = kernels.read(target)
    compiler = need(lambda: kernels.compiler_of(target))
    if table.made_with != {"compiler": compiler}:
        pytest.skip(f"the table was made with {table.made_with}, here is {compiler}")
    said = kernels.changed(target, sorted(table.rows)[:: -(-len(table.rows) // SAMPLED)])
    assert not said, said


def stored(path, value=1.0, shape=(2, 3), **said):
    """Return the digest of a file with one tensor."""
    tensors = {"a": torch.full(shape, value)}
    save_file(tensors, path / "file", metadata={"quantkit": json.dumps({"layers": {}, **said})})
    return digests.of_files(path / "file")


def test_versions_and_recipes_are_no_part_of_a_digest(tmp_path):
    digest = stored(tmp_path, format_version=7, recipe={"name": "a"})
    assert digest == stored(tmp_path, format_version=1, recipe={"name": "b"})


@pytest.mark.parametrize(
    "changes", [{"value": 1.0000001}, {"shape": (3, 2)}, {"layers": {"a": {"shape": [2, 3]}}}]
)
def test_bytes_shapes_and_records_are_part_of_a_digest(tmp_path, changes):
    assert stored(tmp_path) != stored(tmp_path, **changes)


def test_every_row_that_changed_is_told_and_how_to_renew_it():
    said = differences({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0", "d": "4"}, "renew it")
    assert said == (
        "3 of 4 rows changed:\n  b: expected 2, found 0\n  c: expected 3, found none\n"
        "  d: expected no row, found 4\nif they had to change: renew it"
    )
    assert not differences({"a": "1"}, {"a": "1"}, "renew it")
