"""The world's tokenizer: CLIP's byte-pair format, one token per word, anything else in bytes.

Captions of random scenes are also encoded without strings, as tensors, because training needs
thousands a second; the two ways agree token by token.
"""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from quantkit.eval.world.outlines import SHAPES
from quantkit.eval.world.scenes import (
    ALONE,
    COLOURS,
    FILLS,
    PATTERNS,
    RELATIONS,
    SIZES,
    Scenes,
)
from torch import Tensor

#: Length of every encoded caption; the longest caption of the world has 19 tokens.
MAX_LENGTH = 32
START, END = "<|startoftext|>", "<|endoftext|>"
#: CLIP's mark for "the word ends here".
_LAST = "</w>"


def world_words() -> list[str]:
    """Return every word that captions use, sorted."""
    tables = (SHAPES, COLOURS, SIZES, FILLS, PATTERNS, RELATIONS)
    words = {word for table in tables for name in table for word in name.split()}
    return sorted((words | {"a", "an", "on", "background"}) - {"solid", "alone"})


def learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Return byte-pair merges, in order, after which every given word is one token.

    The most frequent pair is merged first and ties go to the pair first in the alphabet, so that
    equal words give equal merges.
    """
    spelled = [[*word[:-1], word[-1] + _LAST] for word in words]
    merges = []
    while pairs := Counter(pair for word in spelled for pair in pairwise(word)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelled = [_merge(word, best) for word in spelled]
    return merges


def vocabulary(words: list[str]) -> dict[str, int]:
    """Return token ids in CLIP's order: bytes, bytes that end a word, merges, start, end.

    The end has the highest id: that is how the oldest pooling of CLIP's text model finds it.
    """
    letters = _byte_letters()
    merged = ["".join(pair) for pair in learn_merges(words)]
    tokens = [*letters, *(letter + _LAST for letter in letters), *merged, START, END]
    return {token: index for index, token in enumerate(tokens)}


def write_tokenizer(directory: Path) -> None:
    """Write a CLIPTokenizer directory, with the files of slow and of fast tokenizers."""
    from transformers import CLIPTokenizer

    directory.mkdir(parents=True, exist_ok=True)
    words = world_words()
    (directory / "vocab.json").write_text(
        json.dumps(vocabulary(words), ensure_ascii=False) + "\n", encoding="utf-8"
    )
    lines = ["#version: 0.2", *(" ".join(pair) for pair in learn_merges(words))]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": MAX_LENGTH, **special}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )
    CLIPTokenizer.from_pretrained(directory).save_pretrained(directory)


@dataclass(frozen=True)
class CaptionEncoder:
    """Encodes the captions of scenes as the tokenizer would, without making strings."""

    ids: dict[str, int]  #: word to token id, for the words of the world, START and END

    @classmethod
    def of_world(cls) -> "CaptionEncoder":
        """Return the encoder for the tokenizer that ``write_tokenizer`` writes."""
        tokens = vocabulary(world_words())
        words = {word: tokens[word + _LAST] for word in world_words()}
        return cls({**words, START: tokens[START], END: tokens[END]})

    def empty(self, count: int, device: torch.device | str) -> Tensor:
        """Return (count, MAX_LENGTH) int64: the empty caption, as guidance needs it."""
        row = torch.full((count, MAX_LENGTH), self.ids[END], device=device)
        row[:, 0] = self.ids[START]
        return row

    def encode(self, scenes: Scenes) -> Tensor:
        """Return (n, MAX_LENGTH) int64 token ids of the captions, padded with END.

        Args:
            scenes: n scenes; their device is the device of the result.
        """
        pair = scenes.relation != ALONE
        colours, plain = tuple(COLOURS), scenes.pattern == PATTERNS.index("plain")
        ground = self._look_up(colours, scenes.ground)
        pattern = self._look_up(PATTERNS, scenes.pattern)
        vowel = torch.tensor([name[0] in "aeiou" for name in colours], device=ground.device)
        article = torch.where(
            vowel[scenes.ground] & ~plain, self.ids["an"], torch.full_like(ground, self.ids["a"])
        )
        slots = [
            *self._thing(scenes, 0, torch.ones_like(pair)),
            self._look_up([name.split()[0] for name in RELATIONS], scenes.relation),
            self._look_up([" ".join(name.split()[1:]) for name in RELATIONS], scenes.relation),
            *self._thing(scenes, 1, pair),
            torch.full_like(ground, self.ids["on"]),
            article,
            torch.where(plain, pattern, ground),
            torch.where(plain, ground, pattern),
            torch.full_like(ground, self.ids["background"]),
        ]
        return self._pad(torch.stack(slots, dim=1))

    def _thing(self, scenes: Scenes, slot: int, shown: Tensor) -> list[Tensor]:
        words = [
            torch.full_like(scenes.ground, self.ids["a"]),
            self._look_up(SIZES, scenes.size[:, slot]),
            self._look_up(tuple(COLOURS), scenes.colour[:, slot]),
            self._look_up(FILLS, scenes.fill[:, slot]),
            self._look_up(tuple(SHAPES), scenes.shape[:, slot]),
        ]
        return [torch.where(shown, word, self.ids[END]) for word in words]

    def _look_up(self, names: tuple[str, ...] | list[str], rows: Tensor) -> Tensor:
        # END stands for "no word here" until _pad closes the gaps.
        table = [self.ids.get(name, self.ids[END]) for name in names]
        return torch.tensor(table, device=rows.device)[rows]

    def _pad(self, slots: Tensor) -> Tensor:
        order = (slots == self.ids[END]).long().argsort(dim=1, stable=True)
        padded = self.empty(len(slots), slots.device)
        padded[:, 1 : 1 + slots.shape[1]] = slots.gather(1, order)
        return padded


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def _byte_letters() -> list[str]:
    # Byte-level BPE spells each byte as one visible letter: Latin-1's own where it is visible,
    # else the next free letter after Latin-1.
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    letters = [chr(byte if byte in visible else next(hidden)) for byte in range(0x100)]
    return sorted(letters)
