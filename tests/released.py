"""Files as the authors' code saves them, by the key lists of the shared folder, in a small size."""

import functools
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from places import DATA, SHARED
from torch import Tensor

from vlbert.data.vocabulary import SPECIALS, Vocabulary

KEY_LISTS = SHARED / "parity" / "vlbert" / "state_dict_keys.json"
VILBERT = DATA / "vilbert"
needs_key_lists = pytest.mark.skipif(not KEY_LISTS.is_file(), reason=f"{KEY_LISTS} is not there")
WORDS = Vocabulary([*SPECIALS, "a", "dog", "on", "sofa", *(f"word{i}" for i in range(191))])


def base_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Key -> shape of a BASE model of theirs, repeated keys included."""
    return {name: tuple(shape) for name, shape, _ in json.loads(KEY_LISTS.read_text())[kind]["keys"]}


def resized_shapes(kind: str, sides: dict[int, int]) -> dict[str, tuple[int, ...]]:
    """The same with other sides outside the ResNet."""
    changed = {name: tuple(sides.get(side, side) for side in shape) for name, shape in base_shapes(kind).items()}
    return {name: shape if _of_resnet(name) else changed[name] for name, shape in base_shapes(kind).items()}


def _of_resnet(name: str) -> bool:
    return name.startswith("image_feature_extractor.") and "obj_downsample" not in name


def small_state(kind: str, dtype: torch.dtype = torch.float32, prefix: str = "module.") -> dict[str, Tensor]:
    """64 channels, 200 words, 40 positions, a ResNet-101 whose stem has 2 channels; all layers and all names.

    Every tensor has values of its own, and the keys that repeat others repeat them.
    """
    sides = {768: 64, 3072: 128, 30522: len(WORDS), 512: 40, 4096: 2048 + 64, 2048: 64}
    state = {}
    for name, shape in resized_shapes(kind, sides).items():
        if _of_resnet(name):
            shape = tuple(side if side in (1, 3, 7) else side // 32 for side in shape)
        state[f"{prefix}{name}"] = _fill(name, shape, dtype)
    return state


def _fill(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    original = name.replace("extractor.head.0.", "extractor.roi_head_feature_extractor.")
    original = original.replace("vlbert.mlm_head.predictions.decoder.", "vlbert.word_embeddings.")
    seed = zlib.crc32(original.encode())
    if name.endswith("num_batches_tracked"):
        return torch.tensor(seed % 1000)
    values = torch.empty(shape).normal_(0, 0.1, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.abs() + 0.5 if name.endswith("running_var") else values


def save_released(file: Path, state: dict[str, Tensor], zipped: bool = True) -> Path:
    """As their trainer saves it; torch 1.0 knew no zip files, and its numpy's scalars lived in another module."""
    groups = [{"lr": 1e-7, "betas": (0.9, 0.999), "params": [0]}]
    optimizer = {"state": {0: {"step": 3, "exp_avg": torch.zeros(2)}}, "param_groups": groups}
    best = {"best_epoch": 8, "best_val": np.float64(0.67)}
    whole = {"state_dict": state, "optimizer": optimizer, "validation_monitor": best}
    torch.save(whole, file, _use_new_zipfile_serialization=zipped)
    if not zipped:
        data = file.read_bytes()
        assert b"cnumpy._core.multiarray\n" in data
        file.write_bytes(data.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    return file


# --- ViLBERT ----------------------------------------------------------------------------------------------------------

PRETRAINED, MULTI_TASK = "pretrain_paper_6layer", "tasks_multi_task_6layer_task_tokens"


def vilbert_shapes(kind: str = PRETRAINED, pairs: int = 6) -> dict[str, tuple[int, ...]]:
    """Key -> shape of a ViLBERT of theirs with so many co-attention layers, as released."""
    lists = json.loads((VILBERT / "state_dict_keys.json").read_text())
    found = {}
    for name, shape in lists[PRETRAINED]["keys"] + lists[kind].get("further_keys", []):
        number = re.search(r"\.[vc]_layer\.(\d)\.", name)
        if number is None:
            found[name] = tuple(shape)
        elif number[1] == "0":  # the others are like it
            found |= {name.replace("_layer.0.", f"_layer.{pair}."): tuple(shape) for pair in range(pairs)}
    return found


@functools.cache
def vilbert_state(kind: str = PRETRAINED, pairs: int = 6, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """64 channels of text and 128 of regions, 200 words, 80 positions; all layers and all names.

    Every tensor has values of its own, and the decoder is the word table.
    """
    sides = {768: 64, 3072: 80, 1024: 128, 30522: len(WORDS), 512: 80, 2048: 256}
    shapes = {name: [sides.get(side, side) for side in shape] for name, shape in vilbert_shapes(kind, pairs).items()}
    shapes["bert.v_embeddings.image_embeddings.weight"] = [128, 64]
    state = {name: _fill(name, shape, dtype) for name, shape in shapes.items()}
    return state | {"cls.predictions.decoder.weight": state["bert.embeddings.word_embeddings.weight"]}
