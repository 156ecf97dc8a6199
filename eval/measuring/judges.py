"""Judges of pictures beside the metrics: one row each in JUDGES, through the library that keeps it.

All are optional: nothing is imported or downloaded for a judge that was not asked for. What a
judge makes of a picture is kept, because the original's pictures come again with every comparison.
"""

import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantkit.eval.measuring.pictures import Pairs, Pixels
from quantkit.eval.measuring.sample_statistics import Summary, summarize, summarize_difference
from torch import Tensor

from quantkit.errors import InputError, ModelError, NonFiniteError
from quantkit.pipelines.running import quiet_libraries
from quantkit.storage.jsonfile import DAMAGE, short

#: Distances between sets of fewer pictures say more about their number than about the pictures.
LEAST_OF_A_SET = 256
PICKSCORE = "yuvalkirstain/PickScore_v1"
#: PickScore is finetuned from this one, and published without a processor of its own.
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

#: Of (first, second) pictures, of (picture, prompt), or of two lists of pictures.
Measure = Callable[[Any, Any], float]


class Takes(Enum):
    """The input of a judge."""

    #: the original's picture and the packed pipeline's
    PAIR = "pair"
    #: one picture and its prompt
    PICTURE = "picture"
    #: all pictures of both
    SETS = "sets"


@dataclass(frozen=True)
class Judge:
    """One judge, and how it is had."""

    name: str
    title: str
    takes: Takes
    higher_is_better: bool
    meaning: str
    #: modules that it imports, and what pip calls their packages
    modules: tuple[str, ...]
    packages: tuple[str, ...]
    #: source (None: the library's own weights) and device to a measure
    load: Callable[[str | None, torch.device], Measure]


@dataclass(frozen=True)
class LoadedJudge:
    """A judge with its weights."""

    judge: Judge
    measure: Measure
    #: weights in words, as they were given; empty for the library's own
    source: str = ""
    known: dict[bytes, float] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, first: Any, second: Any) -> float:
        """Return the judgement of two pictures, a picture and its prompt, or two lists.

        Raises:
            NonFiniteError: it is NaN or infinite.
        """
        key = _digest(first) + _digest(second)
        if key not in self.known:
            found = float(self.measure(first, second))
            if not isfinite(found):
                raise NonFiniteError(
                    f"{self.judge.name}: found {found}, which is no judgement; leave it out"
                )
            self.known[key] = found
        return self.known[key]


@dataclass(frozen=True)
class Judgement:
    """One judge's scores of all pictures."""

    judge: Judge
    source: str
    #: one per picture; empty for what takes pairs or sets
    original: tuple[float, ...]
    #: one per picture or pair, or one of the set
    packed: tuple[float, ...]
    summary: Summary
    #: packed - original, prompt by prompt; None for what takes pairs or sets
    change: Summary | None
    note: str = ""


def load_judges(asked: Sequence[str], *, device: torch.device) -> tuple[LoadedJudge, ...]:
    """Return judges with their weights.

    Args:
        asked: names of JUDGES, each with ``=SOURCE`` where other weights than the library's are
            taken.
        device: where they run.

    Raises:
        InputError: an unknown name, or packages that are not installed.
        ModelError: weights that cannot be had.
    """
    return tuple(_load(text, device) for text in dict.fromkeys(asked))


def give_judgement(judge: LoadedJudge, pairs: Pairs) -> Judgement:
    """Return what a judge makes of pairs of pictures."""
    takes = judge.judge.takes
    if takes is Takes.SETS:
        return _judge_sets(judge, pairs)
    if takes is Takes.PAIR:
        values = tuple(map(judge, pairs.original, pairs.packed))
        return Judgement(judge.judge, judge.source, (), values, summarize(values), None)
    prompts = pairs.prompts or ("",) * len(pairs.names)
    before = tuple(map(judge, pairs.original, prompts))
    after = tuple(map(judge, pairs.packed, prompts))
    change = summarize_difference(after, before)
    return Judgement(judge.judge, judge.source, before, after, summarize(after), change)


def _judge_sets(judge: LoadedJudge, pairs: Pairs) -> Judgement:
    count = len(pairs.names)
    if count < LEAST_OF_A_SET:
        note = f"{count} pictures; expected at least {LEAST_OF_A_SET}"
        return Judgement(judge.judge, judge.source, (), (), summarize([]), None, note)
    value = judge(pairs.original, pairs.packed)
    return Judgement(judge.judge, judge.source, (), (value,), summarize([value]), None)


def _load(text: str, device: torch.device) -> LoadedJudge:
    name, _, source = text.partition("=")
    if name not in JUDGES:
        raise InputError(f"judge {name!r:.80}: unknown; expected one of {', '.join(JUDGES)}")
    judge = JUDGES[name]
    if missing := [module for module in judge.modules if find_spec(module) is None]:
        raise InputError(
            f"judge {name}: needs {', '.join(missing)}, which is not installed; "
            f"pip install {' '.join(judge.packages)}"
        )
    try:
        with quiet_libraries():
            return LoadedJudge(judge, judge.load(source or None, device), source)
    except (*DAMAGE, OSError, RuntimeError) as error:
        raise ModelError(
            f"judge {name}: its weights cannot be had ({short(error)}); leave it out, or let it "
            "download them once where there is a network"
        ) from error


def _digest(value: Any) -> bytes:
    """Return what identifies a prompt, a picture, or a list of pictures."""
    if isinstance(value, str):
        return hashlib.sha256(value.encode()).digest()
    if isinstance(value, np.ndarray):
        shape = repr(value.shape).encode()
        return hashlib.sha256(shape + np.ascontiguousarray(value).tobytes()).digest()
    return hashlib.sha256(b"".join(map(_digest, value))).digest()


def _load_dists(source: str | None, device: torch.device) -> Measure:
    _refuse_source("dists", source)
    network = importlib.import_module("torchmetrics.functional.image.dists").DISTSNetwork()
    network = network.to(device).eval()

    def measure(first: Pixels, second: Pixels) -> float:
        with torch.inference_mode():
            return float(network(_unit(first, device), _unit(second, device)))

    return measure


def _load_clip_iqa(source: str | None, device: torch.device) -> Measure:
    _refuse_source("clip-iqa", source)
    network = importlib.import_module("piq").CLIPIQA(data_range=1.0).to(device).eval()

    def measure(picture: Pixels, prompt: str) -> float:
        del prompt
        with torch.inference_mode():
            return float(network(_unit(picture, device)))

    return measure


def _load_pickscore(source: str | None, device: torch.device) -> Measure:
    from transformers import CLIPModel, CLIPProcessor

    local = source is not None and Path(source).is_dir()
    model: Any = CLIPModel.from_pretrained(
        source or PICKSCORE, dtype=torch.float32, use_safetensors=True
    )
    processor: Any = CLIPProcessor.from_pretrained(source if local else PICKSCORE_PROCESSOR)
    model = model.to(device).eval()

    def measure(picture: Pixels, prompt: str) -> float:
        inputs = processor(
            text=[prompt], images=[picture], return_tensors="pt", padding=True, truncation=True
        ).to(device)
        with torch.inference_mode():
            return float(model(**inputs).logits_per_image)

    return measure


def _load_fid(source: str | None, device: torch.device) -> Measure:
    metric = importlib.import_module("torchmetrics.image.fid").FrechetInceptionDistance
    distance = metric(feature_extractor_weights_path=source).to(device)
    return _between_sets(distance, float)


def _load_kid(source: str | None, device: torch.device) -> Measure:
    _refuse_source("kid", source)
    metric = importlib.import_module("torchmetrics.image.kid").KernelInceptionDistance
    distance = metric(subset_size=LEAST_OF_A_SET // 2).to(device)
    return _between_sets(distance, lambda found: 1e3 * float(found[0]))


def _between_sets(distance: Any, read: Callable[[Any], float]) -> Measure:
    def measure(first: Sequence[Pixels], second: Sequence[Pixels]) -> float:
        distance.reset()
        # KID draws subsets: the same ones in every comparison.
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(0)
            for pictures, real in ((first, True), (second, False)):
                for picture in pictures:
                    pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None]
                    distance.update(pixels.to(distance.device), real=real)
            return read(distance.compute())

    return measure


def _refuse_source(name: str, source: str | None) -> None:
    if source is not None:
        raise InputError(f"judge {name}: takes its library's own weights; drop ={source:.80}")


def _unit(pixels: Pixels, device: torch.device) -> Tensor:
    """Return a picture as (1, 3, H, W) float32 in [0, 1]."""
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    return tensor.to(device, torch.float32) / 255.0


_JUDGES = (
    Judge(
        "dists", "DISTS", Takes.PAIR, False, "distance of structure and texture (VGG16)",
        ("torchmetrics",), ("torchmetrics>=1.7",), _load_dists,
    ),
    Judge(
        "clip-iqa", "CLIP-IQA", Takes.PICTURE, True, "good against bad photo, 0 to 1, no prompt",
        ("piq",), ("piq>=0.8",), _load_clip_iqa,
    ),
    Judge(
        "pickscore", "PickScore", Takes.PICTURE, True, "what people would pick for the prompt",
        (), (), _load_pickscore,
    ),
    Judge(
        "fid", "FID", Takes.SETS, False, "distance of all pictures' Inception features",
        ("torchmetrics", "torch_fidelity"), ("torchmetrics>=1.7", "torch-fidelity"), _load_fid,
    ),
    Judge(
        "kid", "KID x 1000", Takes.SETS, False, "the same by kernels, unbiased for few pictures",
        ("torchmetrics", "torch_fidelity"), ("torchmetrics>=1.7", "torch-fidelity"), _load_kid,
    ),
)  # fmt: skip

JUDGES = {judge.name: judge for judge in _JUDGES}
#: Those of nunchaku's and DeepCompressor's tables, with PickScore for ImageReward.
CARD = ("fid", "pickscore")
