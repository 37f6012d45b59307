"""storage.settings, and what every configuration checks of its fields."""

import dataclasses
import json
import math
import operator
import re
import typing
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import PROJECT

from detectors import recipes, run
from detectors import train as detectors_train
from detectors.config import DetectionConfig, NetworkOverrides
from detectors.faster_rcnn import FasterRCNNConfig
from detectors.resnet import RESNET101
from detectors.select import SelectionSettings
from storage.collect import run as collect
from storage.collect.download import DownloadSettings
from storage.collect.plan import CollectSettings
from storage.settings import (
    assignments_of,
    default_of,
    field_help,
    field_words,
    from_assignments,
    from_json,
    override,
    to_json,
)
from training.optimizer import OptimizerConfig
from vlbert import train
from vlbert.config import DataConfig, ModelConfig, RegionConfig
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.evaluation import evaluate
from vlbert.initial_weights import check_complete
from vlbert.recipes import RECIPES
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

MODEL_SIZES = ("hidden_size", "num_heads", "intermediate_size", "max_positions", "geometry_channels")
MODEL_SIZES += ("visual_embedding_size", "region_classes")


def test_overrides_reach_every_depth_and_keep_the_types():
    recipe = override(
        RECIPES["pretrain_vlbert_base"](),
        [
            "steps=1e3",
            "model.hidden_size=96",  # and num_heads at once, which must divide it
            "model.num_heads=8",
            "optimizer.learning_rate=3e-4",
            "model.regions.resnet.blocks=3,4,6,3",
            "task.words.whole_words=false",
            "task.max_elements=none",
            "model.geometry=corners",
            "optimizer.schedule=step",
            "optimizer.decay_at=20,30",
        ],
    )
    assert (recipe.steps, recipe.optimizer.learning_rate) == (1000, 3e-4)
    assert recipe.model.regions.resnet.blocks == (3, 4, 6, 3)
    assert recipe.task.words.whole_words is False
    assert recipe.task.max_elements is None
    assert (recipe.model.geometry, recipe.model.hidden_size, recipe.model.num_heads) == ("corners", 96, 8)
    assert recipe.optimizer.decay_at == (20, 30)


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("optimiser.learning_rate=1", "Recipe has no field 'optimiser'"),
        ("optimizer.rate=1", "OptimizerConfig has no field 'rate'; it has kind, learning_rate"),
        ("task.folder=x", "PretrainingSettings has no field 'folder'; it has words, regions"),  # another task's
        ("steps", "has no '='"),
        ("steps=many", "'many' is no int"),
        ("model.geometry=polar", "one of centre, corners"),
        ("steps.more=1", "plain value"),
        ("model=small", "set its fields"),
        *((f"model.{name}=0", f"ModelConfig.{name} is 0") for name in MODEL_SIZES),
        *((f"model.dropout={value}", "ModelConfig.dropout is ") for value in ("1", "-0.1")),
        ("model.initializer_range=0", "ModelConfig.initializer_range is 0"),
        ("optimizer.region_learning_rate=0", "OptimizerConfig.region_learning_rate is 0"),
        ("optimizer.schedule=step optimizer.decay_at=0,4", "OptimizerConfig.decay_at is (0, 4)"),
        ("data.batch=0", "DataConfig.batch is 0"),
        ("vocabulary_size=0", "Recipe.vocabulary_size is 0"),
        ("model.num_heads=7", "ModelConfig.num_heads is 7; it must be a divisor of hidden_size = 768"),
        ("task.words.masked=1.5", "shares"),
        ("steps=0", "Recipe.steps is 0"),
        ("data.gradient_accumulation=0", "DataConfig.gradient_accumulation is 0"),
        ("task.max_elements=2", "max_elements is 2"),
        ("optimizer.max_grad_norm=0", "OptimizerConfig.max_grad_norm is 0"),
        ("optimizer.betas=0.9", "two numbers"),
        ("model.regions.pixel_mean=1,2", "three numbers"),
        ("model.regions.features=precomputed model.regions.weights=x", "must be None where features are precomputed"),
        ("model.special_tokens=vocabulary", "own where regions have tokens by class"),
        ("optimizer.schedule=step", "OptimizerConfig.decay_at is ()"),
        ("optimizer.decay_at=3", "given for schedule step, and only there"),
        ("optimizer.schedule=step optimizer.decay_at=4,3", "increasing numbers of updates"),
        ("optimizer.momentum=1", "OptimizerConfig.momentum is 1"),
        ("compile=true precision=tf32", "Recipe.compile is True; it must be false with tf32"),
        (
            "compile=true activation_checkpointing=true model.regions.resnet.norm=batch",
            "false with activation_checkpointing and live norms",
        ),
        ("spike=1", "Recipe.spike is 1.0; it must be more than 1, or none"),
        ("most_skipped=0", "Recipe.most_skipped is 0"),
        ("task.text_specials=true task.text_length=2", "text_length is 2; it must be at least 1, and 3 with"),
    ],
)
def test_wrong_overrides_are_named(assignment, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        override(RECIPES["pretrain_vlbert_base"](), assignment.split())


SETTINGS = [
    RegionConfig(),
    ModelConfig(),
    DataConfig(),
    OptimizerConfig(),
    RECIPES["pretrain_vlbert_base"](),
    PretrainingSettings(),
    WordMasking(),
    RegionMasking(),
    VCRSettings(),
    VQASettings(),
    RefCOCOSettings(),
    CollectSettings("captions", images="folder"),
    DownloadSettings(),
    DetectionConfig(preset="demo", random_init=True),
    NetworkOverrides(),
    recipes.DataConfig(),
    recipes.SamplingConfig(),
    recipes.ValidationConfig(),
    recipes.DetectorRecipe("detector"),
    FasterRCNNConfig(),
    RESNET101,
    SelectionSettings(),
]


@pytest.mark.parametrize("config", SETTINGS, ids=lambda config: f"{type(config).__module__}.{type(config).__name__}")
def test_counts_are_not_negative_and_numbers_are_finite(config):
    """Every count of every configuration, and every float; the error names the field."""
    for field in dataclasses.fields(config):
        kinds = {typing.get_type_hints(type(config))[field.name]}
        kinds |= {kind for union in kinds for kind in typing.get_args(union)}
        wrong = [-1] if int in kinds else [math.nan, math.inf, -math.inf] if float in kinds else []
        for value in wrong:
            many = isinstance(getattr(config, field.name), tuple)
            given = (value, *getattr(config, field.name)[1:]) if many else value
            with pytest.raises(ValueError, match=rf"\b{field.name}\b"):
                dataclasses.replace(config, **{field.name: given})


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_have_the_name_of_their_function_and_round_trip(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    assert from_json(ModelConfig, to_json(recipe)["model"], "here") == recipe.model
    with pytest.raises(ValueError, match="data.root is not set"):
        check_complete(recipe)


def test_a_configuration_may_lack_fields_but_not_have_others():
    values = to_json(ModelConfig())
    del values["num_heads"]
    assert from_json(ModelConfig, values, "config.json") == ModelConfig(), (
        "a field younger than the file has its default"
    )
    with pytest.raises(ValueError, match="config.json: ModelConfig has no field eyes; the file is of another version"):
        from_json(ModelConfig, values | {"eyes": 2}, "config.json")


@dataclasses.dataclass(frozen=True)
class Inner:
    count: int = 3  # how many
    share: float = 0.5  # of all, %
    #                     from 0 to 1


@dataclasses.dataclass(frozen=True)
class Outer(Inner):
    """One field of every kind."""

    # In pixels, where it is known.
    width: int | None = None
    strict: bool = True
    """A docstring,
    over two lines."""
    mode: typing.Literal["fast", "exact"] = "exact"  # how
    folder: str | None = None  # of the files
    names: tuple[str, ...] = ("a",)  # in order
    sizes: tuple[float, ...] = ()  # in pixels
    weights: Mapping[str, float | None] = dataclasses.field(default_factory=lambda: {"a": None})  # by name
    votes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by name, too
    inner: Inner = Inner(count=7)  # another one


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
INNER = {"count": st.integers(), "share": NUMBERS}
TEXT = st.text(max_size=5)
NAMES = TEXT.filter(lambda text: text and not {",", ":"} & {*text})
OUTER = st.builds(
    Outer,
    **INNER,
    width=st.none() | st.integers(),
    strict=st.booleans(),
    mode=st.sampled_from(["fast", "exact"]),
    folder=st.none() | TEXT.filter(lambda text: text not in ("", "none", "None")),
    names=st.lists(TEXT.filter(lambda text: text and "," not in text)).map(tuple),
    sizes=st.lists(NUMBERS).map(tuple),
    weights=st.dictionaries(NAMES, st.none() | NUMBERS),
    votes=st.dictionaries(NAMES, st.integers()),
    inner=st.builds(Inner, **INNER),
)


@settings(max_examples=50)
@given(OUTER, OUTER)
def test_settings_round_trip_through_field_value_and_json(config: Outer, base: Outer):
    assert override(base, assignments_of(config, base)) == config
    assert from_assignments(Outer, assignments_of(config)) == config
    assert from_json(Outer, json.loads(json.dumps(to_json(config))), "here") == config


@pytest.mark.parametrize(
    "changes", [{"folder": "none"}, {"folder": ""}, {"names": ("a,b",)}, {"names": ("",)}, {"weights": {"a,b": None}}]
)
def test_values_that_field_value_cannot_give_are_refused(changes: dict):
    with pytest.raises(ValueError, match=rf"Outer.{next(iter(changes))} is "):
        assignments_of(Outer(**changes))


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("weights=a:1,b,a:2", "weights=a:1,b,a:2: a is there twice"),
        ("weights=a:much", "'much' is no float"),
        ("votes=a:1,b", "b has no value; write b:value"),
        ("weights.a=1", "weights of Outer is a plain value"),
    ],
)
def test_wrong_mappings_are_named(assignment, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        override(Outer(), [assignment])


def test_help_is_taken_from_docstrings_and_comments():
    assert field_words(Outer) == {
        "count": "how many",
        "share": "of all, % from 0 to 1",
        "width": "In pixels, where it is known.",
        "strict": "A docstring, over two lines.",
        "mode": "how",
        "folder": "of the files",
        "names": "in order",
        "sizes": "in pixels",
        "weights": "by name",
        "votes": "by name, too",
        "inner": "another one",
    }
    listed = field_help(Outer(folder="x"), without=["count"])
    assert {
        "folder=x  (text | none)",
        "inner.count=7  (int)",
        "strict=true  (true | false)",
        "sizes=  (float,...)",
        "weights=a  (name[:float],...)",
        "votes=  (name:int,...)",
    } <= {*listed.splitlines()}
    assert "\ncount" not in listed


def kinds_below(kind: type) -> set[type]:
    """The dataclass and those of its fields."""
    values = [default_of(field) for field in dataclasses.fields(kind)]
    return {kind}.union(*(kinds_below(type(value)) for value in values if dataclasses.is_dataclass(value)))


@pytest.mark.parametrize("kind", dict.fromkeys(map(type, SETTINGS)), ids=lambda kind: kind.__qualname__)
def test_every_field_has_help(kind: type):
    without = [name for one in kinds_below(kind) for name, words in field_words(one).items() if not words]
    assert not without, f"{kind.__name__}: say what these are for: {without}"


@pytest.mark.parametrize(
    ("main", "arguments", "config"),
    [
        (train.main, ["finetune_vqa_base"], RECIPES["finetune_vqa_base"]()),
        (evaluate.main, ["finetune_refcoco_demo"], RECIPES["finetune_refcoco_demo"]()),
        (detectors_train.main, ["detector_demo"], recipes.RECIPES["detector_demo"]()),
        (collect.main, [], CollectSettings),
        (run.main, [], DetectionConfig),
    ],
)
def test_programs_list_every_field_in_their_help(main, arguments: list[str], config, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    for line in field_help(config, without=["name"]).splitlines():
        assert line in printed


def test_settings_on_the_detector_page_are_fields():
    page = (PROJECT / "docs" / "detector.md").read_text()
    (table,) = re.findall(r"\| setting \|\n.*?\n(.*?)\n\n", page, re.DOTALL)
    cells = [row.split("|")[-2] for row in table.splitlines() if "of the file alone" not in row]
    named = {re.search(r"`([a-z_.]+)", cell)[1].removesuffix(".") for cell in cells}
    named |= set(re.findall(r"`([a-z_.]+)=[^`]*`", page))
    assert {"network.short_side", "selection", "keep_features"} <= named
    config = DetectionConfig(preset="demo", random_init=True)
    for name in named:
        operator.attrgetter(name)(config)
