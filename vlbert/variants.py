"""Differences between the paper and the authors' code, as rules: a recipe field and its value in each variant.

    vlbert recipes        prints the rules as a table; docs/models.md explains some

`apply(recipe, variant)` applies all rules. The `published` variant follows the authors' code, as their checkpoints
require. The `paper` variant follows the paper. Learning rates, batches and steps are in the recipes, with sources.
"""

from dataclasses import dataclass
from typing import Any, Literal

from storage.settings import override_values
from storage.tables import markdown
from vlbert.config import Recipe

Variant = Literal["paper", "published"]


@dataclass(frozen=True)
class Rule:
    """A field that differs between the paper and the authors' code, with both values."""

    number: int  # number of the difference; several rules may belong to one
    field: str  # dotted, as on the command line
    paper: Any
    published: Any
    section: str  # section of the paper; "open" if it says nothing, and `paper` is our own choice
    description: str
    task: str | None = None  # settings class that has the field; None: the field is in every recipe


_PRETRAINING, _VCR, _VQA, _REFCOCO = (f"{task}Settings" for task in ("Pretraining", "VCR", "VQA", "RefCOCO"))

RULES = (
    Rule(1, "task.region_target", "class", "distribution", "3.3", "label of a masked region", _PRETRAINING),
    Rule(2, "task.regions.masked", 1.0, 0.9, "3.3", "share of chosen regions that are masked", _PRETRAINING),
    Rule(3, "task.words.masked", 1.0, 0.8, "3.3", "share of chosen words that become [MASK]", _PRETRAINING),
    Rule(3, "task.words.random", 0.0, 0.1, "3.3", "share that become any other token", _PRETRAINING),
    Rule(4, "task.max_elements", None, 64, "3.3", "maximum tokens and regions; none: all", _PRETRAINING),
    Rule(5, "task.text_specials", True, False, "3.3", "[CLS] and [SEP] around a text-only input", _PRETRAINING),
    Rule(6, "model.visual_activation", "none", "relu", "3.2", "activation after the layer of the visual feature"),
    Rule(6, "model.visual_dropout", False, True, "3.2", "dropout before that layer"),
    Rule(6, "model.visual_norm", "none", "layer_norm", "3.2", "norm of the visual feature embedding"),
    Rule(6, "model.visual_initialisation", "normal", "pytorch", "4.1", "initial weights of that layer"),
    Rule(6, "model.head_initialisation", "normal", "xavier", "4.1", "initial weights of fine-tuning layers"),
    Rule(7, "model.geometry", "corners", "centre", "3.2", "geometry embedding of a box's corners, or centre and size"),
    Rule(8, "model.special_tokens", "vocabulary", "own", "3.2", "[IMG] and [END] in the vocabulary, or separate"),
    Rule(8, "model.masked_region_token", False, True, "3.2", "a masked region has its own token, not [IMG]"),
    Rule(8, "model.end_visual_embedding", True, False, "3.2", "[END] carries the visual feature of the whole image"),
    Rule(9, "task.mention_visual_embedding", "image", "object", "3.2", "feature of a word that names an object", _VCR),
    Rule(10, "model.regions.frozen_stages", 0, 2, "A.2", "first stages of the ResNet that are not trained"),
    Rule(10, "model.regions.resnet.norm", "batch", "frozen", "A.2", "BatchNorms of the ResNet: trained or frozen"),
    Rule(11, "optimizer.kind", "adam", "adamw", "A.2", "weight decay in the gradient, or decoupled"),
    Rule(11, "optimizer.epsilon", 1e-8, 1e-6, "A.2", "Adam's epsilon; the paper gives none: Adam's default"),
    Rule(11, "optimizer.bert_adam", False, True, "A.2", "epsilon before the bias correction, decay after the step"),
    Rule(11, "optimizer.max_grad_norm", None, 10.0, "A.2", "largest gradient norm", _PRETRAINING),
    Rule(11, "optimizer.max_grad_norm", None, 10.0, "A.2", "largest gradient norm", _VCR),
    Rule(11, "optimizer.max_grad_norm", None, 1.0, "A.2", "largest gradient norm", _VQA),
    Rule(11, "optimizer.max_grad_norm", None, 1.0, "A.2", "largest gradient norm", _REFCOCO),
    Rule(12, "model.regions.masked_pixels", "black", "mean", "3.3", "value of masked pixels"),
    Rule(13, "task.loss", "softmax", "sigmoid", "4.2", "over the four choices, or for each one", _VCR),
    Rule(13, "task.pooled", False, True, "4.2", "BERT's tanh pooler between [CLS] and the score", _VCR),
    Rule(13, "task.instance_masks", False, True, "4.2", "only an object's own cells count in its feature", _VCR),
    Rule(13, "task.masked_regions", 0.15, 0.0, "4.2", "share masked and labelled; 0: all labelled", _VCR),
    Rule(13, "task.names", "class", "neutral", "4.2", "word for a mentioned person", _VCR),
    Rule(14, "task.loss", "cross_entropy", "bce", "4.2", "of the best answer, or of every soft score", _VQA),
    Rule(14, "task.answers_from_words", False, True, "4.2", "answers start from the embeddings of their words", _VQA),
    Rule(15, "task.whole_image_competes", False, True, "4.2", "the whole image may be the answer", _REFCOCO),
    Rule(15, "task.iou", "plain", "published", "4.2", "width of a box: x2 - x1, or x2 - x1 + 1", _REFCOCO),
    Rule(16, "data.flip", 0.0, 0.5, "A.2", "probability of mirroring an image"),
    Rule(18, "model.regions.padding", "groups", "batch", "open", "padding of images of different sizes", _PRETRAINING),
    Rule(18, "model.regions.padding", "groups", "fixed", "open", "padding of images of different sizes", _VCR),
    Rule(18, "model.regions.padding", "groups", "batch", "open", "padding of images of different sizes", _VQA),
    Rule(18, "model.regions.padding", "groups", "batch", "open", "padding of images of different sizes", _REFCOCO),
    Rule(19, "task.truncation", "each", "shared", "open", "a long choice shortens its own question, or all", _VCR),
    Rule(20, "task.swap_left_right", True, False, "open", "swap left and right in texts of mirrored images", _VCR),
)
# Rule 17 is a setting of detection, `boxes`: un-regressed proposals (code) or regressed boxes (paper 3.3). Precomputed
# features (rules 12 and 14) have their own recipes: model.regions.features.


def apply(recipe: Recipe, variant: Variant) -> Recipe:
    """Return a copy of the recipe in which every field that has a rule takes the variant's value."""
    return override_values(recipe, {rule.field: getattr(rule, variant) for rule in rules_of(recipe)})


def rules_of(recipe: Recipe) -> list[Rule]:
    """Return the rules that apply to a recipe's task and optimizer."""
    sgd = recipe.optimizer.kind == "sgd"  # VCR's optimizer: rules about Adam do not apply
    task = type(recipe.task).__name__
    return [
        rule
        for rule in RULES
        if rule.task in (None, task)
        and not (sgd and rule.field.startswith("optimizer.") and "max_grad_norm" not in rule.field)
    ]


def table() -> str:
    """Return all rules as a Markdown table."""
    rows = []
    for rule in RULES:
        task = f" ({rule.task.removesuffix('Settings')})" if rule.task else ""
        values = _format_value(rule.paper), _format_value(rule.published)
        rows.append((str(rule.number), f"`{rule.field}`{task}", *values, rule.description, rule.section))
    return markdown(("difference", "field", "paper", "authors' code", "description", "section of the paper"), rows)


def _format_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
