"""What `vlbert compare` compares: one function a plan, as a recipe is a function in vlbert/recipes/."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from training.program import find_recipe

PRETRAINING = "pretraining"  # the scope, and in names of runs the task, of a pre-training
_NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class Training:
    """A run of a recipe of vlbert/recipes.py, or of MODULE:FUNCTION.

    changes: arguments, as `vlbert train` takes them; {root} in one stands for data.root.
    """

    recipe: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A line of the comparison: a model that is pre-trained, then fine-tuned on each task.

    pretraining  None: each fine-tuning starts without one
    finetunings  by the name of the task; it is not trained on one that is missing
    paper        what a paper reports, %: by the name of the task
    """

    title: str
    pretraining: Training | None
    finetunings: Mapping[str, Training]
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparedTask:
    """A column of the comparison: what a fine-tuned model is evaluated on, and by which number.

    split    as vlbert evaluate takes it
    metric   the mean of `column` of predictions.parquet over the examples
    within   the column has ranks, and counts how many are at most so large: 5 makes recall@5; None: it has scores
    chance   the metric of metrics.json that tells what a blind choice gets; None: there is none
    """

    title: str
    split: str
    metric: str
    column: str = "score"
    within: int | None = None
    chance: str | None = "chance"


@dataclass(frozen=True)
class Plan:
    """Variants x tasks x seeds: each pair of a variant and a task is trained once a seed.

    pretraining_metrics  of the last validation of each pre-training: they stand on the page, too
    paper                where the numbers in Variant.paper come from
    """

    name: str
    title: str
    variants: Mapping[str, Variant]
    tasks: Mapping[str, ComparedTask]
    seeds: tuple[int, ...] = (0, 1, 2)
    pretraining_metrics: tuple[str, ...] = ()
    paper: str = ""

    def __post_init__(self):
        names = [PRETRAINING, *self.variants, *self.tasks]
        if not (self.variants and self.tasks and self.seeds and len({*self.seeds}) == len(self.seeds)):
            raise ValueError(f"plan {self.name}: name a variant, a task and a seed at least, and no seed twice")
        for name in (self.name, *names):
            if not _NAME.fullmatch(name) or names.count(name) > 1:
                raise ValueError(f"{name!r} of plan {self.name} is no name of its own of small letters, digits and _")
        for name, variant in self.variants.items():
            if other := variant.finetunings.keys() - self.tasks.keys():
                raise ValueError(f"variant {name} of plan {self.name} has a fine-tuning for {', '.join(sorted(other))}")


# --- on the demo's drawn world: `make compare` makes what they read below data.root -----------------------------------

# Words of the captions that only the image tells: demo/scenes.py.
_DEMO_WORDS = "blue circle cross green purple red ring square star triangle white yellow"
DEMO_WORDS = tuple(_DEMO_WORDS.split())
_DEMO = ("--size=demo", "--vocabulary={root}/text/vocab.txt")
_DEMO_TASKS = {
    "vqa": ComparedTask("VQA", "val2014", "accuracy"),
    "refcoco": ComparedTask("RefCOCO+", "val", "accuracy_published"),
    "vcr": ComparedTask("VCR, Q→A", "val", "answer_accuracy"),
    "retrieval": ComparedTask("Retrieval, caption → image, R@1", "val", "image_r1", "image_ranks", within=1),
}
_DEMO_FIELDS = {
    "vqa": ("--task.folder={root}/data/vqa", "--task.answers=18"),
    "refcoco": ("--task.folder={root}/data/refcoco+",),
    "vcr": ("--task.folder={root}/data/vcr", "--task.subtask=answer"),
    "retrieval": ("--task.folder={root}/data/retrieval",),
}
_DEMO_METRICS = ("monitored_accuracy", "monitored_accuracy_grounding_gap", "regions_accuracy_grounding_gap")


def family_demo() -> Plan:
    """VL-BERT, Unicoder-VL and ViLBERT at equal steps of 32 captions, on the drawn world."""
    # In the 600 steps of the recipes the two others only begin to tell which captions and images belong together.
    longer = ("--steps=1000", "--validate_every=500", "--save_every=500")
    corpus = ("--data.text_corpus={root}/text", "--task.monitored_words", *DEMO_WORDS)
    lines = {
        "vlbert": ("VL-BERT, end to end", "vlbert", "", ("--model.regions.weights={root}/detector.safetensors",)),
        "precomputed": ("VL-BERT, precomputed features", "vlbert", "", ("--features=precomputed",)),
        "unicoder_vl": ("Unicoder-VL", "unicoder_vl", "_unicoder_vl", ()),
        "vilbert": ("ViLBERT", "vilbert", "_vilbert", ()),
    }
    return Plan(
        name="family_demo",
        title="VL-BERT, Unicoder-VL and ViLBERT on the drawn world",
        variants={
            name: Variant(
                title,
                Training(f"pretrain_{model}", (*_DEMO, *features, *corpus, *longer)),
                {
                    task: Training(f"finetune_{task}{suffix}", (*_DEMO, *features, *_DEMO_FIELDS[task]))
                    for task in _DEMO_TASKS
                },
            )
            for name, (title, model, suffix, features) in lines.items()
        },
        tasks=_DEMO_TASKS,
        pretraining_metrics=_DEMO_METRICS,
    )


# --- VL-BERT's Table 4 ------------------------------------------------------------------------------------------------

# By line: its title, the changes of the pre-training (None: without one), and the paper's % on VQA test-dev, RefCOCO+
# val with detected regions, VCR Q->A val and QA->R val.
_ALONE, _FIXED = "--data.text_batch=0", "--model.regions.frozen_stages=5"
_TABLE4: dict[str, tuple[str, tuple[str, ...] | None, tuple[float, ...]]] = {
    "without": ("without pre-training", None, (69.5, 62.7, 72.9, 73.0)),
    "a": ("(a) masked words", (_ALONE, _FIXED, "--task.regions.probability=0"), (71.0, 69.1, 72.9, 73.1)),
    "b": ("(b) + masked regions", (_ALONE, _FIXED), (71.1, 70.7, 73.0, 73.1)),
    "c": (
        "(c) as (b), + sentence-image relationship",
        (_ALONE, _FIXED, "--task.relationship", "--task.mismatched=0.5"),
        (70.3, 69.5, 72.2, 72.4),
    ),
    "d": ("(d) as (b), + text-only corpus", (_FIXED,), (71.1, 70.7, 73.4, 73.8)),
    "full": ("as (d), + tuned Fast R-CNN", (), (71.2, 71.1, 73.8, 73.9)),
}


def table4() -> Plan:
    """VL-BERT's Table 4 on the real data, end to end, with half the epochs of the authors' fine-tunings.

    Give model.regions.weights=FILE and pretraining:data.text_corpus=FOLDER. The annotations lie in ROOT/vqa,
    ROOT/refcoco+ and ROOT/vcr, or where vqa:task.folder=FOLDER says. VQA is evaluated on val2014: no one has the
    answers of test-dev.
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
    for line, (title, changes, reported) in _TABLE4.items():
        pretraining = None if changes is None else Training("pretrain_vlbert", changes)
        start = () if pretraining else ("--bert=bert-base-uncased",)
        tuned = {task: Training(recipe, (*given, *start)) for task, (recipe, given) in finetunings.items()}
        variants[line] = Variant(title, pretraining, tuned, dict(zip(tasks, reported, strict=True)))
    paper = "VL-BERT, table 4, base: VQA test-dev, RefCOCO+ val on detected regions, VCR val"
    return Plan("table4", "VL-BERT's Table 4", variants, tasks, paper=paper)


PLANS = {plan.__name__: plan for plan in (family_demo, table4)}


def find_plan(name: str) -> Plan:
    """The plan of this name, or that of MODULE:FUNCTION; ValueError where there is none."""
    found = find_recipe(name, PLANS, "plan")()
    if not isinstance(found, Plan):
        raise ValueError(f"{name} returns {type(found).__name__}, no Plan; docs/results.md has one")
    return found
