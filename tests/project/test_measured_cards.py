"""What silicon reaches of what issue allows is the figure of docs/measure_cards.py."""

import json
import runpy
from pathlib import Path

import pytest

from quantkit.bench.estimate.cards import find_card
from quantkit.bench.estimate.estimated_kernels import Kernel
from quantkit.bench.estimate.kernel_cost import time_kernels
from quantkit.bench.kernels.matrix_product import Product
from quantkit.device.aot.silicon import OF_ISSUE

SCRIPT = Path(__file__).parents[2] / "docs" / "measure_cards.py"
PRODUCT = {
    "precision": "int8",
    "tile": [128, 128, 64],
    "matrix": 32,
    "matrix_cycles": 8,
    "others": 111,
    "slow": 0,
    "outside": 3000,
}
ATTENTION = {
    "precision": "f16",
    "matrix": 16,
    "matrix_cycles": 16,
    "others": 208,
    "slow": 16,
    "outside": 0,
}


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def written(path, shape, ms, kernel):
    time = {"kernel": "one", "card": "RX 9070 XT", "shape": shape, "ms": ms, "source": "me"}
    path.write_text(json.dumps({"kernels": {"one": kernel}, "times": [time]}))
    return path


def test_the_range_is_that_of_the_file(script):
    assert script["silicon"](script["read"](script["FILE"])) == OF_ISSUE


def test_a_product_is_counted_with_its_whole_blocks(script, tmp_path):
    (timed,) = script["read"](written(tmp_path / "x.json", [192, 256, 130], 0.5, PRODUCT))
    # Three passes; two tiles of rows of which one and a half are filled.
    assert timed.allowed == 768 / (768 + 333 + 3000)
    assert timed.reached == pytest.approx(2 * 192 * 256 * 130 / 0.0005 / 389e12 / 0.75)


def test_attention_counts_transcendentals_four_times(script, tmp_path):
    shape = [2, 3, 100, 200, 64]
    (timed,) = script["read"](written(tmp_path / "x.json", shape, 0.25, ATTENTION))
    assert timed.allowed == 256 / (256 + 208 + 48)
    assert timed.reached == pytest.approx(4 * 6 * 100 * 200 * 64 / 0.00025 / 195e12)


def test_each_kernel_is_told_by_the_others(script):
    reached = {"a": 0.25, "b": 0.4, "c": 0.2}
    times = (script["Timed"](name, "", (), 0.5, share) for name, share in reached.items())
    (first, *_) = script["left_out"](tuple(times))
    assert first == ("a", 0.5, pytest.approx((0.8 * 0.4) ** 0.5 / 0.5 - 1))


def sent(us):
    shape = {"m": 4608, "n": 12288, "k": 3072}
    machine = {"device": "AMD Radeon RX 9070 XT", "architecture": "gfx1201", "driver": "HIP 7"}
    rows = [
        {"op": "gemm_int8", "shape": shape, "timing": {"p50_us": us}},
        {"op": "gemm_int8", "shape": shape | {"m": 16}, "timing": {"p50_us": 10.0}},
        {"op": "gemm_int8", "shape": shape, "timing": None},
    ]
    return {"schema": "quantkit.card", "kernels": {"machine": machine, "rows": rows}, "model": None}


def test_a_time_says_the_share_that_it_was_estimated_with(script):
    card = find_card("RX 9070 XT")
    low, _ = card.efficiency.products["linear", "int8", False]
    kernel = Kernel("products", (), (), (), Product("linear", "int8", 4608, 12288, 3072))
    (worst,) = time_kernels((kernel,), card, 0)
    (timed,) = script["own_times"](sent(worst.us)["kernels"])
    assert timed.share == pytest.approx(low)
    start = card.efficiency.product_us[0]
    (timed,) = script["own_times"](sent((worst.us - start) / 2 + start)["kernels"])
    assert timed.share == pytest.approx(2 * low)


def test_a_bundle_gives_the_row_of_its_card(script, tmp_path, capsys, monkeypatch):
    path = tmp_path / "card.json"
    path.write_text(json.dumps(sent(1500.0)))
    monkeypatch.setattr("sys.argv", ["measure_cards.py", str(path)])
    script["main"]()
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| AMD Radeon RX 9070 XT (HIP 7) | 0.")
    assert row.count("|") == 12
