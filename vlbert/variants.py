"""The two variants: where the paper and the authors' code differ, each rule is a field of a recipe with both values.

    vlbert recipes        prints them as a table; docs/models.md explains some

`apply(recipe, variant)` sets all of them. Released checkpoints need the code's; the paper's tables name
the paper's. Numbers (learning rates, batches, steps) stand in the recipes themselves, beside their sources.
"""

from dataclasses import dataclass
from typing import Any, Literal

from storage.settings import override_values
from storage.tables import markdown
from vlbert.config import Recipe

Variant = Literal["paper", "published"]


@dataclass(frozen=True)
class Rule:
    """One field, dotted as on the command line; `task` names the settings that it belongs to, None: every recipe's."""

    number: int  # of the difference, in the order of the description of the authors' code
    field: str
    paper: Any
    published: Any
    section: str  # of the paper; "open" where it says nothing: `paper` is then our own choice
    what: str
    task: str | None = None


_PRETRAINING, _VCR, _VQA, _REFCOCO = (f"{task}Settings" for task in ("Pretraining", "VCR", "VQA", "RefCOCO"))

RULES = (
    Rule(1, "task.region_target", "class", "distribution", "3.3", "label of a masked region", _PRETRAINING),
    Rule(2, "task.regions.masked", 1.0, 0.9, "3.3", "share of chosen regions that are masked", _PRETRAINING),
    Rule(3, "task.words.masked", 1.0, 0.8, "3.3", "share of chosen words that become [MASK]", _PRETRAINING),
    Rule(3, "task.words.random", 0.0, 0.1, "3.3", "share that become any other token", _PRETRAINING),
    Rule(4, "task.max_elements", None, 64, "3.3", "tokens and regions of a row; none: all regions", _PRETRAINING),
    Rule(5, "task.text_specials", True, False, "3.3", "[CLS] and [SEP] round a text-only row", _PRETRAINING),
    Rule(6, "model.visual_activation", "none", "relu", "3.2", "after the fully connected layer of the visual feature"),
    Rule(6, "model.visual_dropout", False, True, "3.2", "dropout before that layer"),
    Rule(6, "model.visual_norm", "none", "layer_norm", "3.2", "between the visual feature embedding and the token"),
    Rule(6, "model.visual_initialisation", "normal", "pytorch", "4.1", "first weights of that layer"),
    Rule(6, "model.head_initialisation", "normal", "xavier", "4.1", "first weights of fine-tuning's layers"),
    Rule(7, "model.geometry", "corners", "centre", "3.2", "how a box enters the geometry embedding"),
    Rule(8, "model.special_tokens", "vocabulary", "own", "3.2", "whether [IMG] and [END] are words"),
    Rule(8, "model.masked_region_token", False, True, "3.2", "a masked region has another token than [IMG]"),
    Rule(8, "model.end_visual_embedding", True, False, "3.2", "[END] carries the visual feature of the whole image"),
    Rule(9, "task.mention_visual_embedding", "image", "object", "3.2", "feature of a word that names an object", _VCR),
    Rule(10, "model.regions.frozen_stages", 0, 2, "A.2", "first stages of the ResNet that are not trained"),
    Rule(10, "model.regions.resnet.norm", "batch", "frozen", "A.2", "whether its BatchNorms are trained"),
    Rule(11, "optimizer.kind", "adam", "adamw", "A.2", "weight decay in the gradient, or beside it"),
    Rule(11, "optimizer.epsilon", 1e-8, 1e-6, "A.2", "Adam's epsilon; the paper names none, Adam's own default"),
    Rule(11, "optimizer.bert_adam", False, True, "A.2", "epsilon before the bias correction, decay after the step"),
    Rule(11, "optimizer.max_grad_norm", None, 10.0, "A.2", "largest gradient norm", _PRETRAINING),
    Rule(11, "optimizer.max_grad_norm", None, 10.0, "A.2", "largest gradient norm", _VCR),
    Rule(11, "optimizer.max_grad_norm", None, 1.0, "A.2", "largest gradient norm", _VQA),
    Rule(11, "optimizer.max_grad_norm", None, 1.0, "A.2", "largest gradient norm", _REFCOCO),
    Rule(12, "model.regions.masked_pixels", "black", "mean", "3.3", "value of masked pixels"),
    Rule(13, "task.loss", "softmax", "sigmoid", "4.2", "one of four choices, or each by itself", _VCR),
    Rule(13, "task.pooled", False, True, "4.2", "BERT's tanh pooler between [CLS] and the score", _VCR),
    Rule(13, "task.instance_masks", False, True, "4.2", "only an object's own cells count in its feature", _VCR),
    Rule(13, "task.masked_regions", 0.15, 0.0, "4.2", "share masked and labelled; 0: all labelled", _VCR),
    Rule(13, "task.names", "class", "neutral", "4.2", "how a person is called who is mentioned", _VCR),
    Rule(14, "task.loss", "cross_entropy", "bce", "4.2", "the best answer, or each to its soft score", _VQA),
    Rule(14, "task.answers_from_words", False, True, "4.2", "first weights of the answers", _VQA),
    Rule(15, "task.whole_image_competes", False, True, "4.2", "the whole image may be the answer", _REFCOCO),
    Rule(15, "task.iou", "plain", "published", "4.2", "overlaps of planes, or of pixels, x2 - x1 + 1 wide", _REFCOCO),
    Rule(16, "data.flip", 0.0, 0.5, "A.2", "probability of mirroring an image"),
    Rule(18, "model.regions.padding", "groups", "batch", "open", "padding of images of several sizes", _PRETRAINING),
    Rule(18, "model.regions.padding", "groups", "fixed", "open", "padding of images of several sizes", _VCR),
    Rule(18, "model.regions.padding", "groups", "batch", "open", "padding of images of several sizes", _VQA),
    Rule(18, "model.regions.padding", "groups", "batch", "open", "padding of images of several sizes", _REFCOCO),
    Rule(19, "task.truncation", "each", "shared", "open", "rows whose question a long choice shortens", _VCR),
    Rule(20, "task.swap_left_right", True, False, "open", "left for right in texts of a mirrored image", _VCR),
)
# Rule 17 is a setting of detection, `boxes`: un-regressed proposals (code) or regressed boxes (paper 3.3). Precomputed
# features (rules 12 and 14) are a recipe of their own: model.regions.features.


def apply(recipe: Recipe, variant: Variant) -> Recipe:
    """Return the recipe with every rule as the paper, or as the authors' code, has it."""
    return override_values(recipe, {rule.field: getattr(rule, variant) for rule in rules_of(recipe)})


def rules_of(recipe: Recipe) -> list[Rule]:
    """The rules that concern this recipe."""
    sgd = recipe.optimizer.kind == "sgd"  # VCR's: no question of Adam's
    task = type(recipe.task).__name__
    return [
        rule
        for rule in RULES
        if rule.task in (None, task)
        and not (sgd and rule.field.startswith("optimizer.") and "max_grad_norm" not in rule.field)
    ]


def table() -> str:
    """Return the rules as Markdown."""
    rows = []
    for rule in RULES:
        task = f" ({rule.task.removesuffix('Settings')})" if rule.task else ""
        values = _format_value(rule.paper), _format_value(rule.published)
        rows.append((str(rule.number), f"`{rule.field}`{task}", *values, rule.what, rule.section))
    return markdown(("difference", "field", "paper", "authors' code", "what", "in the paper"), rows)


def _format_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
