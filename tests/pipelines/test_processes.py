"""Calibrating in several processes, and going on with a calibration that was killed."""

import os
import pickle
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import SafetensorError
from safetensors.torch import save_file

from quantkit.calibration.observing import calibration_resume, observed_pipeline
from quantkit.calibration.statistics.layer_statistics import LayerStatistics, load_calibration
from quantkit.cli.calibrate_command import calibrate as calibrate_command
from quantkit.errors import ArtefactError, InputError, OutputError
from quantkit.pipelines import running
from quantkit.pipelines.processes import ALONE, Processes, _packed, joined
from quantkit.storage import artefact

PROMPTS = ("a red circle", "two blue squares", "a tree", "a house", "a cat")
#: Three batches: 2, 2 and 1 prompts.
OPTIONS = ("-r", "fp8-static", "--set", "calibration.steps=4", "--set", "calibration.batch=2",
           "--set", "calibration.seed=7", "--device", "cpu")  # fmt: skip

#: Runs the command, but ends or fails where the test says: RANK:BATCH:WHAT.
DRIVER = """
import os, signal, sys
from quantkit.calibration.observing import observed_pipeline, calibration_resume
from quantkit.cli import main
from quantkit.errors import NonFiniteError

calibration_resume._PAUSE = calibration_resume._SHARE = 0.0
rank, last, what = os.environ.get("FAIL", "9:9:-").split(":")
run, done = observed_pipeline.run_batch, []

def stopping(*arguments):
    if os.environ.get("RANK", "0") == rank and len(done) == int(last):
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise NonFiniteError("unet.mid_block: NaN at step 9")
    run(*arguments)
    done.append(arguments)

observed_pipeline.run_batch = stopping
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_text("\n".join(PROMPTS))
    return path


@pytest.fixture(scope="module")
def arguments(pipeline_dir, prompts):
    return ("calibrate", "model", str(pipeline_dir), "--prompts", str(prompts), *OPTIONS)


def invoke(arguments, output, *more):
    return CliRunner().invoke(
        calibrate_command, [*arguments[1:], "-o", str(output), "-q", *more], catch_exceptions=True
    )


@pytest.fixture(scope="module")
def whole_file(arguments, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "c.safetensors"
    result = invoke(arguments, output)
    assert result.exit_code == 0, result.output
    assert [*output.parent.iterdir()] == [output]
    return output


@pytest.fixture(scope="module")
def whole(whole_file):
    return load_calibration(whole_file)


def launch(count, arguments, output, tmp_path, *more, fail="9:9:-"):
    """Run the command in processes of torchrun, and return what they said."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    # Alone, on a free port: tests beside this one start processes, too.
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    start = run if count > 1 else []
    command = [sys.executable, *start, str(driver), *arguments, "-o", str(output), *more]
    environment = {**os.environ, "FAIL": fail, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=280, check=False
    )


def assert_same(found, wanted):
    assert (found.edges, found.metadata) == (wanted.edges, wanted.metadata)
    for name, statistics in wanted.layers["unet"].items():
        other = found.layers["unet"][name]
        for field in (f.name for f in fields(LayerStatistics)):
            one, two = getattr(other, field), getattr(statistics, field)
            if field in {"mean", "second_moment", "moving_amax"}:
                torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
            elif field == "samples":
                # A process has one thread, the test has several: sums in another order.
                torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)
            elif field in {"amax", "channel_amax"}:
                torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
            elif field == "histogram":
                assert (one - two).abs().sum() <= 2e-3 * two.sum(), name
            else:
                assert torch.equal(one, two), (name, field)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("items", [0, 1, 3, 16])
def test_shares_are_runs_that_make_up_the_whole(count, items):
    shares = [Processes(rank, count).share(items) for rank in range(count)]
    assert [item for share in shares for item in share] == [*range(items)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    # The first one shows the progress.
    assert len(shares[0]) == max(map(len, shares))


def test_one_process_talks_to_nobody(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with joined() as processes:
        assert processes is ALONE
    assert (ALONE.exchange("x"), ALONE.gather("x"), ALONE.is_first) == (["x"], ["x"], True)
    with pytest.raises(OutputError), ALONE.together():
        raise OutputError("full")


def test_gpus_are_dealt_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = [Processes(rank, 3, local_rank=rank) for rank in range(3)]
    assert [p.device("auto") for p in ranks] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [p.device("cpu") for p in ranks] == ["cpu"] * 3
    assert ALONE.device("auto") == "auto"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(6, dtype=torch.int64)[::2],
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.ones(3).expand(2, 3),
    ],
    ids=["transposed", "every other", "number", "empty", "bool", "expanded"],
)
def test_tensors_are_sent_to_the_bit(tensor):
    sent = {"part": [tensor, None, (1, "x")]}
    found = pickle.loads(_packed(sent).numpy().tobytes())["part"]
    assert found[1:] == sent["part"][1:]
    assert (found[0].dtype, found[0].shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found[0], tensor)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_more_processes_than_batches_give_what_one_gives(arguments, whole, tmp_path):
    output = tmp_path / "out" / "c.safetensors"
    result = launch(4, arguments, output, tmp_path)
    assert result.returncode == 0, result.stderr
    assert_same(load_calibration(output), whole)
    assert [*output.parent.iterdir()] == [output]
    assert result.stdout.count("component") == 1


@pytest.mark.slow
def test_error_in_one_process_ends_all_with_its_message(arguments, tmp_path):
    output = tmp_path / "out" / "c.safetensors"
    result = launch(2, arguments, output, tmp_path, "-q", fail="1:0:raise")
    assert result.returncode != 0
    assert result.stderr.count("quantkit: error: unet.mid_block: NaN at step 9") == 1
    assert "exitcode  : 2" in result.stderr
    assert not output.exists()


@pytest.mark.slow
def test_killed_processes_go_on(arguments, whole, tmp_path):
    output = tmp_path / "out" / "c.safetensors"
    result = launch(2, arguments, output, tmp_path, "-q", fail="0:1:kill")
    assert result.returncode != 0
    assert not output.exists()
    kept = sorted(path.name for path in output.parent.iterdir())
    assert ".c.safetensors.part-1-of-2" in kept
    error = invoke(arguments, output, "--resume").exception
    assert "no partial calibration of 1 processes to resume" in str(error)
    assert ".c.safetensors.part-1-of-2" in str(error)
    result = launch(2, arguments, output, tmp_path, "-q", "--resume")
    assert result.returncode == 0, result.stderr
    assert_same(load_calibration(output), whole)
    assert [*output.parent.iterdir()] == [output]


@pytest.mark.slow
def test_killed_run_goes_on(arguments, whole, tmp_path):
    output = tmp_path / "out" / "c.safetensors"
    result = launch(1, arguments, output, tmp_path, "-q", fail="0:2:kill")
    assert result.returncode == -signal.SIGKILL
    kept = output.parent / ".c.safetensors.part-1-of-1"
    assert [*output.parent.iterdir()] == [kept]
    result = invoke(arguments, output, "--resume")
    assert result.exit_code == 0, result.output
    assert_same(load_calibration(output), whole)
    assert [*output.parent.iterdir()] == [output]


@pytest.fixture(scope="module")
def interrupted(arguments, tmp_path_factory):
    """An output whose run ended after two batches of three."""
    output = tmp_path_factory.mktemp("interrupted") / "c.safetensors"
    interrupt(arguments, output, 2)
    return output


def interrupt(arguments, output, batches, *more):
    run, seen = running.run_batch, []

    def stopping(*given):
        if len(seen) == batches:
            raise KeyboardInterrupt
        run(*given)
        seen.append(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observed_pipeline, "run_batch", stopping)
        patch.setattr(calibration_resume, "_PAUSE", 0.0)
        patch.setattr(calibration_resume, "_SHARE", 0.0)
        assert invoke(arguments, output, *more).exit_code != 0


def test_only_what_is_missing_is_run_again(arguments, interrupted, whole, tmp_path, monkeypatch):
    output = tmp_path / "c.safetensors"
    kept = interrupted.parent / ".c.safetensors.part-1-of-1"
    (tmp_path / kept.name).write_bytes(kept.read_bytes())
    run, seeds = running.run_batch, []
    monkeypatch.setattr(
        observed_pipeline,
        "run_batch",
        lambda pipe, batch, *how: (seeds.append(batch.seeds), run(pipe, batch, *how)),
    )
    result = invoke(arguments, output, "--resume")
    assert result.exit_code == 0, result.output
    assert seeds == [range(11, 12)]
    assert_same(load_calibration(output), whole)


@pytest.mark.parametrize("ends", [(2,), (1, 1)], ids=str)
def test_going_on_gives_the_same_bytes(arguments, whole_file, tmp_path, ends):
    output = tmp_path / "c.safetensors"
    for count, batches in enumerate(ends):
        interrupt(arguments, output, batches, *["--resume"] * (count > 0))
    result = invoke(arguments, output, "--resume")
    assert result.exit_code == 0, result.output
    assert output.read_bytes() == whole_file.read_bytes()
    assert [*tmp_path.iterdir()] == [output]


CHANGES = {
    "steps": (
        ("--set", "calibration.steps=5"),
        "steps was 4 and is 5; resume with the same settings",
    ),
    "seed": (("--set", "calibration.seed=8"), "seed was 7 and is 8;"),
    "batch": (("--set", "calibration.batch=1"), "batch was 2 and is 1;"),
    "guidance": (("--set", "calibration.guidance=1.5"), r"guidance was nothing and is 1\.5;"),
    "prompts": (("--count", "4"), r"prompts was [0-9a-f]{12}\.\.\. and is [0-9a-f]{12}\.\.\.;"),
    "layers": (("-r", "fp8"), r"model was [0-9a-f]{12}\.\.\. and is"),
}


@pytest.mark.parametrize(("options", "message"), CHANGES.values(), ids=CHANGES)
def test_run_with_other_settings_is_not_gone_on_with(arguments, interrupted, options, message):
    if "-r" in options:
        options = ("-r", str(_recipe_of_fewer_layers(interrupted.parent)))
    error = invoke(arguments, interrupted, "--resume", *options).exception
    assert isinstance(error, ArtefactError)
    with pytest.raises(ArtefactError, match=message):
        raise error
    assert not interrupted.exists()


def _recipe_of_fewer_layers(folder):
    path = Path(folder) / "other.yaml"
    path.write_text('name: other\nnot_layers: ["mid_block.*"]\n')
    return path


def test_kept_part_that_is_damaged_is_refused(arguments, interrupted, tmp_path):
    kept = interrupted.parent / ".c.safetensors.part-1-of-1"
    data = bytearray(kept.read_bytes())
    data[-9] ^= 1
    (tmp_path / kept.name).write_bytes(data)
    error = invoke(arguments, tmp_path / "c.safetensors", "--resume").exception
    assert isinstance(error, ArtefactError)
    assert "its checksum does not agree" in str(error)


def test_nothing_to_resume_is_said_and_all_is_run(arguments, whole_file, tmp_path):
    output = tmp_path / "c.safetensors"
    result = invoke(arguments, output, "--resume")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        f"{output}: no partial calibration yet; starting at the first prompt"
    ]
    assert output.read_bytes() == whole_file.read_bytes()


def test_what_other_processes_kept_is_not_lost(arguments, tmp_path):
    (tmp_path / ".c.safetensors.part-1-of-2").touch()
    error = invoke(arguments, tmp_path / "c.safetensors", "--resume").exception
    assert "no partial calibration of 1 processes to resume" in str(error)
    assert "part-1-of-2" in str(error)


def test_writing_takes_a_small_part_of_the_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(calibration_resume, "monotonic", lambda: now[0])
    pace = calibration_resume.WriteInterval(_due=105.0)
    assert not pace.is_due()
    now[0] = 106.0
    assert pace.is_due()
    now[0] = 107.0
    pace.wrote(106.0)
    now[0] = 126.0
    assert not pace.is_due()
    now[0] = 127.0
    assert pace.is_due()


def test_a_full_disk_loses_no_calibration(arguments, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(calibration_resume, "_PAUSE", 0.0)
    monkeypatch.setattr(calibration_resume, "_SHARE", 0.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    save = save_file

    def full(tensors, path, **more):
        if (tmp_path / "temporary") not in Path(path).parents:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save(tensors, path, **more)

    monkeypatch.setattr(artefact, "save_file", full)
    result = CliRunner().invoke(
        calibrate_command, [*arguments[1:], "-o", str(tmp_path / "out"), "--quiet"]
    )
    assert isinstance(result.exception, OutputError)
    kept = re.search(r"no space left.*kept: move it from (.*) to where", str(result.exception))[1]
    assert load_calibration(Path(kept)).metadata.prompts == len(PROMPTS)
    assert "going on, but a killed run could not be resumed from here" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]


def test_what_cannot_be_calibrated_is_refused_before_hashing(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr("quantkit.calibration.observing.collect.sha256_of", pytest.fail)
    model = Path(arguments[2])
    (tmp_path / "file").write_text("")
    for output, more, words in (
        (tmp_path / "file" / "out", (), "cannot be written"),
        (tmp_path / "out", ("--device", "cuda:99"), "cuda:99"),
        (model / "out", (), "overlaps the input"),
        (Path(), ("--force",), "the folder that you are in"),
    ):
        result = CliRunner().invoke(
            calibrate_command, [*arguments[1:], *more, "-o", str(output), "--quiet"]
        )
        assert isinstance(result.exception, InputError), result.output
        assert words in str(result.exception)
