"""FORMAT.md rule by rule: a broken example of each, in the tables of these tests."""

import copy
import json
import re
from importlib.resources import files

import pytest

from quantkit.checkpoint.filelist import FILE_LIST, find_file_list
from quantkit.checkpoint.spec import parse_config
from quantkit.errors import CheckpointError
from tests.checkpoint.test_validate import CHEAP, DEEP
from tests.checkpoint.test_verify import CONSISTENT, DAMAGE

SCHEME = {
    "weight": "e4m3fn", "granularity": "channel", "sparsity": "2:4", "activation": "static",
    "buckets": [250.0, 500.0], "smooth": False, "layers": ["a", "b"],
}  # fmt: skip
WHOLE = {
    "quant_method": "quantkit", "format_version": 1, "quantkit_version": "0", "schemes": [SCHEME],
    "attention": {
        "exclude": ["*.x"], "min_keys": 512, "qk": "int8", "pv": "none",
        "static": [{"head_size": 64, "heads": 10, "modules": ["m", "n"]}],
        "formats": [{"qk": "e4m3fn", "modules": ["m"]}],
    },
}  # fmt: skip


def put(*path_and_value):
    """Return a change that puts a value at a path."""
    *path, key, value = path_and_value

    def change(config):
        for step in path:
            config = config[step]
        config[key] = value

    return change


def add(*path_and_value):
    *path, value = path_and_value

    def change(config):
        for step in path:
            config = config[step]
        config.append(value)

    return change


def scheme(**values):
    return lambda config: config["schemes"][0].update(values)


ATTENTION = ("attention",)
BLOCKS = {"granularity": "group:32", "sparsity": None, "activation": "none", "buckets": None}
INT8 = {"weight": "int8", "activation_format": "int8"}

#: What the text says of an entry -> (how it is broken, what is said)
ENTRIES = {
    "weight: of these formats": (scheme(weight="q5_0"), "'q5_0': unknown"),
    "int4: channel": (
        scheme(weight="int4", activation_format="int8", granularity="group:32"),
        "granularity group:32 of weight int4, expected channel",
    ),
    "q4_0: group:32": (
        scheme(**{**BLOCKS, "granularity": "channel"}, weight="q4_0"), "expected group:32"
    ),
    "q4_0: no sparsity": (scheme(**{**BLOCKS, "sparsity": "2:4"}, weight="q4_0"), "sparsity 2:4"),
    "q8_0: weights alone": (
        scheme(**{**BLOCKS, "activation": "token"}, weight="q8_0", activation_format="int8"),
        "expected null and none",
    ),
    "activation_format: int8": (scheme(**{**INT8, "activation_format": "int4"}), "expected int8"),
    "activation_format: beside an integer": (scheme(activation_format="int8"), "no such key"),
    "activation_format: not left out": (scheme(weight="int8"), "activation_format None"),
    "buckets: ascending": (scheme(buckets=[500.0, 250.0]), "expected ascending, distinct, finite"),
    "buckets: edges differ": (scheme(buckets=[250.0, 250.0]), "expected ascending, distinct"),
    "buckets: finite": (scheme(buckets=[250.0, float("inf")]), "finite timesteps"),
    "buckets: static": (scheme(activation="token"), "buckets with activation 'token'"),
    "layers: at least one": (scheme(layers=[]), "no layers"),
    "layers: paths": (scheme(layers=["a", ""]), "not a list of module paths"),
    "layers: each once": (scheme(layers=["a", "a"]), "'a' is listed 2 times"),
    "layers: in one scheme": (
        add("schemes", {**SCHEME, "smooth": True, "layers": ["b"]}), "'b' is listed 2 times"
    ),
    "attention: its keys": (put(*ATTENTION, "rows", 1), "unknown key 'rows'"),
    "qk: of these formats": (put(*ATTENTION, "qk", "int4"), "qk 'int4'"),
    "pv: none or left out": (put(*ATTENTION, "pv", "e4m3fn"), "expected none or no such key"),
    "min_keys: 1 or more": (put(*ATTENTION, "min_keys", 0), "expected 1 or more"),
    "exclude: globs": (put(*ATTENTION, "exclude", [1]), "expected a list of globs"),
    "static: not empty": (put(*ATTENTION, "static", []), "expected a list of heads"),
    "static: heads": (put(*ATTENTION, "static", 0, "heads", 0), "0 heads of 64, expected 1"),
    "static: each once": (put(*ATTENTION, "static", 0, "modules", ["m", "m"]), "each once"),
    "static: in one entry": (
        add(*ATTENTION, "static", {"head_size": 32, "heads": 1, "modules": ["n"]}), "each once"
    ),
    "formats: each once": (put(*ATTENTION, "formats", 0, "modules", ["m", "m"]), "each once"),
    "formats: in one entry": (
        add(*ATTENTION, "formats", {"qk": "int8", "modules": ["m"]}), "each once"
    ),
    "formats: known": (put(*ATTENTION, "formats", 0, "qk", "int4"), "qk 'int4'"),
}  # fmt: skip


def test_the_whole_of_it_is_read():
    config = parse_config(WHOLE)
    assert list(config.layers) == ["a", "b"]
    assert parse_config(config.to_json()) == config


@pytest.mark.parametrize("name", ENTRIES)
def test_a_broken_entry_is_refused(name):
    change, match = ENTRIES[name]
    config = copy.deepcopy(WHOLE)
    change(config)
    with pytest.raises(CheckpointError, match=match):
        parse_config(config)


ENTRY = {"size": 1, "sha256": "0" * 64}
#: What the text says of the list of files -> its entries
LISTS = {
    "inside": {"../x": ENTRY},
    "inside, below": {"a/../../x": ENTRY},
    "relative": {"/x": ENTRY},
    "a name": {"": ENTRY},
    "a dot": {".": ENTRY},
    "no null": {"a\0": ENTRY},
    "each once": {"a": ENTRY, "./a": ENTRY},
    "each once, slashes": {"a//b": ENTRY},
    "each once, folder": {"a/": ENTRY},
    "not itself": {FILE_LIST: ENTRY},
    "not a component's": {f"unet/{FILE_LIST}": ENTRY},
    "not the marker": {".quantkit": ENTRY},
    "hex": {"a": {"size": 1, "sha256": "G" * 64}},
    "whole digest": {"a": {"size": 1, "sha256": "0" * 63}},
    "one digest": {"a": {**ENTRY, "header_sha256": "0" * 64}},
    "a digest": {"a": {"size": 1}},
    "a size": {"a": {"size": -1, "sha256": "0" * 64}},
    "no more": {"a": {**ENTRY, "mode": 1}},
}


@pytest.mark.parametrize("name", LISTS)
def test_a_broken_list_is_refused(name, tmp_path):
    about = {"schema": "quantkit.files", "schema_version": 1, "files": {"ok": ENTRY}}
    (tmp_path / FILE_LIST).write_text(json.dumps(about))
    assert set(find_file_list(tmp_path).files) == {"ok"}
    (tmp_path / FILE_LIST).write_text(json.dumps({**about, "files": LISTS[name]}))
    with pytest.raises(CheckpointError, match=r"files\.json: damaged"):
        find_file_list(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [{"schema": "quantkit.x"}, *({"schema_version": n} for n in (0, 2, 1.5, None))],
    ids=str,
)
def test_a_list_of_another_schema_is_refused(changed, tmp_path):
    about = {"schema": "quantkit.files", "schema_version": 1, "files": {"ok": ENTRY}}
    (tmp_path / FILE_LIST).write_text(json.dumps(about | changed))
    with pytest.raises(CheckpointError, match=r"found .* expected 'quantkit\.files' 1"):
        find_file_list(tmp_path)


#: Numbered rule -> examples, by their names in the tables
RULES = {
    1: ["config-newer", "config-unknown-key", "config-missing-key", "metadata-newer",
        "metadata-unknown-key", "metadata-missing-key"],
    2: ["cut-vae", "no-weights"],
    3: ["checksum-missing", "checksum-extra"],
    4: ["record-missing", "tensor-missing-weight", "tensor-shape", "tensor-dtype", "extra-part"],
    5: ["orphan-part", "orphan-fp8", "record-without-scheme"],
    6: ["record-does-not-divide"],
    7: ["scale-zero", "scale-negative", "scale-nan", "scale-infinite"],
    8: ["checksum"],
    9: ["code-nan"],
    10: ["nibble"],
    11: ["zero-group-scale", "sparse-zero-group"],
    12: ["no-vocabulary", "same-size", "extra-weights", "extra-config"],
    13: ["index-without-unet", "index-of-more", "no-folder", "unknown-class"],
    14: ["nan-bias", "inf-bias", "nan-norm", "nan-vae"],
}  # fmt: skip


def test_every_rule_has_its_examples():
    text = files("quantkit.checkpoint").joinpath("FORMAT.md").read_text(encoding="utf-8")
    rules = text[text.index("## Rules") : text.index("## How a weight is packed")]
    assert {int(number) for number in re.findall(r"^(\d+)\. ", rules, re.MULTILINE)} == set(RULES)
    known = CHEAP.keys() | DEEP.keys() | DAMAGE.keys() | CONSISTENT.keys()
    assert not [name for names in RULES.values() for name in names if name not in known]
