"""The bundled world: scenes, captions, pictures, tokenizer, feature network and trained assets."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantkit.eval.world import scenes as world
from quantkit.eval.world.alexnet import (
    STAGES,
    FeatureNetwork,
    load_feature_network,
    perceptual_distance,
    save_feature_network,
    tap_distances,
)
from quantkit.eval.world.outlines import SHAPES, signed_distance
from torch import Generator, nn

from docs.training import (
    sheet,
    tokens,
    train_clip,
    train_common,
    train_samples,
    train_unet,
)
from docs.training.render import draw_pictures, render
from docs.training.scene_layout import SIDE, lay_out
from docs.training.train import main as run_training
from docs.training.train_vae import psnr
from quantkit.errors import ModelError
from quantkit.resources import demo_assets

#: What all assets together may take in git.
MOST_BYTES = 32_000_000
FIELDS = ("relation", "shape", "colour", "size", "fill", "ground", "pattern")


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def plain_scenes(count: int, seed: int = 0) -> world.Scenes:
    scenes = world.draw_scenes(count, seeded(seed))
    return replace(
        scenes,
        fill=torch.full_like(scenes.fill, world.FILLS.index("solid")),
        pattern=torch.full_like(scenes.pattern, world.PATTERNS.index("plain")),
    )


def colour_map(scenes: world.Scenes, pictures: torch.Tensor) -> torch.Tensor:
    """Return for each pixel which of object 0, object 1 and ground its colour is nearest to."""
    table = torch.tensor(list(world.COLOURS.values()))
    ours = table[torch.cat((scenes.colour, scenes.ground[:, None]), dim=1)]
    apart = (pictures[:, None] - ours[..., None, None]).square().sum(2)
    apart[scenes.relation == world.ALONE, 1] = torch.inf
    return apart.argmin(1)


# Scenes and captions


def test_equal_seeds_draw_equal_scenes_and_pictures():
    (first, one), (second, other) = (draw_pictures(16, seeded(5)) for _ in range(2))
    assert world.captions(first) == world.captions(second)
    assert torch.equal(one, other)


def test_other_seeds_draw_other_scenes():
    assert world.captions(world.draw_scenes(16, seeded(5))) != world.captions(
        world.draw_scenes(16, seeded(6))
    )


def test_colours_of_one_picture_differ():
    scenes = world.draw_scenes(2000, seeded())
    colours = torch.cat((scenes.colour, scenes.ground[:, None]), dim=1).sort(dim=1).values
    assert (colours.diff(dim=1) > 0).all()


@pytest.mark.parametrize(
    ("field", "table"),
    [
        ("relation", world.RELATIONS),
        ("shape", SHAPES),
        ("colour", world.COLOURS),
        ("size", world.SIZES),
        ("fill", world.FILLS),
        ("ground", world.COLOURS),
        ("pattern", world.PATTERNS),
    ],
)
def test_every_row_of_every_table_is_drawn(field, table):
    drawn = getattr(world.draw_scenes(2000, seeded()), field).unique()
    assert drawn.tolist() == list(range(len(table)))


def test_caption_says_every_attribute_and_nothing_else():
    scenes = world.draw_scenes(500, seeded(1))
    thing = (
        rf"a (?P<size{{0}}>{'|'.join(world.SIZES)}) (?P<colour{{0}}>{'|'.join(world.COLOURS)})"
        rf"(?: (?P<fill{{0}}>{'|'.join(world.FILLS[1:])}))? (?P<shape{{0}}>{'|'.join(SHAPES)})"
    )
    colours, patterns = "|".join(world.COLOURS), "|".join(world.PATTERNS[1:])
    relations = "|".join(world.RELATIONS[1:])
    grammar = re.compile(
        thing.format(0)
        + rf"(?: (?P<relation>{relations}) {thing.format(1)})?"
        + rf" on an? (?:plain (?P<plain>{colours})|(?P<ground>{colours}) (?P<pattern>{patterns}))"
        + " background"
    )
    for index, caption in enumerate(world.captions(scenes)):
        found = grammar.fullmatch(caption)
        assert found, caption
        said = found.groupdict()
        relation = world.RELATIONS[scenes.relation[index]]
        assert (said["relation"] or "alone") == relation
        for slot in range(1 if relation == "alone" else 2):
            assert said[f"size{slot}"] == world.SIZES[scenes.size[index, slot]]
            assert said[f"colour{slot}"] == list(world.COLOURS)[scenes.colour[index, slot]]
            assert (said[f"fill{slot}"] or "solid") == world.FILLS[scenes.fill[index, slot]]
            assert said[f"shape{slot}"] == list(SHAPES)[scenes.shape[index, slot]]
        assert (said["plain"] or said["ground"]) == list(world.COLOURS)[scenes.ground[index]]
        assert (said["pattern"] or "plain") == world.PATTERNS[scenes.pattern[index]]


def test_caption_takes_the_article_that_english_takes():
    found = " ".join(world.captions(world.draw_scenes(2000, seeded())))
    assert "an orange" in found
    assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", found)


def test_varied_scenes_differ_in_exactly_one_respect():
    scenes = world.draw_scenes(2000, seeded(2))
    varied = world.vary_scenes(scenes, seeded(3))
    pairs = zip(world.captions(scenes), world.captions(varied), strict=True)
    assert all(one != other for one, other in pairs)
    changed = {
        name: (getattr(scenes, name) != getattr(varied, name)).reshape(2000, -1) for name in FIELDS
    }
    counts = {name: value.sum(1) for name, value in changed.items()}
    colours = counts["colour"] + counts["ground"]
    assert ((colours == 0) | (colours == 2)).all()  # an exchange touches two places
    others = sum(counts[name] for name in FIELDS if name not in ("colour", "ground"))
    assert (others + colours // 2 == 1).all()


def test_varied_scenes_keep_the_colours_different():
    varied = world.vary_scenes(world.draw_scenes(2000, seeded()), seeded(1))
    colours = torch.cat((varied.colour, varied.ground[:, None]), dim=1).sort(dim=1).values
    assert (colours.diff(dim=1) > 0).all()


def test_order_does_not_depend_on_which_object_is_named_first():
    scenes = world.draw_scenes(500, seeded(4))
    converse = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    table = [world.RELATIONS.index(converse.get(name, name)) for name in world.RELATIONS]
    pair = scenes.relation != world.ALONE
    turned = replace(
        scenes,
        relation=torch.tensor(table)[scenes.relation],
        **{
            name: torch.where(pair[:, None], getattr(scenes, name).flip(1), getattr(scenes, name))
            for name in ("shape", "colour", "size", "fill")
        },
    )
    one, other = world.order_scenes(scenes), world.order_scenes(turned)
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)
    again = world.order_scenes(one)
    assert all(torch.equal(getattr(one, name), getattr(again, name)) for name in FIELDS)


def test_distinct_scenes_have_distinct_captions():
    assert len(set(world.captions(world.draw_distinct_scenes(512, seeded())))) == 512


# Pictures


def test_pictures_have_the_promised_shape_and_range():
    pictures = draw_pictures(64, seeded())[1]
    assert pictures.shape == (64, 3, SIDE, SIDE)
    assert pictures.dtype == torch.float32
    assert pictures.min() >= 0
    assert pictures.max() <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_outline_is_centred_and_fills_its_radius(shape):
    axis = torch.linspace(-1.5, 1.5, 301)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    inside = signed_distance(torch.tensor([list(SHAPES).index(shape)]), x[None], y[None])[0] < 0
    assert 1.1 < inside.double().mean() * 9 < 3.4  # a circle of radius 1 has 3.14
    for axis_inside in (x[inside], y[inside]):
        assert axis_inside.min() == pytest.approx(-axis_inside.max().item(), abs=0.25)
        assert 0.75 < axis_inside.max() < 1.25
    assert not inside[0].any()
    assert not inside[:, 0].any()


def test_objects_have_the_colours_and_stand_as_the_caption_says():
    scenes = plain_scenes(150, seed=7)
    nearest = colour_map(scenes, render(scenes, lay_out(scenes, seeded(8))))
    axis = torch.arange(SIDE, dtype=torch.float32)
    for index, picture in enumerate(nearest):
        masks = [picture == slot for slot in range(2)]
        assert masks[0].sum() > 60, world.captions(scenes[index : index + 1])
        relation = world.RELATIONS[scenes.relation[index]]
        if relation == "alone":
            continue
        assert masks[1].sum() > 60
        # Antialiased edges between two colours may look like the third: medians do not mind.
        (x0, y0), (x1, y1) = (
            (
                axis[None].expand(SIDE, SIDE)[mask].median().item(),
                axis[:, None].expand(SIDE, SIDE)[mask].median().item(),
            )
            for mask in masks
        )
        ahead = {"left of": x1 - x0, "right of": x0 - x1, "above": y1 - y0, "below": y0 - y1}
        assert ahead[relation] > SIDE / 4


def test_large_objects_cover_more_than_small_ones():
    scenes = plain_scenes(80, seed=9)
    small = replace(scenes, size=torch.zeros_like(scenes.size))
    large = replace(scenes, size=torch.ones_like(scenes.size))
    covered = [
        (colour_map(scenes, render(which, lay_out(which, seeded(1)))) < 2).sum((1, 2))
        for which in (small, large)
    ]
    assert (covered[1] > 1.8 * covered[0]).all()


def test_objects_stay_inside_and_apart():
    scenes = world.draw_scenes(3000, seeded(3))
    layout = lay_out(scenes, seeded(4))
    reach = layout.radius[..., None]
    shown = torch.stack((torch.ones(3000), scenes.relation != world.ALONE), dim=1).bool()
    assert (layout.centre - reach > 0)[shown].all()
    assert (layout.centre + reach < SIDE)[shown].all()
    apart = (layout.centre[:, 0] - layout.centre[:, 1]).abs().amax(1)
    assert (apart > layout.radius.sum(1))[shown[:, 1]].all()


@pytest.mark.parametrize("fill", world.FILLS[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_fill_shows_on_every_shape(shape, fill):
    scenes = plain_scenes(16, seed=11)
    scenes = replace(scenes, shape=torch.full_like(scenes.shape, list(SHAPES).index(shape)))
    filled = replace(scenes, fill=torch.full_like(scenes.fill, world.FILLS.index(fill)))
    one, other = (render(which, lay_out(which, seeded(2))) for which in (scenes, filled))
    assert ((one - other).abs().amax(1) > 0.25).sum((1, 2)).min() >= 12


@pytest.mark.parametrize("pattern", world.PATTERNS[1:])
def test_pattern_shows_on_every_ground(pattern):
    scenes = plain_scenes(24, seed=12)
    patterned = replace(
        scenes, pattern=torch.full_like(scenes.pattern, world.PATTERNS.index(pattern))
    )
    one, other = (render(which, lay_out(which, seeded(2))) for which in (scenes, patterned))
    assert ((one - other).abs().amax(1) > 0.1).sum((1, 2)).min() > 400


# Tokenizer


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokens.write_tokenizer(folder)
    return folder


@pytest.fixture(params=["CLIPTokenizer", "AutoTokenizer"])
def tokenizer(request, tokenizer_folder):
    import transformers

    return getattr(transformers, request.param).from_pretrained(tokenizer_folder)


def test_every_word_of_the_world_is_one_token(tokenizer):
    lengths = {word: len(tokenizer(word).input_ids) - 2 for word in tokens.world_words()}
    assert set(lengths.values()) == {1}, lengths


def test_captions_encode_alike_with_and_without_strings(tokenizer):
    scenes = world.draw_scenes(1000, seeded(3))
    texts = world.captions(scenes)
    found = tokenizer(
        texts, padding="max_length", max_length=tokens.MAX_LENGTH, return_tensors="pt"
    ).input_ids
    assert torch.equal(found, tokens.CaptionEncoder.of_world().encode(scenes))
    decoded = tokenizer.batch_decode(found, skip_special_tokens=True)
    assert [text.strip() for text in decoded] == texts


def test_the_empty_caption_is_start_and_ends(tokenizer):
    found = tokenizer("", padding="max_length", return_tensors="pt").input_ids
    assert torch.equal(found, tokens.CaptionEncoder.of_world().empty(1, "cpu"))


@pytest.mark.parametrize("text", ["zebra", "naïve café", "漢字", "\x00\x7f", "🟥 left-of 42%"])
def test_any_string_survives_in_bytes(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.unk_token_id not in ids[1:-1]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded.replace(" ", "") == text.lower().replace(" ", "")


def test_long_captions_are_cut_to_the_length_of_the_text_model(tokenizer):
    ids = tokenizer("zebra " * 40, truncation=True).input_ids
    assert len(ids) == tokens.MAX_LENGTH == tokenizer.model_max_length
    assert ids[-1] == tokenizer.eos_token_id == len(tokenizer) - 1


# Feature network


@pytest.fixture
def network():
    torch.manual_seed(0)
    return FeatureNetwork().eval()


def test_feature_network_returns_five_taps_of_relus(network):
    taps = network(torch.randn(2, 3, SIDE, SIDE))
    assert [tap.shape[1] for tap in taps] == [stage.channels for stage in STAGES]
    assert all(tap.min() >= 0 for tap in taps)
    assert [tap.shape[-1] for tap in taps] == [32, 15, 7, 7, 7]


def test_tap_distances_agree_with_the_lpips_package(network):
    lpips = pytest.importorskip("lpips")
    first, second = torch.rand(2, 3, 3, SIDE, SIDE, generator=seeded()) * 2 - 1
    with torch.no_grad():
        expected = [
            lpips.spatial_average(
                ((lpips.normalize_tensor(one) - lpips.normalize_tensor(other)) ** 2).sum(
                    1, keepdim=True
                )
            ).flatten()
            for one, other in zip(network(first), network(second), strict=True)
        ]
        found = tap_distances(network, first, second)
    torch.testing.assert_close(found, torch.stack(expected, dim=1))


def test_distance_is_zero_for_equals_symmetric_and_grows_with_noise(network):
    pictures = 2 * draw_pictures(8, seeded())[1] - 1
    noise = torch.randn(pictures.shape, generator=seeded(1))
    with torch.no_grad():
        assert (perceptual_distance(network, pictures, pictures) == 0).all()
        levels = [perceptual_distance(network, pictures, pictures + a * noise) for a in (0.05, 0.5)]
        back = perceptual_distance(network, pictures + 0.5 * noise, pictures)
    assert (levels[0] > 0).all()
    assert (levels[1] > levels[0]).all()
    torch.testing.assert_close(levels[1], back)


def test_feature_network_survives_saving(network, tmp_path):
    save_feature_network(network.half().float(), tmp_path, {"training": "none"})
    loaded = load_feature_network(tmp_path)
    pictures = torch.randn(1, 3, SIDE, SIDE)
    with torch.no_grad():
        pairs = zip(network(pictures), loaded(pictures), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert json.loads((tmp_path / "config.json").read_text())["training"] == "none"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_of_the_feature_network_is_named(network, tmp_path, name):
    save_feature_network(network, tmp_path, {})
    (tmp_path / name).unlink()
    with pytest.raises(ModelError, match=f"{name}: missing"):
        load_feature_network(tmp_path)


def test_weights_of_another_network_are_refused(network, tmp_path):
    save_feature_network(network, tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    config["stages"][2]["channels"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config.json and model.safetensors are not those of one"):
        load_feature_network(tmp_path)


# Training


def options(tmp_path: Path, **changes: Any) -> train_common.Options:
    plain = train_common.Options(
        out=tmp_path,
        device=torch.device("cpu"),
        scale=1.0,
        batch_scale=1.0,
        compiled=False,
        seed=0,
    )
    return replace(plain, **changes)


def test_training_leaves_the_average_of_a_model_that_learned():
    torch.manual_seed(0)
    model, expected = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(requires_grad=False)
    generator = seeded()

    def draw_loss() -> torch.Tensor:
        x = torch.randn(64, 4, generator=generator)
        return (model(x) - expected(x)).square().mean()

    before = draw_loss().item()
    plan = train_common.TrainingPlan(steps=300, batch=64, rate=0.05, warm_up=10, average=0.9)
    train_common.train("line", model, draw_loss, plan, torch.device("cpu"))
    assert draw_loss().item() < 1e-3 * before


def test_plans_shrink_with_the_run(tmp_path):
    plan = train_common.TrainingPlan(steps=1000, batch=512, rate=1e-3, warm_up=100)
    assert options(tmp_path).fit_plan(plan) == plan
    small = options(tmp_path, scale=1e-6, batch_scale=1e-6).fit_plan(plan)
    assert (small.steps, small.batch, small.warm_up) == (2, 8, 0)


def test_figures_are_replaced_whole(tmp_path):
    assert train_common.read_figures(tmp_path) == {}
    train_common.write_figures(tmp_path, {"clip": {"steps": 1}})
    train_common.write_figures(tmp_path, {"vae": {"steps": 2}})
    assert train_common.read_figures(tmp_path) == {"vae": {"steps": 2}}
    assert [path.name for path in tmp_path.iterdir()] == ["training.json"]


def test_unknown_stage_is_refused_before_anything_is_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_training(["-o", str(tmp_path / "out"), "--stages", "clip,vea"])
    assert stopped.value.code == 2
    assert "no stage 'vea'; choose from clip, vae" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sheet_has_every_picture_and_wraps_captions(tmp_path):
    from PIL import Image

    texts = world.captions(world.draw_scenes(7, seeded()))
    sheet.save_sheet(torch.zeros(7, 3, 64, 64), texts, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as found:
        pixels = torch.tensor(list(found.convert("L").tobytes())).reshape(found.height, found.width)
    assert (pixels == 0).sum() >= 7 * (64 * 3) ** 2


# Trained assets


@pytest.fixture(scope="module")
def assets():
    return Path(demo_assets())


@pytest.fixture(scope="module")
def figures(assets):
    return train_common.read_figures(assets)


@pytest.fixture(scope="module")
def pipeline(assets):
    from diffusers import StableDiffusionPipeline

    found = StableDiffusionPipeline.from_pretrained(assets / "pipeline")
    found.set_progress_bar_config(disable=True)
    return found.to(torch.float32)


def test_assets_fit_in_the_repository(assets):
    sizes = {path: path.stat().st_size for path in assets.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= MOST_BYTES
    assert sizes[assets / "contact_sheet.png"] < 300_000


@pytest.mark.parametrize(
    ("stage", "figure", "least"),
    [
        ("clip", "captions_found_of_512", 0.99),
        ("clip", "pictures_found_of_512", 0.99),
        ("vae", "psnr_db", 32.0),
        ("alexnet", "accuracy", 0.97),
        ("samples", "matched_of_64", 0.95),
        ("samples", "matched_of_512", 0.95),
    ],
)
def test_recorded_figures_meet_their_bars(figures, stage, figure, least):
    assert figures[stage][figure] >= least


def test_recorded_training_took_under_fifteen_minutes_on_one_gpu(figures):
    assert sum(stage["seconds"] for stage in figures.values()) < 15 * 60
    assert {stage["device"] for stage in figures.values()} == {"NVIDIA H200"}


def test_recorded_cost_is_that_of_the_unet(figures, pipeline):
    assert figures["unet"]["gflop"] == pytest.approx(train_unet.gflop())
    assert figures["unet"]["gflop"] <= 2.2
    assert figures["unet"]["parameters"] == sum(p.numel() for p in pipeline.unet.parameters())


def test_prompts_are_the_held_out_captions(assets):
    texts = (assets / "prompts.txt").read_text(encoding="utf-8").splitlines()
    held_out = world.draw_distinct_scenes(train_samples.PROMPTS, seeded(train_common.PROMPT_SEED))
    assert texts == world.captions(held_out)


def test_weights_are_half_precision_and_finite(assets):
    from safetensors import safe_open

    found = list(assets.rglob("*.safetensors"))
    assert len(found) == 5
    for path in found:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                tensor = file.get_tensor(name)
                assert tensor.dtype == torch.float16, (path, name)
                assert tensor.isfinite().all(), (path, name)


def test_every_packable_layer_of_the_unet_has_k_in_multiples_of_32(pipeline):
    inner = {
        name: module.in_channels if isinstance(module, nn.Conv2d) else module.in_features
        for name, module in pipeline.unet.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear)) and name != "conv_in"
    }
    assert len(inner) > 80
    assert {name: k for name, k in inner.items() if k % 32} == {}


def test_text_model_pools_at_the_end_of_the_caption(pipeline):
    ids = pipeline.tokenizer(
        ["a small red circle", "a small red circle on a plain blue background"],
        padding="max_length",
        return_tensors="pt",
    ).input_ids
    with torch.no_grad():
        found = pipeline.text_encoder(ids)
    ends = (ids == pipeline.tokenizer.eos_token_id).long().argmax(1)
    torch.testing.assert_close(found.pooler_output, found.last_hidden_state[torch.arange(2), ends])


def test_clip_loads_with_its_processor_and_agrees_with_the_training_input(assets):
    from PIL import Image
    from transformers import CLIPModel, CLIPProcessor

    scenes, pictures = draw_pictures(4, seeded())
    shown = (pictures * 255).round().to(torch.uint8)
    images = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in shown]
    processor = CLIPProcessor.from_pretrained(assets / "clip")
    inputs = processor(
        text=world.captions(scenes), images=images, return_tensors="pt", padding=True
    )
    torch.testing.assert_close(inputs["pixel_values"], shown / 127.5 - 1)
    model = CLIPModel.from_pretrained(assets / "clip").float().eval()
    with torch.no_grad():
        scores = model(**inputs).logits_per_image
    assert scores.argmax(1).tolist() == list(range(4))


def test_clip_finds_fresh_pictures_and_captions(assets):
    found = train_clip.retrieval(assets / "clip", torch.device("cpu"), 64)
    assert min(found.values()) >= 0.98


def test_autoencoder_rebuilds_fresh_pictures(assets):
    pictures = 2 * draw_pictures(32, seeded(99))[1] - 1
    assert psnr(assets / "pipeline" / "vae", pictures, torch.device("cpu")) >= 32


def test_feature_network_of_the_assets_ranks_noise_below_another_picture(assets):
    network = load_feature_network(assets / "alexnet")
    pictures = 2 * draw_pictures(64, seeded(98))[1] - 1
    noisy = pictures + 0.1 * torch.randn(pictures.shape, generator=seeded(1))
    with torch.no_grad():
        near = perceptual_distance(network, pictures, noisy)
        far = perceptual_distance(network, pictures, pictures.roll(1, 0))
    assert near.max() < far.min()
    assert far.mean().item() == pytest.approx(0.7, abs=0.07)


def test_sampled_pictures_are_matched_to_their_prompts(assets, pipeline, tmp_path):
    texts = (assets / "prompts.txt").read_text(encoding="utf-8").splitlines()[:4]
    pictures = train_samples.generate(pipeline, texts, steps=8, guidance=4.0)
    assert pictures.shape == (4, 3, SIDE, SIDE)
    assert train_samples.matched(options(assets), pictures, texts) == 1.0
