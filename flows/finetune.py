"""Finetune: torchrun trains a task on its own dataset, from a checkpoint of pre-training or without one, and evaluates
it on the splits that are named."""

from pathlib import Path

from prefect import flow

from flows.artifacts import stage_logger
from flows.settings import FinetuneSettings
from flows.torchrun import Log, Trained, Watch, check_overrides, evaluate, given_fields, show_training, train
from storage.object_store import open_store
from storage.runs import checkpoints, open_folder

# Fields of the recipe that this stage sets, each from what.
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
    """Fine-tune as `settings` say, then evaluate. Only from the main thread.

    `work` is a folder of this machine: a run that starts from no checkpoint gets the vocabulary of the pre-training
    that it is compared with, where one is named. Raises ValueError if there is no such checkpoint.
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
        "random_init": True if fresh and not settings.made.bert else None,
        "vocabulary": str(copy_vocabulary(checkpoint, Path(work))) if fresh and checkpoint else None,
    }
    trained = train(root, settings, given_fields(fields), log, watch)
    return evaluate(root, settings, trained, given_fields(data), log)


def find_checkpoint(root: str, settings: FinetuneSettings) -> str | None:
    """Return the path of the checkpoint to start from, None without one. With `none`, only its vocabulary is used."""
    if "/" in settings.checkpoint:
        return settings.checkpoint
    if not settings.pretraining:
        if settings.checkpoint == "none":
            return None
        raise ValueError(
            f"finetune: checkpoint is {settings.checkpoint} and pretraining names no run; name a run under "
            f"{root}/runs, give ROOT/runs/RUN/STEP as checkpoint, or start from none"
        )
    store = open_store(root, write=False)
    saved = [path.rpartition("/")[2] for path in checkpoints(store, settings.pretraining)]
    wanted = saved[-1:] if settings.checkpoint in ("latest", "none") else [settings.checkpoint]
    where = store.uri(f"runs/{settings.pretraining}")
    if not set(wanted) & set(saved):
        raise ValueError(
            f"finetune: {where} has no checkpoint {settings.checkpoint}; it has {', '.join(saved) or 'none'}"
        )
    return f"{where}/{wanted[0]}"


def copy_vocabulary(checkpoint: str, work: Path) -> Path:
    """Return a copy on this machine of the vocab.txt of ROOT/runs/RUN/STEP: the root may be a bucket."""
    root, _, path = checkpoint.rpartition("/runs/")
    file = work / "vocabularies" / f"{path.partition('/')[0]}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(open_folder(open_store(root, write=False), f"runs/{path}").get("vocab.txt"))
    return file


@flow(name="finetune", flow_run_name="{settings.task} {settings.run}", persist_result=False)
def finetune_flow(root: str, work: str, settings: FinetuneSettings) -> Trained:
    """Fine-tune VL-BERT on one task.

    Args:
        root: Of the storage: a folder of this machine, or s3://bucket/prefix.
        work: A folder of this machine, for copies of vocabularies.
        settings: The task, where its annotations are, and which pre-training it starts from.
    """
    log, run = stage_logger().info, settings.made.run
    return show_training("finetune", root, run, log, lambda watch: finetune(root, work, settings, log, watch))
