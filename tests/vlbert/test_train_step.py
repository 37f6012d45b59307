"""The fast path equals a plain program in each of its modes; the commands that measure it."""

import dataclasses

import numpy as np
import pytest
import torch
from family import with_features
from tiny import CLASSES, LETTERS, SMALL_MODEL, TINY_MODEL, tiny_sample

from benchmarks import train_step
from benchmarks.plain import PlainPretraining, gradient_errors, pad_examples
from benchmarks.step_contenders import Fast, measure_memory
from benchmarks.step_parts import count_flops, total_loss
from benchmarks.synthetic import make_batch, make_benchmark_task, make_samples, mask_pairs, new_model, without_files
from storage.settings import override
from training.distributed import ALONE
from training.precision import autocast
from vlbert.config import ModelConfig, Recipe
from vlbert.data.batch import Example, collate
from vlbert.data.images import prepare_image
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.initial_weights import make_model
from vlbert.model.execution import execute_as
from vlbert.model.heads import count_parameters
from vlbert.recipes import RECIPES
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

SETTINGS = PretrainingSettings(words=WordMasking(0.5), regions=RegionMasking(0.5, 0.8))
TASK = Pretraining(SETTINGS, LETTERS, len(CLASSES))
END_TO_END = dataclasses.replace(
    TINY_MODEL,
    dropout=0.0,
    visual_gain_words=0.5,
    regions=dataclasses.replace(TINY_MODEL.regions, frozen_stages=2, roi_size=5),
)
PRECOMPUTED = dataclasses.replace(
    END_TO_END, regions=dataclasses.replace(END_TO_END.regions, features="precomputed", random_init=False)
)


def small_model(recipe: Recipe) -> TaskModel:
    """A model in train(), its frozen norms and biases anything but neutral."""
    model = make_model(recipe, TASK, LETTERS, None, None, lambda line: None).train()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if name.endswith((".norm.running_var", "conv1.norm.weight", "conv2.norm.weight")):
            tensor.uniform_(0.6, 1.4, generator=generator)
        elif name.endswith((".bias", ".norm.running_mean")):
            tensor.normal_(0, 0.2, generator=generator)
    execute_as(recipe, model.vlbert)
    return model


def ragged_examples(config: ModelConfig) -> list[Example]:
    """Pairs with one to three regions and texts of any length, of one image size; text-only rows between them."""
    examples = []
    for number in range(5):
        sample = with_features(tiny_sample(number, regions=1 + number % 3))
        rng = np.random.default_rng(10 + number)
        examples.append(TASK.example(sample, prepare_image(sample, config.regions, number == 2), None, rng))
    for place, text in ((1, "the dog ran"), (4, "over the hills and far away " * 2), (7, "abc")):
        rng = np.random.default_rng(place)
        examples.insert(place, TASK.text_example(text, LETTERS.encode(text), rng))
    return examples


@pytest.mark.parametrize(
    ("config", "precision", "accumulated"),
    [
        (END_TO_END, "fp32", False),
        (END_TO_END, "fp32", True),
        (PRECOMPUTED, "fp32", False),
        (END_TO_END, "bf16", False),
        (PRECOMPUTED, "bf16", False),
    ],
)
def test_losses_and_gradients_are_those_of_a_plain_program(config, precision, accumulated):
    """8 bits leave each product 2^-9 off; errors of a dozen products in a row add up to a few percent of a gradient."""
    recipe = Recipe(name="small", task=SETTINGS, model=config, precision=precision)
    model, examples, losses = small_model(recipe), ragged_examples(config), {}
    plain = PlainPretraining(model)
    for part in [examples[:5], examples[5:]] if accumulated else [examples]:
        with autocast(recipe, ALONE):
            ours = model(collate(part))
        theirs = plain(pad_examples(part, config))
        for name, (loss, count) in theirs.items():
            assert ours[name][1] == count
            if count:
                losses.setdefault(name, []).append(abs(float(ours[name][0].detach() / loss.detach()) - 1))
        total_loss(ours).backward()
        total_loss(theirs).backward()
    assert losses.keys() == {"words", "text_words", "regions"}
    assert max(map(max, losses.values())) < (1e-5 if precision == "fp32" else 1e-2), losses
    gradients = gradient_errors(model, plain)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == learning
    if precision == "bf16":  # where these vanish but for it
        gradients = {name: error for name, error in gradients.items() if not name.endswith("key.bias")}
    worst = max(gradients, key=gradients.get)
    assert gradients[worst] < (1e-4 if precision == "fp32" else 0.15), worst
    assert np.median([*gradients.values()]) < 0.03
    if config is END_TO_END:
        assert any("res3" in name for name in learning)
        frozen = (".stem.", ".res2.", "conv1.norm.", "shortcut.norm.")
        assert not any(part in name for name in learning for part in frozen)
        assert count_parameters(model)[1] < count_parameters(model)[0]


def test_the_check_holds_the_fast_path_against_the_plain_one(capsys):
    with pytest.raises(SystemExit) as ended:
        train_step.main(["--check", "--pairs", "2", *SMALL_MODEL])
    assert ended.value.code == 0
    assert capsys.readouterr().out.count("within") == 2


def test_parts_and_memory_are_those_of_all_batches_and_of_all_groups_of_images():
    recipe = without_files(override(RECIPES["pretrain_vlbert"](), [*SMALL_MODEL, "--data.text_batch=0"]))
    task, regions, model = make_benchmark_task(recipe), recipe.model.regions, new_model(recipe, ALONE.device)
    samples = make_samples(regions, range(2), (160, 120)) + make_samples(regions, range(2), (120, 160))
    small, large = make_batch(recipe, 1, 0), collate(mask_pairs(task, regions, samples))
    assert [len(group) for group in large.pixels] == [2, 2]
    flops = count_flops(Fast(recipe, model, ALONE, []), large)
    assert flops["RoIAlign, backward"] == 0 < flops["backbone, backward"]
    fasts = (Fast(recipe, model, ALONE, batches) for batches in ([large], [small, large]))
    alone, both = (measure_memory(fast, ALONE.device, 2) for fast in fasts)
    assert both == alone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU with CUDA")
def test_on_a_gpu_losses_and_gradients_are_those_of_a_plain_program():
    arguments = ["--check", "--device", "cuda", "--precision", "fp32,tf32,bf16", *SMALL_MODEL]
    report = train_step.check_step(train_step.parse_arguments(arguments))
    assert all(found["within"] for found in report["apart"].values()), report["apart"]
