"""The networks behind LPIPS and CLIP scores, and what is said where they are missing."""

import math

import pytest
import torch
from quantkit.eval.measuring import backbones as backbones_module
from quantkit.eval.measuring.backbones import Backbones, load_backbones, load_clip, load_lpips
from quantkit.eval.world.alexnet import perceptual_distance, save_feature_network

from quantkit.errors import ModelError, ShapeError
from tests.support.pictures import CPU, pixels, small_lpips, small_network


def test_lpips_file_gives_what_the_lpips_package_gives(alexnet_file):
    import lpips

    oracle = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)
    state = torch.load(alexnet_file, weights_only=True)
    names = {f"features.{n.split('.', 1)[1]}": n for n in oracle.net.state_dict()}
    oracle.net.load_state_dict({ours: state[theirs] for theirs, ours in names.items()})
    first, second = pixels(0, 64, 64), pixels(1, 64, 64)
    tensors = [torch.tensor(p).permute(2, 0, 1)[None] / 127.5 - 1 for p in (first, second)]
    with torch.no_grad():
        expected = float(oracle(*tensors))
    backbone = load_lpips(alexnet_file, device=CPU)
    assert backbone.name == "ImageNet AlexNet"
    assert expected > 0.01
    assert backbone.distance(first, second) == pytest.approx(expected, rel=1e-5)


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
        expected = oracle.eval()(first, second).flatten()
    assert (expected > 1e-3).all()
    assert torch.allclose(ours, expected, rtol=1e-5)


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
    with pytest.raises(ShapeError, match="40x24 pixels; expected at least 32x32 for ImageNet"):
        load_lpips(alexnet_file, device=CPU).distance(small, small)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, r"weights\.pth: missing"),
        (b"not a state dict", "not a torch state dict"),
        ({"features.0.weight": torch.zeros(2, 3)}, r"features.0.weight: found \(2, 3\)"),
        ([1, 2], "features.0.weight: found nothing"),
    ],
    ids=["missing", "bytes", "other shape", "other object"],
)
def test_lpips_names_weights_that_cannot_be_used(tmp_path, content, expected):
    path = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ModelError, match=expected):
        load_lpips(path, device=CPU)


def test_lpips_without_cache_and_network_says_what_to_do(monkeypatch):
    from urllib.error import URLError

    def fail(**_):
        raise URLError("no route")

    monkeypatch.setattr(backbones_module, "_build", fail)
    with pytest.raises(ModelError, match=r"no route.*give its file, or none to leave LPIPS out"):
        load_lpips(None, device=CPU)


def test_clip_score_is_the_cosine_of_the_embeddings(clip_dir):
    from transformers import CLIPModel, CLIPProcessor

    picture, prompt = pixels(0, 16, 16), "a red ball"
    model, processor = CLIPModel.from_pretrained(clip_dir), CLIPProcessor.from_pretrained(clip_dir)
    inputs = processor(text=[prompt], images=[picture], return_tensors="pt")
    with torch.no_grad():
        output = model.eval()(**inputs)
    # The model multiplies the cosine by its learned temperature.
    expected = 100 * float(output.logits_per_image / model.logit_scale.detach().exp())
    backbone = load_clip(str(clip_dir), device=CPU)
    assert backbone.name == "tiny-clip (CLIP)"
    assert backbone.score(picture, prompt) == pytest.approx(expected, abs=1e-4)
    assert abs(expected) > 0.01


def test_clip_cuts_prompts_that_are_too_long(clip_dir):
    backbone = load_clip(str(clip_dir), device=CPU)
    assert math.isfinite(backbone.score(pixels(), "a red ball " * 30))


def test_clip_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no CLIP model could be loaded.*none to leave CLIP out"):
        load_clip(str(tmp_path / "nothing"), device=CPU)


def test_missing_networks_are_named_together(tmp_path):
    with pytest.raises(ModelError) as caught:
        load_backbones(tmp_path / "alexnet.pth", str(tmp_path / "clip"), device=CPU)
    for words in ("alexnet.pth: missing", "no CLIP model could be loaded", "quantkit eval fetch"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="no CLIP model") as alone:
        load_backbones(tmp_path / "alexnet.pth", str(tmp_path / "clip"), ("lpips",), device=CPU)
    assert "alexnet" not in str(alone.value)
    assert load_backbones(None, None, ("lpips", "clip"), device=CPU) == Backbones()


def test_fetch_says_which_networks_are_there(clip_dir):
    from click.testing import CliRunner

    from quantkit.cli import quantkit

    arguments = ["eval", "fetch", "--clip", str(clip_dir), "--lpips-weights", "none"]
    result = CliRunner().invoke(quantkit, arguments)
    assert (result.exit_code, result.stdout) == (0, "tiny-clip (CLIP): there\n")
