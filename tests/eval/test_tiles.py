"""The tiles under the verdict: what they say, and what they leave to be measured."""

from dataclasses import replace

import pytest
from quantkit.eval.judging.evaluation_result import KernelCalls, Kernels, QuantizedBy
from quantkit.eval.pages.tiles import comparison_tiles, report_tiles

from tests.support.reports import made, made_report


@pytest.fixture(scope="module")
def report():
    return made_report(made(sigma=20.0))


def tiles(report):
    return {tile.title: tile for tile in report_tiles(report)}


def ran_on(report, backend):
    calls = (KernelCalls("gemm_int8", "t0", backend, 1200),)
    return replace(report, kernels=Kernels(calls, None, "", "not watched"))


def test_size_is_the_share_of_the_files(report):
    size = tiles(report)["Size"]
    assert size.value == "52.5 %"
    assert size.notes == ("3.815 MiB -> 2.003 MiB", "4 of 5 layers packed")


def test_pictures_name_mean_worst_and_noise_floor(report):
    pictures = tiles(report)["Pictures"]
    ssim = report.comparison.scores["ssim"]
    assert pictures.value == f"SSIM {ssim.summary.mean:.4g}"
    assert pictures.notes[0] == f"worst {min(ssim.values):.4g}, of 3"
    assert pictures.notes[1] == "1 same picture, 2 variant"
    assert pictures.notes[2].startswith("noise floor: SSIM 0.9")


@pytest.mark.parametrize("backend", ["host", "reference"])
def test_emulated_kernels_have_no_speed(report, backend):
    speed = tiles(ran_on(report, backend))["Speed and memory"]
    assert speed.value == "Not measured"
    assert speed.notes == (f"{backend}: no speed of a graphics card",)


def test_speed_and_memory_of_a_card_are_told(report):
    run = replace(
        report.run, original_seconds=6.0, packed_seconds=3.0, device="cuda:0",
        original_peak_bytes=8 << 30, packed_peak_bytes=5 << 30,
    )  # fmt: skip
    speed = tiles(replace(ran_on(report, "hip"), run=run))["Speed and memory"]
    assert speed.value == "2.00 times"
    assert speed.notes == (
        "2 s -> 1 s a picture on cuda:0", "peak memory 8192 MiB -> 5120 MiB",
    )  # fmt: skip


def test_another_tool_has_no_kernels_of_quantkit(report):
    by = QuantizedBy("unet", "SDNQ", "sdnq", "0.2.8", (), {})
    kernels = tiles(replace(report, quantized_by=(by,)))["Kernels"]
    assert kernels.value == "SDNQ"
    assert kernels.notes == ("quantized and computed it, not quantkit",)


def test_two_folders_have_a_tile_for_every_metric(report):
    found = comparison_tiles(report.comparison)
    assert [tile.title for tile in found] == ["Pictures", "PSNR", "SSIM"]
    assert found[0].value == "3 pairs"
