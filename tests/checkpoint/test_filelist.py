"""The list of files, and what stands beside packed components: rules on folders made by hand."""

import json

import pytest

from quantkit.checkpoint.directory import broken_pipeline
from quantkit.checkpoint.filelist import FILE_LIST, FileList, FileRecord, is_read, update_file_list


@pytest.mark.parametrize(("size", "sound"), [(9, False), (10, True), (11, False)])
def test_a_file_has_the_size_that_the_list_says(tmp_path, size, sound):
    (tmp_path / "a.json").write_bytes(bytes(size))
    lines = list(FileList(tmp_path, {"a.json": FileRecord(10, "0" * 64)}).broken())
    assert lines == [] if sound else [f"{size} bytes, {FILE_LIST} says 10" in lines[0]] == [True]


@pytest.mark.parametrize(
    ("file", "of_pipeline", "of_component"),
    [
        ("model_index.json", True, True),
        ("config.json", False, True),
        ("zzz.json", False, True),
        ("code.py", True, True),
        ("README.md", False, False),
        ("zzz.md", False, False),
        ("weights.safetensors", True, True),
        ("unet/config.json", True, True),
        ("unet/README.md", False, False),
        (".cache/config.json", False, False),
        ("unet/.hidden/code.py", False, False),
    ],
)
def test_what_a_loader_may_read(tmp_path, file, of_pipeline, of_component):
    path = type(tmp_path)(file)
    assert is_read(tmp_path, path) == of_component
    (tmp_path / "model_index.json").write_text("{}")
    assert is_read(tmp_path, path) == of_pipeline


def test_a_saved_component_corrects_its_part_of_the_list_alone(tmp_path):
    entry = {"size": 1, "sha256": "0" * 64}
    files = {"unet/old.json": entry, "vae/config.json": entry}
    about = {"schema": "quantkit.files", "schema_version": 1, "files": files}
    (tmp_path / FILE_LIST).write_text(json.dumps(about))
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "new.json").write_text("{}")
    update_file_list(tmp_path / "unet", [type(tmp_path)("new.json")], ())
    found = json.loads((tmp_path / FILE_LIST).read_text())["files"]
    assert set(found) == {"unet/new.json", "vae/config.json"}
    assert found["vae/config.json"] == entry
    assert found["unet/new.json"]["size"] == 2
    # Without a list of the pipeline, the component gets its own.
    (tmp_path / FILE_LIST).unlink()
    update_file_list(tmp_path / "unet", [type(tmp_path)("new.json")], ())
    assert set(json.loads((tmp_path / "unet" / FILE_LIST).read_text())["files"]) == {"new.json"}
    assert not (tmp_path / FILE_LIST).exists()


def test_every_config_of_a_component_is_judged(tmp_path):
    index = {"_class_name": "P", "vae": ["diffusers", "AutoencoderKL"], "none": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{")
    (tmp_path / "vae" / "scheduler_config.json").write_text('{"_class_name": "Other"}')
    first, second = broken_pipeline(tmp_path, {})
    assert "vae/config.json" in first
    assert "'Other', model_index.json says AutoencoderKL" in second


def test_a_directory_in_place_of_a_config_is_no_config(tmp_path):
    """It is not copied, so what is packed of it would have none."""
    index = {"_class_name": "P", "vae": ["diffusers", "AutoencoderKL"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "vae" / "config.json").mkdir(parents=True)
    (line,) = broken_pipeline(tmp_path, {})
    assert f"{tmp_path / 'vae'}: no config, as config.json" in line
