"""Model cards of packed directories, read by huggingface_hub; figures of an evaluation in them."""

import pytest
from huggingface_hub import ModelCard
from quantkit.eval.pages.model_card import update_card

from quantkit.checkpoint.filelist import CARD
from quantkit.checkpoint.verification import verify
from quantkit.progress import silent
from tests.support.packing import component, run, small_tensors
from tests.support.reports import made, made_report

pytestmark = pytest.mark.usefixtures("any_model")

BASE = """---
license: other
license_name: {name}
license_link: LICENSE.md
language: [en]
pipeline_tag: text-to-video
tags: [theirs]
base_model: someone/else
---
# Theirs
"""


def packed(tmp_path, card=None):
    """Return the card of a model that came from the hub with a card of its own."""
    source = component(tmp_path / "models--owner--name" / "snapshots" / "12ab", small_tensors())
    if card is not None:
        (source / CARD).write_bytes(card if isinstance(card, bytes) else card.encode())
    summary = run(source, tmp_path / "packed", {"name": "fp8"})
    return summary, ModelCard.load(tmp_path / "packed" / CARD)


def test_the_card_tells_base_recipe_bytes_and_licence(tmp_path):
    summary, card = packed(tmp_path, BASE.format(name="open-rail"))
    assert card.data.to_dict() == {
        "base_model": "owner/name",
        "base_model_relation": "quantized",
        "language": ["en"],
        "library_name": "diffusers",
        "license": "other",
        "license_link": "LICENSE.md",
        "license_name": "open-rail",
        "pipeline_tag": "text-to-video",
        "tags": ["quantkit", "e4m3fn"],
    }
    assert "quantkit pack owner/name -r fp8 -o OUTPUT" in card.text
    assert "quantkit export THIS --to comfyui" in card.text
    before, after = summary.sizes.split(" (")[0].split(" -> ")
    assert f"{before} before, {after} packed" in card.text
    assert "Theirs" not in card.text
    assert "That of the base model: open-rail (<LICENSE.md>)." in card.text


@pytest.mark.parametrize(
    "card",
    [
        None,
        "",
        "no front matter",
        "---\nlicense: [\n---\n",
        "---\n- a list\n---\n",
        "---\nlicense: {a: b}\n---\n",
        "---\nmodel-index: 5\n---\n",
        f"---\nlicense: {'[' * 5000}\n---\n",
        b"---\nlicense: \xff\n---\n",
        "---\nlicense: [" + "a, " * 10**6 + "]\n---\n",
    ],
    ids=["none", "empty", "text", "broken", "list", "table", "index", "deep", "bytes", "large"],
)
def test_a_base_without_a_sound_card_is_packed_all_the_same(tmp_path, card):
    _, found = packed(tmp_path, card)
    assert found.data.license is None
    assert found.data.base_model == "owner/name"
    assert "look at its page" in found.text


def test_a_directory_of_ones_own_has_no_base_model_to_name(tmp_path):
    source = component(tmp_path / "mine | **x**", small_tensors())
    run(source, tmp_path / "packed", {"name": "fp8"})
    card = ModelCard.load(tmp_path / "packed" / CARD)
    assert card.data.base_model is None
    assert "base_model_relation" not in card.data
    assert "mine - --x--, recipe fp8" in card.text


def test_an_evaluation_replaces_its_section_and_leaves_the_rest(tmp_path):
    packed(tmp_path, BASE.format(name="open-rail"))
    path = tmp_path / "packed" / CARD
    path.write_text(path.read_text().replace("## Licence", "## Words of mine\n\n## Licence"))
    report = made_report(made())
    for _ in range(2):
        assert update_card(tmp_path / "packed", report)
    card = ModelCard.load(path)
    scores = report.comparison.scores
    found = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert {n: found[n] for n in ("ssim", "psnr")} == {
        n: scores[n].summary.mean for n in ("ssim", "psnr")
    }
    assert card.text.count("SSIM ↑") == 1
    assert f"{scores['ssim'].summary.mean:.4g}" in card.text
    assert "Not measured yet" not in card.text
    assert "## Words of mine" in card.text
    assert card.data.license_name == "open-rail"
    assert verify(tmp_path / "packed", progress=silent).unchecked == ()


def test_cards_that_are_not_ours_stay(tmp_path):
    report = made_report(made())
    assert not update_card(tmp_path, report)
    (tmp_path / CARD).write_text("---\nlicense: mit\n---\nmine\n")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / CARD).symlink_to(tmp_path / CARD)
    for folder in (tmp_path, tmp_path / "linked"):
        assert not update_card(folder, report)
    assert (tmp_path / CARD).read_text() == "---\nlicense: mit\n---\nmine\n"
