"""Plans of the comparisons that `vlbert compare` runs. Each function returns one Plan."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PRETRAINING = "pretraining"  # scope of fields for pre-training, and its task in run names
_NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class Training:
    """A training run: the name of its recipe (or MODULE:FUNCTION), and changes to the recipe's fields."""

    recipe: str
    changes: tuple[str, ...] = ()  # arguments as for `vlbert train`; {root} in them stands for data.root
    run: str = ""  # its name, with {seed} in it; empty: compare-PLAN-VARIANT-TASK-seed{seed}


@dataclass(frozen=True)
class Variant:
    """A row of the comparison: a model that is pre-trained, then fine-tuned on each task."""

    title: str
    pretraining: Training | None  # None: fine-tune without pre-training
    finetunings: Mapping[str, Training]  # by task name; tasks may be missing
    paper: Mapping[str, float] = field(default_factory=dict)  # percentage that a paper reports, by task name


@dataclass(frozen=True)
class ComparedTask:
    """A column of the comparison: a task on which the models are fine-tuned and evaluated.

    Attributes:
        split: Split to evaluate on, named as for `vlbert evaluate`.
        metric: Name of a metric in metrics.json. It must be the mean of the examples' scores in `column`.
        column: Column of predictions.parquet.
        within: If `column` has ranks, the highest rank that scores 1 (others score 0). None if `column` has scores.
        chance: Name of the metric in metrics.json with the score of random guesses, or None.
        best: Evaluate the checkpoint with the best validation instead of the last one. `split` must be another split
            than that of the validation.
    """

    title: str
    split: str
    metric: str
    column: str = "score"
    within: int | None = None
    chance: str | None = "chance"
    best: bool = False


@dataclass(frozen=True)
class Plan:
    """A plan of a comparison. Each variant is trained on each task once per seed."""

    name: str
    title: str
    variants: Mapping[str, Variant]
    tasks: Mapping[str, ComparedTask]
    seeds: tuple[int, ...] = (0, 1, 2)
    pretraining_metrics: tuple[str, ...] = ()  # metrics of pre-training's last validation to show on the page
    paper: str = ""  # source of the numbers in Variant.paper

    def __post_init__(self):
        names = [PRETRAINING, *self.variants, *self.tasks]
        if not (self.variants and self.tasks and self.seeds and len({*self.seeds}) == len(self.seeds)):
            raise ValueError(f"plan {self.name}: give at least one variant, task and seed, and no seed twice")
        for name in (self.name, *names):
            if not _NAME.fullmatch(name) or names.count(name) > 1:
                raise ValueError(
                    f"name {name!r} of plan {self.name} must be unique, of lower-case letters, digits and _"
                )
        for name, variant in self.variants.items():
            if other := variant.finetunings.keys() - self.tasks.keys():
                names = ", ".join(sorted(other))
                raise ValueError(
                    f"variant {name} of plan {self.name} has a fine-tuning for {names}: the plan has no such task"
                )


# --- on the demo's drawn scenes: `make compare` makes their files below data.root -------------------------------------

# Words of the captions that can only be predicted from the image: demo/scenes.py.
_DEMO_WORDS = "blue circle cross green purple red ring square star triangle white yellow"
DEMO_WORDS = tuple(_DEMO_WORDS.split())
_DEMO_TASKS = {
    "vqa": ComparedTask("VQA", "eval2014", "accuracy"),
    "refcoco": ComparedTask("RefCOCO+", "testA", "accuracy_published"),
    "retrieval": ComparedTask("Retrieval, caption → image, R@1", "test", "image_r1", "image_ranks", within=1),
}
_DEMO_FIELDS = {
    "vqa": ("--task.folder={root}/data/vqa", "--task.answers=18"),
    "refcoco": ("--task.folder={root}/data/refcoco+",),
    "retrieval": ("--task.folder={root}/data/retrieval",),
}
_DEMO_METRICS = ("monitored_accuracy", "monitored_accuracy_grounding_gap", "regions_accuracy_grounding_gap")
# VL-BERT's recipes with these changes of the model: heads, losses, data and steps are the same.
_ARCHITECTURES = {
    "vlbert": ("VL-BERT: one stream, each word sees the whole image", ()),
    "unicoder_vl": ("Unicoder-VL: one stream", ("--model.embedding=separate", "--model.whole_image=none")),
    "vilbert": ("ViLBERT: two streams", ("--model.embedding=separate", "--model.layers=TXTVXTV")),
}
_OBJECTIVES = {
    "words": ("masked words", ("--task.regions.probability=0",)),
    "regions": ("+ masked regions", ()),
    "matching": ("+ matching of caption and image", ("--task.relationship", "--task.mismatched=0.5")),
}


def family_demo() -> Plan:
    """Return a plan that compares VL-BERT's, Unicoder-VL's and ViLBERT's architectures on the scenes of demo/scenes.py.

    Only the architecture varies. Features are precomputed.
    """
    variants = {
        name: _demo_variant(title, _OBJECTIVES["matching"][1], model) for name, (title, model) in _ARCHITECTURES.items()
    }
    return _demo_plan("family_demo", "VL-BERT, Unicoder-VL and ViLBERT on drawn scenes", variants)


def objectives_demo() -> Plan:
    """Return a plan that compares VL-BERT's objectives of pre-training on the scenes of demo/scenes.py."""
    variants = {name: _demo_variant(title, objective) for name, (title, objective) in _OBJECTIVES.items()}
    variants["without"] = replace(variants["words"], title="without pre-training", pretraining=None)
    return _demo_plan("objectives_demo", "What VL-BERT learns from in pre-training, on drawn scenes", variants)


def _demo_variant(title: str, objective: tuple[str, ...], model: tuple[str, ...] = ()) -> Variant:
    common = ("--size=demo", "--features=precomputed", "--vocabulary={root}/text/vocab.txt", *model)
    corpus = ("--data.text_corpus={root}/text", "--task.monitored_words", *DEMO_WORDS)
    finetunings = {task: Training(f"finetune_{task}", (*common, *_DEMO_FIELDS[task])) for task in _DEMO_TASKS}
    return Variant(title, Training("pretrain_vlbert", (*common, *corpus, *objective)), finetunings)


def _demo_plan(name: str, title: str, variants: Mapping[str, Variant]) -> Plan:
    return Plan(name, title, variants, _DEMO_TASKS, tuple(range(10)), _DEMO_METRICS)


# --- VL-BERT's Table 4 ------------------------------------------------------------------------------------------------

# Row -> its title, changes to pre-training (None: no pre-training), and the paper's % on VQA test-dev, RefCOCO+ val
# with detected regions, VCR Q->A val and QA->R val.
_NO_TEXT, _FROZEN = "--data.text_batch=0", "--model.regions.frozen_stages=5"
_TABLE4: dict[str, tuple[str, tuple[str, ...] | None, tuple[float, ...]]] = {
    "without": ("without pre-training", None, (69.5, 62.7, 72.9, 73.0)),
    "a": ("(a) masked words", (_NO_TEXT, _FROZEN, "--task.regions.probability=0"), (71.0, 69.1, 72.9, 73.1)),
    "b": ("(b) + masked regions", (_NO_TEXT, _FROZEN), (71.1, 70.7, 73.0, 73.1)),
    "c": (
        "(c) as (b), + sentence-image relationship",
        (_NO_TEXT, _FROZEN, "--task.relationship", "--task.mismatched=0.5"),
        (70.3, 69.5, 72.2, 72.4),
    ),
    "d": ("(d) as (b), + text-only corpus", (_FROZEN,), (71.1, 70.7, 73.4, 73.8)),
    "full": ("as (d), + tuned Fast R-CNN", (), (71.2, 71.1, 73.8, 73.9)),
}


def table4() -> Plan:
    """Return a plan for VL-BERT's Table 4 on real data, with half of the paper's fine-tuning epochs.

    Requires the fields model.regions.weights=FILE and pretraining:data.text_corpus=FOLDER. Annotations are in ROOT/vqa,
    ROOT/refcoco+ and ROOT/vcr, or in a folder given as vqa:task.folder=FOLDER. Models are trained end to end. VQA is
    evaluated on val2014, because the answers of test-dev are not public.
    """
    vqa = ("--task.folder={root}/vqa", "--steps=4335", "--model.regions.features=end_to_end")
    vcr = ("--task.folder={root}/vcr", "--steps=33270", "--optimizer.decay_at", "23288", "29942")
    refcoco = ("--task.regions=detected", "--task.adds_ground_truth", "--task.folder={root}/refcoco+", "--steps=37560")
    finetunings = {
        "vqa": ("finetune_vqa", vqa),
        "refcoco": ("finetune_refcoco", refcoco),
        "vcr": ("finetune_vcr", vcr),
        "vcr_rationales": ("finetune_vcr", (*vcr, "--task.subtask=rationale")),
    }
    tasks = {
        "vqa": ComparedTask("VQA", "val2014", "accuracy"),
        "refcoco": ComparedTask("RefCOCO+, detected", "val", "accuracy_published"),
        "vcr": ComparedTask("VCR, Q→A", "val", "answer_accuracy"),
        "vcr_rationales": ComparedTask("VCR, QA→R", "val", "rationale_accuracy"),
    }
    variants = {}
    for name, (title, changes, reported) in _TABLE4.items():
        pretraining = None if changes is None else Training("pretrain_vlbert", changes)
        start = () if pretraining else ("--bert=bert-base-uncased",)
        tuned = {task: Training(recipe, (*given, *start)) for task, (recipe, given) in finetunings.items()}
        variants[name] = Variant(title, pretraining, tuned, dict(zip(tasks, reported, strict=True)))
    paper = "VL-BERT, table 4, base: VQA test-dev, RefCOCO+ val on detected regions, VCR val"
    return Plan("table4", "VL-BERT's Table 4", variants, tasks, paper=paper)


PLANS = {plan.__name__: plan for plan in (family_demo, objectives_demo, table4)}


def find_plan(name: str) -> Plan:
    """Return the plan with this name, or the plan that MODULE:FUNCTION returns. Raises ValueError if there is none."""
    from training.program import find_recipe  # here, because it imports torch, which deployments do not need

    plan = find_recipe(name, PLANS, "plan")()
    if not isinstance(plan, Plan):
        raise ValueError(f"{name} returns {type(plan).__name__}, not a Plan; docs/results.md has an example")
    return plan
