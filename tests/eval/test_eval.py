"""Metrics, statistics, gates and pictures of quantkit.eval, against outside oracles."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from quantkit.eval import backbones as backbones_module
from quantkit.eval.backbones import (
    Backbones,
    ClipBackbone,
    LpipsBackbone,
    load_clip,
    load_lpips,
)
from quantkit.eval.comparison import compare
from quantkit.eval.demo.world.alexnet import (
    FeatureNetwork,
    Stage,
    perceptual_distance,
    save_feature_network,
)
from quantkit.eval.gates import Compression, Limits, find_compression, judge, passed
from quantkit.eval.images import (
    Pairs,
    amplified_difference,
    match_folders,
    read_image,
    save_png,
    to_pixels,
)
from quantkit.eval.metrics import METRICS, Better, Needs
from quantkit.eval.statistics import (
    Interval,
    bootstrap_loss,
    bootstrap_mean,
    relative_loss,
    summarize,
    summarize_difference,
)

from quantkit.cli.evaluate import evaluate
from quantkit.errors import InputError, ModelError, NonFiniteError, ShapeError
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme

CPU = torch.device("cpu")
PAIR_METRICS = [metric for metric in METRICS.values() if metric.needs is Needs.PAIR]


def pixels(seed=0, height=48, width=40):
    rng = np.random.default_rng(seed)
    low = rng.integers(0, 256, (height // 8, width // 8, 3))
    return np.kron(low, np.ones((8, 8, 1))).astype(np.uint8)


def noisy(picture, sigma, seed=1):
    noise = np.random.default_rng(seed).normal(0, sigma, picture.shape)
    return np.clip(picture + noise, 0, 255).round().astype(np.uint8)


def small_network():
    """The demo's class with two stages of random weights: enough to see the formula."""
    torch.manual_seed(3)
    network = FeatureNetwork((Stage(6, 5, 2, pool=False), Stage(9, 3, 1, pool=True)))
    for head in network.heads:
        head.data = torch.rand(len(head))
    return network.eval()


def small_lpips():
    network = small_network()
    return LpipsBackbone("two stages", lambda a, b: perceptual_distance(network, a, b), CPU)


SMALL = Backbones(lpips=small_lpips())


# --- metrics


@pytest.mark.parametrize("metric", PAIR_METRICS, ids=lambda m: m.name)
def test_identical_pictures_give_the_identity_value(metric):
    picture = pixels()
    assert metric.pair(picture, picture.copy(), SMALL) == pytest.approx(metric.identity, abs=1e-12)


@pytest.mark.parametrize("metric", PAIR_METRICS, ids=lambda m: m.name)
def test_metrics_are_symmetric_and_in_range(metric):
    first, second = pixels(0), pixels(1)
    there, back = metric.pair(first, second, SMALL), metric.pair(second, first, SMALL)
    assert there == pytest.approx(back, rel=1e-6)
    assert metric.minimum <= there <= metric.maximum
    assert there != metric.identity


@pytest.mark.parametrize("metric", PAIR_METRICS, ids=lambda m: m.name)
def test_more_noise_is_worse(metric):
    picture = pixels()
    values = [metric.pair(picture, noisy(picture, sigma), SMALL) for sigma in (2, 10, 40)]
    assert values == sorted(values, reverse=metric.better is Better.HIGHER)


@pytest.mark.parametrize("metric", PAIR_METRICS, ids=lambda m: m.name)
def test_metrics_refuse_two_sizes(metric):
    with pytest.raises(ShapeError, match=r"40x48 against 48x48 pixels"):
        metric.pair(pixels(), pixels(width=48), SMALL)


def test_mse_and_psnr_of_a_hand_computed_pair():
    # One of four values differs by 51 = 255/5: MSE = (1/5)^2 / 4 = 0.01, PSNR = 20 dB.
    first = np.zeros((2, 2, 3), np.uint8)
    second = first.copy()
    second[0, 0] = 51
    assert METRICS["mse"].pair(first, second, Backbones()) == pytest.approx(0.01, rel=1e-12)
    assert METRICS["psnr"].pair(first, second, Backbones()) == pytest.approx(20.0, rel=1e-12)


def test_mse_and_psnr_equal_scikit_image():
    from skimage.metrics import mean_squared_error, peak_signal_noise_ratio

    first, second = pixels(0), pixels(1)
    assert METRICS["mse"].pair(first, second, Backbones()) == pytest.approx(
        mean_squared_error(first / 255, second / 255), rel=1e-12
    )
    assert METRICS["psnr"].pair(first, second, Backbones()) == pytest.approx(
        peak_signal_noise_ratio(first, second, data_range=255), rel=1e-12
    )


def test_ssim_equals_its_definition_on_one_window():
    """On 7x7 pixels there is one window, so Wang's formula can be written out.

    Source: Wang et al. 2004, equation 13; K1 = 0.01, K2 = 0.03, sample (n - 1) covariances.
    """
    first, second = pixels(0, 8, 8)[:7, :7], noisy(pixels(2, 8, 8), 30)[:7, :7]
    scores = []
    for channel in range(3):
        x, y = (p[..., channel].ravel() / 255.0 for p in (first, second))
        (vx, cxy), (_, vy) = np.cov(x, y)
        c1, c2 = 0.01**2, 0.03**2
        scores.append(
            (2 * x.mean() * y.mean() + c1)
            * (2 * cxy + c2)
            / ((x.mean() ** 2 + y.mean() ** 2 + c1) * (vx + vy + c2))
        )
    assert METRICS["ssim"].pair(first, second, Backbones()) == pytest.approx(
        np.mean(scores), rel=1e-9
    )


def test_ssim_does_not_depend_on_the_scale_of_values():
    from skimage.metrics import structural_similarity

    first, second = pixels(0), noisy(pixels(0), 12)
    wanted = structural_similarity(first, second, data_range=255, channel_axis=-1)
    assert METRICS["ssim"].pair(first, second, Backbones()) == pytest.approx(wanted, rel=1e-9)


def test_ssim_refuses_less_than_a_window():
    tiny = np.zeros((6, 9, 3), np.uint8)
    with pytest.raises(ShapeError, match="9x6 pixels; wanted at least 7x7"):
        METRICS["ssim"].pair(tiny, tiny, Backbones())


# --- backbones


@pytest.fixture(scope="module")
def alexnet_file(tmp_path_factory):
    from torchvision.models import alexnet

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("alexnet") / "alexnet.pth"
    torch.save(alexnet(weights=None).state_dict(), path)
    return path


def test_lpips_file_gives_what_the_lpips_package_gives(alexnet_file):
    import lpips

    oracle = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)
    state = torch.load(alexnet_file, weights_only=True)
    names = {f"features.{n.split('.', 1)[1]}": n for n in oracle.net.state_dict()}
    oracle.net.load_state_dict({ours: state[theirs] for theirs, ours in names.items()})
    first, second = pixels(0, 64, 64), pixels(1, 64, 64)
    tensors = [torch.tensor(p).permute(2, 0, 1)[None] / 127.5 - 1 for p in (first, second)]
    with torch.no_grad():
        wanted = float(oracle(*tensors))
    backbone = load_lpips(alexnet_file, device=CPU)
    assert backbone.name == "ImageNet AlexNet"
    assert wanted > 0.01
    assert backbone.distance(first, second) == pytest.approx(wanted, rel=1e-5)


def test_the_demo_networks_distance_is_that_of_the_lpips_package():
    import lpips

    network = small_network()
    oracle = lpips.LPIPS(net="alex", pnet_rand=True, version="0.0", verbose=False)
    oracle.net, oracle.L = network, 2
    for lin, head in zip(oracle.lins, network.heads, strict=False):
        lin.model[-1].weight = torch.nn.Parameter(head[None, :, None, None])
    first, second = (torch.rand(2, 3, 32, 32, generator=torch.manual_seed(s)) for s in (0, 1))
    with torch.no_grad():
        ours = perceptual_distance(network, first, second)
        wanted = oracle.eval()(first, second).flatten()
    assert (wanted > 1e-3).all()
    assert torch.allclose(ours, wanted, rtol=1e-5)


def test_a_folder_gives_the_network_that_was_saved_there(tmp_path):
    network = small_network()
    save_feature_network(network, tmp_path / "net", {"about": "random"})
    backbone = load_lpips(tmp_path / "net", device=CPU)
    assert backbone.name == "net (AlexNet)"
    first, second = pixels(0), pixels(1)
    # saved in fp16, so half precision's 2^-11 is the tolerance
    assert backbone.distance(first, second) == pytest.approx(
        small_lpips().distance(first, second), rel=2**-9
    )


def test_lpips_refuses_what_the_network_cannot_see(alexnet_file):
    small = pixels(0, 24, 40)
    with pytest.raises(ShapeError, match="40x24 pixels; wanted at least 32x32 for ImageNet"):
        load_lpips(alexnet_file, device=CPU).distance(small, small)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, r"weights\.pth: missing"),
        (b"not a state dict", "not a torch state dict"),
        ({"features.0.weight": torch.zeros(2, 3)}, r"features.0.weight: found \(2, 3\)"),
        ([1, 2], "features.0.weight: found nothing"),
    ],
    ids=["missing", "bytes", "other shape", "other object"],
)
def test_lpips_names_weights_that_cannot_be_used(tmp_path, content, wanted):
    path = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ModelError, match=wanted):
        load_lpips(path, device=CPU)


def test_lpips_without_cache_and_network_says_what_to_do(monkeypatch):
    from urllib.error import URLError

    def fail(**_):
        raise URLError("no route")

    monkeypatch.setattr(backbones_module, "_build", fail)
    with pytest.raises(ModelError, match=r"no route.*give its file, or leave lpips out"):
        load_lpips(None, device=CPU)


@pytest.fixture(scope="session")
def clip_dir(tmp_path_factory):
    from tests.support.tiny_clip import tiny_clip

    return tiny_clip(tmp_path_factory.mktemp("clip") / "tiny-clip")


def test_clip_score_is_the_cosine_of_the_embeddings(clip_dir):
    from transformers import CLIPModel, CLIPProcessor

    picture, prompt = pixels(0, 16, 16), "a red ball"
    model, processor = CLIPModel.from_pretrained(clip_dir), CLIPProcessor.from_pretrained(clip_dir)
    inputs = processor(text=[prompt], images=[picture], return_tensors="pt")
    with torch.no_grad():
        output = model.eval()(**inputs)
    # The model multiplies the cosine by its learned temperature.
    wanted = 100 * float(output.logits_per_image / model.logit_scale.detach().exp())
    backbone = load_clip(str(clip_dir), device=CPU)
    assert backbone.name == "tiny-clip (CLIP)"
    assert backbone.score(picture, prompt) == pytest.approx(wanted, abs=1e-4)
    assert abs(wanted) > 0.01


def test_clip_cuts_prompts_that_are_too_long(clip_dir):
    backbone = load_clip(str(clip_dir), device=CPU)
    assert math.isfinite(backbone.score(pixels(), "a red ball " * 30))


def test_clip_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no CLIP model could be loaded.*leave clip out"):
        load_clip(str(tmp_path / "nothing"), device=CPU)


# --- statistics


def test_summary_equals_numpy():
    values = np.random.default_rng(0).normal(3, 1, 17).tolist()
    found = summarize(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.std == pytest.approx(np.std(values, ddof=1))
    assert (found.minimum, found.maximum) == (min(values), max(values))
    assert found.median == pytest.approx(np.median(values))
    assert found.interval.low < found.mean < found.interval.high
    assert found.interval.method == "BCa"
    assert found == summarize(values)


def test_interval_covers_the_mean_as_often_as_it_says():
    """95 % intervals of 20 normal values cover the mean in about 19 of 20 draws."""
    rng = np.random.default_rng(5)
    inside = sum(
        i.low <= 0.0 <= i.high for i in (bootstrap_mean(rng.normal(0, 1, 20)) for _ in range(60))
    )
    assert 50 <= inside <= 60


def test_interval_agrees_with_the_t_interval_on_many_values():
    from scipy import stats

    values = np.random.default_rng(2).normal(10, 2, 200)
    low, high = stats.t.interval(0.95, 199, loc=values.mean(), scale=stats.sem(values))
    found = bootstrap_mean(values)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.03), pytest.approx(high, abs=0.03))


def test_paired_difference_equals_scipy_on_pairs():
    from scipy import stats

    rng = np.random.default_rng(4)
    before = rng.normal(0.9, 0.05, 24)
    after = before - rng.gamma(2, 0.01, 24)
    wanted = stats.bootstrap(
        (after, before), lambda a, b, axis: (a - b).mean(axis=axis), paired=True, method="BCa",
        n_resamples=9999, random_state=np.random.default_rng(20_240_501),
    ).confidence_interval  # fmt: skip
    found = summarize_difference(after.tolist(), before.tolist())
    assert found.mean == pytest.approx(after.mean() - before.mean())
    assert (found.interval.low, found.interval.high) == pytest.approx(tuple(wanted), rel=1e-9)
    # Twice as wide and more without the pairs: what they are for.
    apart = stats.bootstrap(
        (after, before), lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis),
        method="percentile", n_resamples=9999, random_state=np.random.default_rng(20_240_501),
    ).confidence_interval  # fmt: skip
    assert apart.high - apart.low > 2 * (found.interval.high - found.interval.low)


def test_paired_difference_leaves_out_pairs_with_infinite_values():
    found = summarize_difference(
        [math.inf, 30.0, math.inf, 40.0], [math.inf, math.inf, 20.0, 38.0], infinite_note="infinite"
    )
    assert (found.count, found.mean, found.interval) == (4, 2.0, None)
    assert found.note == "3 of 4 infinite, left out"
    with pytest.raises(ValueError, match="zip"):
        summarize_difference([1.0], [1.0, 2.0])


def test_an_interval_holds_its_bounds():
    interval = Interval(-0.5, 0.25, "BCa")
    assert [interval.holds(v) for v in (-0.5, 0.0, 0.25, -0.51, 0.26)] == [True] * 3 + [False] * 2


def test_degenerate_samples_have_honest_summaries():
    one = summarize([0.5])
    assert (one.mean, one.std, one.interval) == (0.5, None, None)
    equal = summarize([0.5] * 4)
    assert (equal.interval.low, equal.interval.high) == (0.5, 0.5)
    assert equal.interval.method == "all values equal"
    none = summarize([])
    assert (none.count, none.mean, none.interval) == (0, None, None)
    two = summarize([1.0, 2.0])
    assert two.std == pytest.approx(0.5**0.5)
    assert 1.0 <= two.interval.low <= two.interval.high <= 2.0


def test_infinite_values_are_left_out_and_counted():
    found = summarize([math.inf, 30.0, 40.0], infinite_note="pairs identical (infinite)")
    assert (found.count, found.mean, found.maximum) == (3, 35.0, 40.0)
    assert found.note == "1 of 3 pairs identical (infinite), left out"
    assert summarize([math.inf] * 2).mean is None


def test_relative_loss_of_means():
    before, after = np.array([20.0, 30.0]), np.array([19.0, 30.0])
    assert relative_loss(before, after) == pytest.approx(2.0)
    assert relative_loss(-before, after) is None
    assert bootstrap_loss(-before, after) is None
    assert bootstrap_loss(before, 0.98 * before).method == "all values equal"
    rng = np.random.default_rng(0)
    many = rng.normal(30, 3, 40)
    interval = bootstrap_loss(many, many * 0.99 + rng.normal(0, 0.1, 40))
    assert interval.low < 1.0 < interval.high
    assert interval.high - interval.low < 0.5


# --- comparison and gates


def made_pairs(count=4, sigma=3.0, prompts=None):
    originals = tuple(pixels(seed) for seed in range(count))
    packed = tuple(noisy(p, sigma * (i + 1), seed=i) for i, p in enumerate(originals))
    return Pairs(tuple(f"{i:03d}" for i in range(count)), originals, packed, prompts)


class FakeClip(ClipBackbone):
    """Scores pictures by their mean: a CLIP whose numbers can be computed by hand."""

    def score(self, picture, prompt):
        return float(picture.mean()) / 10 + len(prompt)


def fake_clip():
    return FakeClip("means", None, None, CPU)


def test_comparison_measures_what_it_has_backbones_for():
    found = compare(made_pairs(), Backbones())
    assert list(found.scores) == ["mse", "psnr", "ssim"]
    assert found.clip is None
    full = compare(made_pairs(prompts=("a",) * 4), Backbones(small_lpips(), fake_clip()))
    assert list(full.scores) == ["mse", "psnr", "ssim", "lpips"]
    assert full.scores["lpips"].backbone == "two stages"
    assert full.scores["ssim"].backbone == ""
    assert full.clip.backbone == "means"
    assert full.worst_first() == (3, 2, 1, 0)


def test_clip_loss_is_the_loss_of_the_means():
    pairs = made_pairs(prompts=("a", "bb", "ccc", "dddd"))
    clip = compare(pairs, Backbones(clip=fake_clip())).clip
    before, after = np.mean(clip.original.values), np.mean(clip.packed.values)
    assert clip.loss.mean == pytest.approx(100 * (before - after) / before)
    assert clip.loss.interval.low <= clip.loss.mean <= clip.loss.interval.high
    changes = np.subtract(clip.packed.values, clip.original.values)
    assert clip.change == summarize(changes.tolist())


def test_comparison_of_nothing_is_refused():
    with pytest.raises(InputError, match="no pictures to compare"):
        compare(Pairs((), (), ()), Backbones())


def scheme(*, sparse):
    return Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR if sparse else None, Activation.TOKEN)


@pytest.mark.parametrize(
    ("sparse", "compression", "limit"),
    [
        ((False,), Compression.FP8, 1.0),
        ((True,), Compression.BOTH, 3.0),
        ((False, True), Compression.BOTH, 3.0),
    ],
)
def test_the_clip_gate_follows_from_the_schemes(sparse, compression, limit):
    found = find_compression([scheme(sparse=s) for s in sparse])
    assert found is compression
    assert Limits().clip_loss(found) == limit
    assert Limits().clip_loss(Compression.SPARSE) == 2.0


def test_gates_compare_the_mean_strictly():
    comparison = compare(made_pairs(prompts=("a",) * 4), Backbones(small_lpips(), fake_clip()))
    ssim = comparison.scores["ssim"].summary.mean
    at = judge(comparison, Limits(ssim=ssim, lpips=9.0, clip_fp8=50.0), Compression.FP8)
    below = judge(comparison, Limits(ssim=ssim - 1e-9, lpips=9.0, clip_fp8=50.0), Compression.FP8)
    assert [gate.passed for gate in at] == [False, True, True]
    assert not passed(at)
    assert passed(below)
    assert below[1].title == "LPIPS [two stages]"
    assert below[2].wanted == "< 50 %"
    assert below[0].settled is False
    assert below[1].settled is True


def test_a_gate_that_was_not_measured_neither_passes_nor_fails():
    gates = judge(compare(made_pairs(), Backbones()), Limits(ssim=0.0), Compression.FP8)
    assert [gate.passed for gate in gates] == [True, None, None]
    assert gates[1].note == "not measured"
    assert passed(gates)
    assert not passed(gates[1:])
    assert (
        judge(compare(made_pairs(), Backbones()), Limits(None, None, None), Compression.FP8) == ()
    )


def test_a_clip_score_that_is_not_positive_is_not_judged():
    pairs = made_pairs(prompts=("a",) * 4)
    comparison = compare(pairs, Backbones(clip=fake_clip()))
    worthless = replace(
        comparison, clip=replace(comparison.clip, loss=replace(comparison.clip.loss, mean=None))
    )
    gate = judge(worthless, Limits(), Compression.FP8)[2]
    assert (gate.passed, gate.note) == (None, "the original's score is not positive")


# --- pictures


def test_pixels_round_and_saturate():
    values = np.array([[[-0.5, 0.0, 0.5], [1.0, 1.5, 1 / 255]]])
    assert to_pixels(values, name="x").tolist() == [[[0, 0, 128], [255, 255, 1]]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_pictures_with_nan_or_inf_are_named(bad):
    values = np.zeros((4, 4, 3))
    values[1, 2, 0] = bad
    with pytest.raises(NonFiniteError, match=r"packed, prompt 3 \('a ball'\): 1 of 48 values"):
        to_pixels(values, name="packed, prompt 3 ('a ball')")


def test_difference_is_amplified_and_saturates():
    first = np.full((1, 1, 3), 100, np.uint8)
    second = np.array([[[100, 97, 200]]], np.uint8)
    assert amplified_difference(first, second, gain=8).tolist() == [[[0, 24, 255]]]


def test_png_round_trip_is_exact(tmp_path):
    save_png(pixels(), tmp_path / "a" / "x.png")
    assert (read_image(tmp_path / "a" / "x.png") == pixels()).all()


def test_grey_becomes_rgb_and_transparency_is_refused(tmp_path):
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(tmp_path / "grey.png")
    assert (read_image(tmp_path / "grey.png") == 7).all()
    Image.new("RGBA", (8, 8), (1, 2, 3, 0)).save(tmp_path / "clear.png")
    with pytest.raises(InputError, match="transparent pixels"):
        read_image(tmp_path / "clear.png")
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(InputError, match="wanted an 8-bit RGB or grey picture"):
        read_image(tmp_path / "deep.png")
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(InputError, match="not a picture"):
        read_image(tmp_path / "text.png")


def write_folders(tmp_path, pairs):
    for side in ("original", "packed"):
        for name, picture in zip(pairs.names, getattr(pairs, side), strict=True):
            save_png(picture, tmp_path / side / f"{name}.png")
    return tmp_path / "original", tmp_path / "packed"


def test_folders_are_matched_by_name(tmp_path):
    pairs = made_pairs(3)
    found = match_folders(*write_folders(tmp_path, pairs))
    assert found.names == pairs.names
    assert all((a == b).all() for a, b in zip(found.packed, pairs.packed, strict=True))


def test_folders_that_do_not_match_are_refused(tmp_path):
    first, second = write_folders(tmp_path, made_pairs(3))
    with pytest.raises(InputError, match="2 prompts for 3 pictures"):
        match_folders(first, second, ("a", "b"))
    save_png(pixels(width=48), second / "001.png")
    with pytest.raises(ShapeError, match="001: 40x48 against 48x48"):
        match_folders(first, second)
    (second / "001.png").unlink()
    with pytest.raises(InputError, match=r"packed: no partner for 1 of 3 pictures .* 001.png"):
        match_folders(first, second)
    with pytest.raises(InputError, match=r"packed: no partner for 1 of 3"):
        match_folders(second, first)
    with pytest.raises(InputError, match="not a folder"):
        match_folders(first, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no pictures"):
        match_folders(first, tmp_path / "empty")
    save_png(pixels(), first / "000.bmp.png")
    Image.fromarray(pixels()).save(first / "000.bmp")
    with pytest.raises(InputError, match="have the same name"):
        match_folders(first, second)


# --- quantkit eval images


def run_images(*arguments):
    return CliRunner().invoke(evaluate, ["images", *map(str, arguments)])


def test_eval_images_prints_what_the_metrics_give(tmp_path):
    pairs = made_pairs(3)
    folders = write_folders(tmp_path, pairs)
    result = run_images(*folders, "--without", "lpips", "--json", "--quiet")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    wanted = compare(pairs, Backbones())
    assert found["schema"] == "quantkit.images"
    assert found["names"] == list(pairs.names)
    for name, score in wanted.scores.items():
        assert found["metrics"][name]["values"] == pytest.approx(score.values)
    table = run_images(*folders, "--without", "lpips", "--quiet")
    assert "SSIM" in table.stdout
    assert "3 pairs" in table.stdout


def test_eval_images_of_identical_folders_is_valid_json(tmp_path):
    first, _ = write_folders(tmp_path, made_pairs(3))
    result = run_images(first, first, "--without", "lpips", "--json", "--quiet")

    def refuse(constant):
        raise AssertionError(constant)

    psnr = json.loads(result.stdout, parse_constant=refuse)["metrics"]["psnr"]
    assert psnr["values"] == [None] * 3
    assert psnr["null_means"] == "infinite: identical pictures"
    assert psnr["summary"]["mean"] is None
    assert psnr["summary"]["note"].startswith("3 of 3 pairs identical")


def test_eval_images_with_prompts_scores_clip_and_keeps_gates(
    tmp_path, clip_dir, alexnet_file, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "160")
    originals = tuple(pixels(seed, 40, 40) for seed in range(2))
    folders = write_folders(tmp_path, Pairs(("a", "b"), originals, originals))
    (tmp_path / "prompts.txt").write_text("a red ball\na blue box\n")
    arguments = (
        *folders, "--prompts", tmp_path / "prompts.txt", "--clip", clip_dir, "--quiet",
        "--lpips-weights", alexnet_file, "--json",
    )  # fmt: skip
    good = run_images(*arguments, "--gate-clip", "1", "--gate-lpips", "0.1", "--gate-ssim", "0.9")
    assert good.exit_code == 0, good.output
    found = json.loads(good.stdout)
    assert found["clip"]["backbone"] == "tiny-clip (CLIP)"
    assert found["metrics"]["lpips"]["backbone"] == "ImageNet AlexNet"
    assert found["metrics"]["lpips"]["values"] == [0.0, 0.0]
    table = run_images(*arguments[:-1], "--gate-lpips", "0.1")
    assert "LPIPS [ImageNet AlexNet]" in table.stdout
    assert "tiny-clip (CLIP)" in table.stdout
    bad = run_images(*arguments, "--gate-ssim", "1.5")
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["gates"][0]["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--gate-clip", "1"), "CLIP score needs the prompts"),
        (("--gate-lpips", "1", "--without", "lpips"), "lpips: it is left out"),
    ],
)
def test_eval_images_refuses_gates_that_it_cannot_judge(tmp_path, arguments, wanted):
    result = run_images(*write_folders(tmp_path, made_pairs(2)), "--quiet", *arguments)
    with pytest.raises(InputError, match=wanted):
        raise result.exception
