"""Stages of a schedule: timesteps as pipelines hand them over, and how often they are read."""

import pytest
import torch
from torch import nn

from quantkit.pipelines import step_stage
from quantkit.pipelines.step_stage import Stages, find_stage, give_stages, in_stage, is_before


@pytest.fixture
def model():
    found = nn.Linear(2, 2)
    give_stages(found, Stages((50.0, 500.0), lambda args, kwargs: kwargs.get("t", *args[:1])))
    return found


@pytest.fixture
def read(monkeypatch):
    """Lengths of the schedules that were read."""
    found, tolist = [], torch.Tensor.tolist

    def noted(tensor):
        found.append(len(tensor))
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    return found


@torch.no_grad()
def test_a_schedule_is_read_once(model, read):
    schedule = torch.arange(999, 0, -50)
    stages = [find_stage(model, (t,), {}) for t in schedule]
    assert stages == [500.0] * 10 + [50.0] * 9 + [-torch.inf]
    assert read == [20]
    schedule[0] = 10
    assert find_stage(model, (schedule[0],), {}) == -torch.inf
    assert read == [20, 20]


def spread(schedule):
    return torch.empty_strided((10,), (3,), dtype=schedule.dtype).copy_(schedule)


FORMS = {
    "element": lambda s, i: s[i],
    "batch": lambda s, i: s[i].expand(3),
    "of every other step": lambda s, i: s[i % 2 :: 2][i // 2],
    "slice": lambda s, i: s[i:],
    "cast": lambda s, i: s[i].half(),
    "copy": lambda s, i: s[i].clone(),
    "number": lambda s, i: float(s[i]),
    "of another type": lambda s, i: s[i].double().reshape(1).view(torch.uint8).view(torch.double),
    "of a long tensor": lambda s, i: torch.cat((s, s.new_zeros(20_000)))[i],
    "of one that is spread": lambda s, i: spread(s)[i],
    "of a table": lambda s, i: s.reshape(2, 5)[i // 5, i % 5],
    "of a slice": lambda s, i: s[1:][i - 1] if i else s[0],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whole", [torch.arange(1000.0, 0, -100), torch.arange(1000, 0, -100)])
@pytest.mark.parametrize("inference", [False, True])
def test_a_timestep_is_found_in_every_form(form, whole, inference):
    with torch.inference_mode(inference), torch.no_grad():
        schedule = whole.clone()
        for i, expected in enumerate(range(1000, 0, -100)):
            given = FORMS[form](schedule, i)
            assert not is_before(expected, given)
            assert is_before(expected + 1, given)


def test_a_known_stage_is_not_read(model):
    with in_stage(50.0):
        assert is_before(51.0, torch.tensor(900.0))
        assert not is_before(50.0, torch.tensor(-900.0))
    assert not is_before(51.0, torch.tensor(900.0))
    give_stages(model, None)
    assert find_stage(model, (torch.tensor(1.0),), {}) is None


def test_schedules_are_forgotten_with_their_tensors():
    schedule = torch.arange(20)
    assert is_before(1.0, schedule[0])
    before = len(step_stage._schedules)
    del schedule
    assert len(step_stage._schedules) == before - 1
