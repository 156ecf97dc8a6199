"""What is kept of a calibration while it runs: whose it is, and when it is written."""

import pytest
import torch

from quantkit.calibration.observing import calibration_resume
from quantkit.calibration.observing.calibration_resume import (
    PartialFile,
    PartialSums,
    WriteInterval,
)
from quantkit.errors import ArtefactError
from quantkit.pipelines.processes import ALONE
from tests.support.artefacts import attention_sums, sums

#: Longer texts than an interpreter keeps one copy of, a list, and nothing.
FACTS = {"model": "a digest, " * 9, "sizes": [1, 2, 3_000_000], "guidance": None}


@pytest.fixture
def written(tmp_path):
    kept = PartialFile(tmp_path / "c", ALONE, FACTS)
    kept.write(
        PartialSums(
            {"unet": {"a": sums()}},
            {"unet": {"b": attention_sums()}},
            (500.0,),
            {"unet": [3, 1]},
            2,
            at_once=8,
        )
    )
    return kept


def test_a_run_with_the_same_settings_goes_on(written):
    found = PartialFile(written.output, ALONE, {**FACTS, "sizes": (1, 2, 3_000_000)}).read()
    assert (found.edges, found.calls, found.batches) == ((500.0,), {"unet": [3, 1]}, 2)
    assert found.at_once == 8
    for name, tensor in sums().items():
        assert torch.equal(found.sums["unet"]["a"][name], tensor)
    for name, tensor in attention_sums().items():
        assert torch.equal(found.attention["unet"]["b"][name], tensor)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({**FACTS, "model": "other"}, "model was a digest, a ... and is other"),
        ({**FACTS, "sizes": [1, 2]}, r"sizes was \[1, 2, 3000000\] and is \[1, 2\]"),
        ({**FACTS, "guidance": 7.5}, "guidance was nothing and is 7.5"),
        ({**FACTS, "seed": 1}, "seed was nothing and is 1"),
        ({k: v for k, v in FACTS.items() if k != "sizes"}, "sizes was .* and is nothing"),
    ],
    ids=["text", "list", "was-none", "new", "gone"],
)
def test_a_run_with_other_settings_does_not(written, facts, words):
    with pytest.raises(ArtefactError, match=words):
        PartialFile(written.output, ALONE, facts).read()


def test_nothing_is_read_where_nothing_was_kept_or_all_was_discarded(written):
    assert PartialFile(written.output.with_name("d"), ALONE, FACTS).read() is None
    written.discard()
    assert written.read() is None


def test_writing_takes_a_twentieth_of_the_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(calibration_resume, "monotonic", lambda: now[0])
    pace = WriteInterval()
    for began, ended, due in ((None, 100.0, 105.0), (110.0, 110.125, 115.125), (120.0, 123.0, 183)):
        now[0] = ended
        if began is not None:
            pace.wrote(began)
        now[0] = due - 0.01
        assert not pace.is_due()
        now[0] = due
        assert pace.is_due()
