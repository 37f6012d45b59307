"""Other ways to compute the same: activations computed again, compiled kernels, copies made ahead, precisions."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import CLASSES, LETTERS, TINY_MODEL, tiny_recipe, tiny_sample

from training.distributed import ALONE
from training.loading import copy_ahead
from training.precision import autocast, recipe_precision
from vlbert.data.batch import Batch, collate
from vlbert.data.images import prepare_image
from vlbert.model.execution import execute_as
from vlbert.model.vlbert import VLBert
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

TASK = Pretraining(PretrainingSettings(), LETTERS, len(CLASSES))


def ragged(number: int) -> Batch:
    """Two to four images and one or two texts, of other lengths in every batch."""
    rng = np.random.default_rng(number)
    samples = [tiny_sample(10 * number + i, 1 + (number + i) % 3) for i in range(2 + number % 3)]
    pairs = [TASK.example(sample, prepare_image(sample, TINY_MODEL.regions, False), None, rng) for sample in samples]
    texts = ["abc defghij klm nop"[: 8 + number + i] for i in range(1 + number % 2)]
    return collate([*pairs, *(TASK.text_example(text, LETTERS.encode(text), rng) for text in texts)])


def a_model(norm: str = "frozen", dropout: float = 0.1, frozen_stages: int = 2, layers: str = "JJ") -> TaskModel:
    resnet = dataclasses.replace(TINY_MODEL.regions.resnet, norm=norm)
    regions = dataclasses.replace(TINY_MODEL.regions, resnet=resnet, frozen_stages=frozen_stages)
    torch.manual_seed(0)
    config = dataclasses.replace(TINY_MODEL, regions=regions, dropout=dropout, layers=layers)
    return TaskModel(VLBert(config, len(LETTERS)), TASK).train()


def learned(model: TaskModel, batch: Batch, precision: str = "fp32") -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradient of each parameter that has one."""
    torch.manual_seed(3)
    model.zero_grad()
    with autocast(tiny_recipe(Path(), precision=precision), ALONE):
        losses = model(batch)
    total = sum(total / max(1, count) for total, count in losses.values() if total.requires_grad)
    total.backward()
    return total.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def kept_bytes(model: TaskModel, batch: Batch) -> int:
    """Of activations that wait for the backward pass, parameters left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = model(batch)
    del losses
    return sum(kept.values())


@pytest.mark.parametrize(("norm", "precision"), [("frozen", "fp32"), ("batch", "bf16")])
def test_activation_checkpointing_changes_no_bit(norm: str, precision: str):
    plain, again = a_model(norm, layers="JJJJ"), a_model(norm, layers="JJJJ")
    execute_as(tiny_recipe(Path(), activation_checkpointing=True), again.vlbert)
    for number in range(2):
        (loss, gradients), (other_loss, others) = (learned(m, ragged(number), precision) for m in (plain, again))
        assert other_loss == loss
        assert others.keys() == gradients.keys()
        assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())
    state, other = plain.state_dict(), again.state_dict()
    assert list(other) == list(state)
    assert all(torch.equal(other[name], tensor) for name, tensor in state.items())
    # It keeps less, and changes no evaluation.
    assert kept_bytes(again, ragged(0)) < 0.7 * kept_bytes(plain, ragged(0))
    with torch.no_grad():
        assert torch.equal(again.eval().vlbert(ragged(1)).text, plain.eval().vlbert(ragged(1)).text)


@pytest.mark.slow
def test_compiled_equals_eager_and_ragged_batches_share_graphs():
    plain, compiled = (a_model(dropout=0.0, frozen_stages=4) for _ in range(2))
    counts = torch._dynamo.utils.counters["stats"]  # the only place that counts graphs
    before = counts["unique_graphs"]
    execute_as(tiny_recipe(Path(), compile=True), compiled.vlbert)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for number in range(6):
        (loss, gradients), (other_loss, others) = (learned(m, ragged(number)) for m in (plain, compiled))
        assert other_loss == pytest.approx(loss, rel=1e-6)
        largest = max(float(gradient.norm()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            assert float((others[name] - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 1e-2 * largest), name
    assert (
        1 <= counts["unique_graphs"] - before <= 3
    )  # a layer, a block of res5; at most one more, where a batch is full


def test_copy_ahead_keeps_the_order():
    drawn = []

    def items() -> Iterator[tuple]:
        for number in range(4):
            drawn.append(number)
            yield [ragged(number)], [number], ValueError(f"error {number}")

    found = copy_ahead(items(), torch.device("cpu"))
    (batch,), (number,), error = next(found)
    assert (number, str(error)) == (0, "error 0")
    assert torch.equal(batch.tokens, ragged(0).tokens)
    assert drawn == [0, 1], "one ahead, and no more"
    assert [numbers for _, numbers, _ in found] == [[1], [2], [3]]


def test_float32_precision_is_restored_after_an_error():
    def now() -> tuple[str, str]:
        return torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision

    before = now()
    for precision, kind in (("bf16", "ieee"), ("tf32", "tf32")):
        with pytest.raises(KeyError, match=kind), recipe_precision(tiny_recipe(Path(), precision=precision)):
            raise KeyError(now())
        assert now() == before
