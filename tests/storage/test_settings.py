"""storage.settings, and what every configuration checks of its fields."""

import dataclasses
import json
import math
import re
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.collect.download import DownloadSettings
from storage.settings import (
    FORM,
    Weights,
    as_arguments,
    changed_fields,
    from_json,
    named_fields,
    override,
    override_values,
    parse,
    to_json,
)
from training.optimizer import OptimizerConfig
from training.program import make_recipe
from vlbert.config import DataConfig, ModelConfig
from vlbert.recipes import RECIPES

GIVEN = (
    "--steps 1000 --model.hidden_size=96 --model.num_heads 8 --task.words.no_whole_words --data.held-out a b --trackers"
)
CHANGED = {
    "steps": 1000,
    "model.hidden_size": 96,  # and num_heads at once, which must divide it
    "model.num_heads": 8,
    "task.words.whole_words": False,
    "data.held_out": ("a", "b"),
    "trackers": (),
}


def test_a_command_line_changes_fields_at_every_depth_all_at_once():
    recipe, arguments = RECIPES["pretrain_vlbert"](), GIVEN.split()
    changed = override(recipe, arguments)
    assert changed == override_values(recipe, CHANGED)
    assert named_fields(changed, arguments) == CHANGED
    assert override(recipe, []) is recipe


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--optimiser.learning_rate 1", "--optimiser.learning_rate"),
        ("--model.geometry polar", "('centre', 'corners')"),
        ("--data.datasets a b:1", "DataConfig.datasets is {'a': None, 'b': 1.0}"),
        ("--model.num_heads 7", "ModelConfig.num_heads is 7; it must be a divisor of hidden_size = 768"),
        ("--model.regions.features precomputed --model.regions.weights x", "must be None if features are"),
        ("--optimizer.schedule step --optimizer.decay_at 4 3", "increasing numbers of updates"),
        ("--optimizer.decay_at 3", "given if schedule is step"),
        ("--keep_every 7000", "Recipe.keep_every is 7000; it must be a multiple of save_every, 5000"),
        ("--spike 1", "Recipe.spike is 1.0; it must be more than 1, or None"),
        ("--task.text_specials --task.text_length 2", "text_length is 2; it must be at least 1, and 3 with"),
    ],
)
def test_a_wrong_argument_is_named(arguments: str, named: str):
    with pytest.raises(ValueError, match=re.escape(named)):
        override(RECIPES["pretrain_vlbert"](), arguments.split())


SETTINGS = [ModelConfig(), DataConfig(), OptimizerConfig(), RECIPES["pretrain_vlbert"](), DownloadSettings()]


@pytest.mark.parametrize("config", SETTINGS, ids=lambda config: f"{type(config).__module__}.{type(config).__name__}")
def test_counts_are_not_negative_numbers_are_finite(config):
    for field in dataclasses.fields(config):
        kinds = {typing.get_type_hints(type(config))[field.name]}
        kinds |= {kind for union in kinds for kind in typing.get_args(union)}
        wrong = [-1] if int in kinds else [math.nan, math.inf, -math.inf] if float in kinds else []
        for value in wrong:
            many = isinstance(getattr(config, field.name), tuple)
            given = (value, *getattr(config, field.name)[1:]) if many else value
            with pytest.raises(ValueError, match=rf"\b{field.name}\b"):
                dataclasses.replace(config, **{field.name: given})


@dataclasses.dataclass(frozen=True)
class Inner:
    count: int = 3  # how many
    share: float = 0.5


@dataclasses.dataclass(frozen=True)
class Outer(Inner):
    """One field of every kind."""

    # In pixels, where it is known.
    width: int | None = None
    strict: bool = True
    """A docstring,
    over two lines."""
    mode: typing.Literal["fast", "exact"] = "exact"  # how
    folder: str | None = None
    names: tuple[str, ...] = ("a",)
    sizes: tuple[float, ...] | None = ()
    weights: Weights = dataclasses.field(default_factory=lambda: {"a": None})
    inner: Inner = Inner(count=7)


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
INNER = {"count": st.integers(), "share": NUMBERS}
TEXT = st.text(max_size=5).filter(lambda text: text != "None" and not text.startswith("-"))
OUTER = st.builds(
    Outer,
    **INNER,
    width=st.none() | st.integers(),
    strict=st.booleans(),
    mode=st.sampled_from(["fast", "exact"]),
    folder=st.none() | TEXT,
    names=st.lists(TEXT).map(tuple),
    sizes=st.none() | st.lists(NUMBERS).map(tuple),
    weights=st.dictionaries(TEXT.filter(lambda text: text and ":" not in text), st.none() | NUMBERS),
    inner=st.builds(Inner, **INNER),
)


@settings(max_examples=50, deadline=None)
@given(OUTER, OUTER)
def test_settings_round_trip_through_command_lines_and_json(config: Outer, base: Outer):
    assert override(base, as_arguments(changed_fields(config, base))) == config
    assert parse(Outer, as_arguments(changed_fields(config))) == config
    assert from_json(Outer, json.loads(json.dumps(to_json(config))), "here") == config
    assert from_json(Outer, {"count": 5}, "here") == Outer(count=5), "a younger field has its default"
    with pytest.raises(ValueError, match="here: Outer has no field eyes; another version"):
        from_json(Outer, to_json(config) | {"eyes": 2}, "here")


def test_the_form_of_the_flow_ui_shows_the_words_about_each_field():
    form = {"properties": {field.name: {} for field in dataclasses.fields(Outer)}}
    FORM["json_schema_extra"](form, Outer)
    words = [shown["description"] for shown in form["properties"].values() if shown["description"]]
    assert words == ["how many", "In pixels, where it is known.", "A docstring, over two lines.", "how"]


def test_a_recipe_takes_its_own_arguments_and_fields():
    given = ["--steps", "9", "--size", "large", "--data.root", "r", "--variant=paper"]
    recipe = make_recipe("pretrain_vlbert", given, RECIPES)
    assert (recipe.name, recipe.steps, recipe.data.root) == ("pretrain_vlbert_large_paper", 9, "r")
    for arguments, named in (
        ("pretrain_vlbert_base", "there is no recipe pretrain_vlbert_base, only finetune_labels, "),
        ("pretrain_vlbert --size demo --variant paper", "there is no recipe pretrain_vlbert_demo_paper"),
    ):
        with pytest.raises(ValueError, match=re.escape(named)):
            make_recipe(arguments.split()[0], arguments.split()[1:], RECIPES)
