"""Shared by the tests of calibration: a tiny pipeline and its statistics."""

import pytest

from quantkit.calibration.observing.collect import calibrate
from quantkit.models.source import open_model
from quantkit.progress import silent
from tests.support.observed import PROMPTS, RECIPE


@pytest.fixture(scope="session")
def sd(pipeline_dir):
    return open_model(str(pipeline_dir))


@pytest.fixture(scope="session")
def sd_calibration(sd):
    return calibrate(sd, RECIPE, PROMPTS, device="cpu", progress=silent)
