"""Fine-tune a model on a task's dataset with torchrun, from a checkpoint or from scratch, and evaluate it."""

from pathlib import Path

from prefect import flow

from flows.artifacts import stage_logger
from flows.settings import FinetuneSettings
from flows.torchrun import Log, Trained, Watch, check_overrides, drop_none, evaluate, show_training, train
from storage.object_store import open_store
from storage.runs import checkpoints, open_folder

# Fields of the recipe that this stage sets, each with its source.
SETTINGS = {
    "run_name": "the setting run",
    "data.root": "the flow's root",
    "data.datasets": "the setting dataset",
    "data.held_out": "the setting dataset",
    "data.detector": "the setting detector",
    "task.folder": "the setting folder",
    "init_from": "the settings pretraining and checkpoint",
    "random_init": "the setting checkpoint",
    "vocabulary": "the pre-training's vocabulary",
}


def finetune(
    root: str, work: str, settings: FinetuneSettings, log: Log = print, watch: Watch = lambda: None
) -> Trained:
    """Fine-tune a model and evaluate it. Call this function from the main thread only.

    With checkpoint `none`, the model still uses the vocabulary of the pre-training run, if one is named, so that
    results with and without pre-training are comparable. The vocabulary is copied to `work`, a local folder. Raises
    ValueError if the checkpoint does not exist.
    """
    check_overrides(settings.overrides, SETTINGS)
    checkpoint, fresh = find_checkpoint(root, settings), settings.checkpoint == "none"
    data = {
        "data.datasets": {settings.dataset_name: None},
        "data.held_out": (settings.dataset_name,),
        "data.detector": settings.detector,
        "task.folder": settings.folder or None,
    }
    fields = data | {
        "init_from": None if fresh else checkpoint,
        "random_init": True if fresh and not settings.resolved_recipe.bert else None,
        "vocabulary": str(copy_vocabulary(checkpoint, Path(work))) if fresh and checkpoint else None,
    }
    trained = train(root, settings, drop_none(fields), log, watch)
    return evaluate(root, settings, trained, drop_none(data), log)


def find_checkpoint(root: str, settings: FinetuneSettings) -> str | None:
    """Return the location of the checkpoint with the initial weights and the vocabulary, or None.

    With checkpoint `none`, the result is None if `settings.pretraining` names no run. Otherwise, it is the last
    checkpoint of that run, and only its vocabulary is used.
    """
    if "/" in settings.checkpoint:
        return settings.checkpoint
    if not settings.pretraining:
        if settings.checkpoint == "none":
            return None
        raise ValueError(
            f"finetune: checkpoint is {settings.checkpoint}, but pretraining names no run; set pretraining to a run "
            f"under {root}/runs, or checkpoint to ROOT/runs/RUN/STEP or none"
        )
    store = open_store(root, write=False)
    saved = [path.rpartition("/")[2] for path in checkpoints(store, settings.pretraining)]
    wanted = saved[-1:] if settings.checkpoint in ("latest", "none") else [settings.checkpoint]
    run = store.uri(f"runs/{settings.pretraining}")
    if not set(wanted) & set(saved):
        raise ValueError(
            f"finetune: {run} has no checkpoint {settings.checkpoint}; its checkpoints: {', '.join(saved) or 'none'}"
        )
    return f"{run}/{wanted[0]}"


def copy_vocabulary(checkpoint: str, work: Path) -> Path:
    """Copy a checkpoint's vocab.txt to the local folder `work`. Return the copy's path."""
    root, _, path = checkpoint.rpartition("/runs/")
    file = work / "vocabularies" / f"{path.partition('/')[0]}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(open_folder(open_store(root, write=False), f"runs/{path}").get("vocab.txt"))
    return file


@flow(name="finetune", flow_run_name="{settings.task} {settings.run}", persist_result=False)
def finetune_flow(root: str, work: str, settings: FinetuneSettings) -> Trained:
    """Fine-tune VL-BERT on one task.

    Args:
        root: Storage root: a local folder, or s3://bucket/prefix.
        work: Local folder for copies of vocabularies.
        settings: The task, its annotations, and the pre-training run to start from.
    """
    log, run = stage_logger().info, settings.resolved_recipe.run
    return show_training("finetune", root, run, log, lambda watch: finetune(root, work, settings, log, watch))
