"""Bytes and time of a layer under a treatment."""

import pytest

from quantkit.sensitivity import treatment_cost
from quantkit.sensitivity.treatments import BY_NAME
from tests.support.sensitivities import PACKING, SHAPES, layer_in, settings_of


@pytest.mark.parametrize("name", PACKING)
def test_bytes_are_those_of_the_packed_file(tmp_path, name):
    layer = layer_in(tmp_path, SHAPES["conv"])
    settings = settings_of()
    n, k = layer.n, layer.k
    wanted = {
        "16-bit": 2 * n * k,
        "int4-token": n * k // 2 + n * k // 32 + 4 * n,
        "2:4": n * k // 2 + n * k // 8 + 4 * n,
    }
    key = "2:4" if name.startswith("2:4") else name
    edges = (1.0, 2.0) if name.endswith("static") else ()
    found = treatment_cost.packed_bytes(layer, BY_NAME[name], settings.weight, edges)
    assert found == wanted.get(key, n * k + 4 * n) + 4 * 3 * bool(edges)


def test_time_is_bound_by_compute_or_by_memory(tmp_path):
    layer = layer_in(tmp_path, SHAPES["linear"])
    device = treatment_cost.PeakRates("test", 1e3, 2e3, 4e3, bandwidth=1e6)
    flops = 2 * 100 * layer.n * layer.k
    times = [
        treatment_cost.modelled_seconds(layer, BY_NAME[name], 10, 100, device)
        for name in ("16-bit", "e5m2-static", "2:4-wanda-e4m3fn-token", "2:4-wanda-16-bit")
    ]
    assert times == [flops / 1e3, flops / 2e3, flops / 4e3, flops / 1e3]
    assert treatment_cost.modelled_seconds(layer, BY_NAME["16-bit"], 3_000_000, 0, device) == 3.0


def test_peak_rates_are_those_of_the_data_sheet():
    card = treatment_cost.RX_9070_XT
    rates = (card.flops_16_bit, card.flops_fp8, card.flops_fp8_sparse)
    assert [round(rate / 1e12) for rate in rates] == [195, 389, 779]
    assert card.bandwidth == 640e9
