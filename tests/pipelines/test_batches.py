"""How prompts are put into batches, and how many of these run at once."""

import pytest
import torch

from quantkit.pipelines import batches
from quantkit.pipelines.batches import GrowingBatches, fitting, split_batches
from quantkit.recipe.calibration import CalibrationRecipe

GB = 2**30


def made(prompts, batch):
    settings = CalibrationRecipe(seed=7, batch=batch)
    return split_batches([f"prompt {i}" for i in range(prompts)], settings)


def run_all(growing):
    """Return the batches that run, until there are none."""
    found = []
    while growing:
        with growing.next() as batch:
            found.append(batch)
    return found


@pytest.fixture
def gpu(monkeypatch):
    """Say what a batch takes, and what room there is, in bytes."""

    def say(took, room):
        monkeypatch.setattr(batches, "_reserved", lambda _: 3 * GB)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 3 * GB + took)
        monkeypatch.setattr(batches, "_room", lambda _: room)

    return say


@pytest.mark.parametrize(
    ("prompts", "memory", "users", "sizes"),
    [
        (16, (GB, 5 * GB), 1, [4, 12]),
        (16, (GB, 3 * GB), 1, [4, 8, 4]),
        (16, (GB, 3 * GB), 2, [4, 4, 4, 4]),
        (16, (3 * GB, 5 * GB), 1, [4, 4, 4, 4]),
        (256, (0, 5 * GB), 1, [4, 64, 64, 64, 60]),
        (4, (GB, 5 * GB), 1, [4]),
        (18, (GB, 50 * GB), 1, [4, 14]),
        # Of one size: of five batches four fit, and run as three and two.
        (24, (GB, 5 * GB), 1, [4, 12, 8]),
    ],
)
def test_a_gpu_runs_as_many_as_it_has_room_for(gpu, prompts, memory, users, sizes):
    gpu(*memory)
    growing = GrowingBatches(made(prompts, 4), torch.device("cuda"), users=users)
    found = run_all(growing)
    assert [len(batch.prompts) for batch in found] == sizes
    assert [p for batch in found for p in batch.prompts] == [f"prompt {i}" for i in range(prompts)]
    assert [s for batch in found for s in batch.seeds] == list(range(7, 7 + prompts))
    each = [size for batch in found for size in batch.sizes]
    assert each == [len(batch.prompts) for batch in made(prompts, 4)]


def test_a_cpu_runs_one_by_one():
    growing = GrowingBatches(made(10, 4), torch.device("cpu"))
    assert len(growing) == 3
    assert [batch.sizes for batch in run_all(growing)] == [(4,), (4,), (2,)]


@pytest.mark.parametrize(
    ("took", "room", "prompts", "count"),
    [(0, GB, 200, 1), (1, 0, 1, 1), (0, GB, 1, 64), (0, GB, 3, 16), (GB, 2 * GB - 1, 4, 1),
     (GB, 2 * GB, 4, 2), (GB, 7 * GB, 4, 4), (GB, 9 * GB, 8, 8), (GB, 10 * GB, 8, 8)],
)  # fmt: skip
def test_numbers_of_batches_are_powers_of_two(took, room, prompts, count):
    assert fitting(took, room, prompts) == count


def test_a_run_that_goes_on_has_the_number_of_before(gpu):
    gpu(GB, 5 * GB)
    whole = GrowingBatches(made(40, 4), torch.device("cuda"))
    with whole.next():
        assert whole.count is None
    rest = GrowingBatches(made(40, 4)[1:], torch.device("cuda"), count=whole.count)
    assert [len(b.seeds) for b in run_all(rest)] == [len(b.seeds) for b in run_all(whole)]


def test_what_fails_leaves_the_others(gpu):
    gpu(GB, 10 * GB)
    growing = GrowingBatches(made(12, 4), torch.device("cuda"))
    with pytest.raises(RuntimeError), growing.next():
        raise RuntimeError
    assert len(growing) == 2
