"""The fast path equals a plain program in each of its modes; the commands that measure it."""

import dataclasses

import numpy as np
import pytest
import torch
from tiny import CLASSES, SMALL_MODEL, TINY_MODEL, tiny_sample

from benchmarks import train_step
from benchmarks.plain import PlainPretraining, gradient_errors, pad_examples
from benchmarks.step_parts import total_loss
from benchmarks.train_step import main
from training.distributed import World
from training.precision import autocast
from vlbert.config import ModelConfig, Recipe
from vlbert.data.batch import Example, collate
from vlbert.data.images import prepare_image
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.initial_weights import make_model
from vlbert.model.execution import execute_as
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = Vocabulary([*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS)])
SETTINGS = PretrainingSettings(words=WordMasking(0.5), regions=RegionMasking(0.5, 0.8))
TASK = Pretraining(SETTINGS, VOCABULARY, len(CLASSES))
CPU = World(0, 1, torch.device("cpu"))
END_TO_END = dataclasses.replace(
    TINY_MODEL,
    dropout=0.0,
    visual_gain_words=0.5,
    regions=dataclasses.replace(TINY_MODEL.regions, frozen_stages=2, roi_size=5),
)
PRECOMPUTED = dataclasses.replace(
    END_TO_END, regions=dataclasses.replace(END_TO_END.regions, features="precomputed", random_init=False)
)


def recipe_of(config: ModelConfig, precision: str = "fp32", **changes: object) -> Recipe:
    return Recipe(name="small", task=SETTINGS, model=config, precision=precision, **changes)


def small_model(recipe: Recipe) -> TaskModel:
    """A model in train(), its frozen norms and biases anything but neutral."""
    model = make_model(recipe, TASK, VOCABULARY, None, None, lambda line: None).train()
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
        sample = tiny_sample(number, regions=1 + number % 3)
        if config.regions.features == "precomputed":
            rng = np.random.default_rng(number)
            features = rng.normal(0, 1, (1 + number % 3, config.regions.channels)).astype(np.float16)
            sample = dataclasses.replace(sample, regions=dataclasses.replace(sample.regions, features=features))
        rng = np.random.default_rng(10 + number)
        examples.append(TASK.example(sample, prepare_image(sample, config.regions, number == 2), None, rng))
    for place, text in ((1, "the dog ran"), (4, "over the hills and far away " * 2), (7, "abc")):
        rng = np.random.default_rng(place)
        examples.insert(place, TASK.text_example(text, VOCABULARY.encode(text), rng))
    return examples


def apart(
    recipe: Recipe, model: TaskModel, plain: PlainPretraining, parts: list[list[Example]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Relative errors of the losses and of the gradients, summed over the parts, of the fast path to the plain one."""
    losses: dict[str, list[float]] = {"words": [], "text_words": [], "regions": []}
    for part in parts:
        with autocast(recipe, CPU):
            ours = model(collate(part))
        theirs = plain(pad_examples(part, recipe.model))
        for name, (loss, count) in theirs.items():
            assert ours[name][1] == count
            if count:
                losses[name].append(abs(float(ours[name][0].detach() / loss.detach()) - 1))
        total_loss(ours).backward()
        total_loss(theirs).backward()
    return {name: max(errors) for name, errors in losses.items()}, gradient_errors(model, plain)


@pytest.mark.parametrize(("config", "accumulated"), [(END_TO_END, False), (END_TO_END, True), (PRECOMPUTED, False)])
def test_losses_and_gradients_are_those_of_a_plain_program(config, accumulated):
    recipe = recipe_of(config)
    model, examples = small_model(recipe), ragged_examples(config)
    parts = [examples[:5], examples[5:]] if accumulated else [examples]
    losses, gradients = apart(recipe, model, PlainPretraining(model), parts)
    assert max(losses.values()) < 1e-5, losses
    worst = max(gradients, key=gradients.get)
    assert gradients[worst] < 1e-4, worst
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == learning
    if config is END_TO_END:
        assert any("res3" in name for name in learning)
        assert not any("stem" in name or "res2" in name for name in learning)


@pytest.mark.parametrize("config", [END_TO_END, PRECOMPUTED], ids=["end_to_end", "precomputed"])
def test_in_bfloat16_losses_and_gradients_are_near_those_of_a_plain_program(config):
    """8 bits leave each product 2^-9 off; errors of a dozen products in a row add up to a few percent of a gradient."""
    recipe = recipe_of(config, "bf16")
    model = small_model(recipe)
    losses, gradients = apart(recipe, model, PlainPretraining(model), [ragged_examples(config)])
    assert max(losses.values()) < 1e-2, losses
    errors = {name: error for name, error in gradients.items() if not name.endswith("key.bias")}  # vanish but for it
    assert max(errors.values()) < 0.15, max(errors, key=errors.get)
    assert np.median([*errors.values()]) < 0.03


def options(*arguments: str) -> object:
    return train_step.parse_arguments([*arguments, *SMALL_MODEL])


def test_the_check_holds_the_fast_path_against_the_plain_one(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--check", "--pairs", "2", *SMALL_MODEL])
    assert ended.value.code == 0
    assert capsys.readouterr().out.count("within") == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU with CUDA")
def test_on_a_gpu_losses_and_gradients_are_those_of_a_plain_program():
    report = train_step.check_step(options("--check", "--device", "cuda", "--precision", "fp32,tf32,bf16"))
    assert all(found["within"] for found in report["apart"].values()), report["apart"]
