"""Draw a world, serve it, and take it down the whole road with a real Prefect server; ends with a report and a table.

    make demo [ROOT=demo-root] [SEED=0]      everything; what is done already is not done again
    make ui [ROOT=demo-root]                 the flow UI on what was recorded

Exits with 1 where the model did not learn what it should.
"""

import argparse
import copy
import os
import re
import resource
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import TypeAdapter

from demo.serve import WorldServer, free_port
from demo.world import DEFAULT_PORT, ROWS_PER_SHARD, World, WorldSettings, draw_world, read_world
from flows.serve import PORT, serve, serving
from flows.settings import Dataset, DetectorSettings, FinetuneSettings, PretrainSettings, Processes
from flows.supervisor import ChildFailed, run_child
from storage.download import DownloadSettings

if TYPE_CHECKING:
    from flows.pipeline import Road

WALK = ["deployment", "run", "pretrain-vlbert/default", "--watch"]
RUNS = {"pretrain": "pretrain", "with": "finetune-with", "without": "finetune-without"}  # role -> name below ROOT/runs
DATASETS = ("captions", "held-out", "refcoco+")
LEAST_GROUNDING = 0.12  # accuracy at colour and shape words, minus that with another scene's picture
# What our stages log begins with the name of a dataset or of a run; the rest of a worker's log is Prefect's.
_STAGE_LINE = re.compile(
    r"(?P<time>\d\d:\d\d:\d\d)\.\d+ \| \w+ +\| (?:Flow|Task) run '[^']*' - "
    rf"(?P<said>(?:{'|'.join(map(re.escape, [*DATASETS, *RUNS.values()]))})(?:: | is complete| goes on).*)"
)
# Seconds that a stage may take on two cores: a goal, not a gate.
BUDGET = {
    "draw and serve": 15,
    "download": 15,
    "detect": 30,
    "server": 45,
    "pre-train": 190,
    "fine-tune": 50,
    "report": 15,
    "total": 360,
}


class OtherWorld(ValueError):
    """The root belongs to a world of another seed, or of another version of this program."""


@dataclass(frozen=True)
class Stage:
    """A line of the table at the end; peak_bytes is the memory of the largest process that worked for it."""

    name: str
    seconds: float
    peak_bytes: int


def run_demo(root: Path, seed: int, processes: int) -> int:
    """The whole demo; the exit status."""
    started = time.monotonic()
    world = draw(root / "world", WorldSettings(seed=seed))
    home, deployments = root / "prefect", root / "prefect.yaml"
    write_deployments(deployments, flow_parameters(root, world, seed, processes))
    with WorldServer(world.root):
        drawn, own = time.monotonic() - started, own_peak()
        say("starting a Prefect server and a worker")
        with serving(home, free_port(0), deployments, query_seconds=2.0):
            road = walk(home / "worker.log")
    walked = time.monotonic() - started - drawn
    worked = [*road.collected, *road.detected.values(), road.pretrained, *road.finetuned]
    stages = [
        Stage("draw and serve", drawn, own),
        # What Prefect itself took: server, deployments and worker, and of the road all that no stage worked.
        Stage("server", walked - sum(stage.seconds for stage in worked), road.peak_bytes),
        Stage("download", sum(stage.seconds for stage in road.collected), road.peak_bytes),
        of_children("detect", list(road.detected.values())),
        of_children("pre-train", [road.pretrained]),
        of_children("fine-tune", road.finetuned),
    ]
    from demo.report import write_report  # after the stages, for it takes a second and some memory

    before = time.monotonic()
    report = write_report(root, world, [(stage.name, stage.seconds) for stage in stages], RUNS)
    stages.append(Stage("report", time.monotonic() - before, own_peak()))
    stages.append(Stage("total", time.monotonic() - started, max(stage.peak_bytes for stage in stages)))
    print(table(stages))
    print(places(root, report, road))
    failed = gates(road)
    print("\n".join(failed) if failed else "all gates passed")
    return 1 if failed else 0


def draw(folder: Path, settings: WorldSettings) -> World:
    """The drawn world; one that is there keeps its port, which stands in the lists that were collected.

    OtherWorld where another one is there: all that was made of it would have to go, too.
    """
    if (folder / "world.json").exists():
        try:
            world = read_world(folder)
        except ValueError as error:  # of another version
            raise OtherWorld(f"{error}\n{_elsewhere(folder.parent)}") from error
        if world.settings != settings:
            raise OtherWorld(
                f"{folder} holds the world of seed {world.settings.seed}, not of seed {settings.seed}: shards and runs "
                f"beside it are made of it.\nFor that world: {again('demo', folder.parent, world.settings.seed)}. "
                f"{_elsewhere(folder.parent)}"
            )
        port = world.port
    else:
        port = free_port()
        if port != DEFAULT_PORT:
            say(
                f"WARNING: port {DEFAULT_PORT} is taken, so the world is served at {port}. Its URLs say so: keys, "
                "shards and numbers differ from those of the default port"
            )
    say(f"drawing {settings.train_scenes + settings.held_out_scenes} scenes into {folder}")
    return draw_world(folder, settings, port)


def _elsewhere(root: Path) -> str:
    return f"For another: make demo ROOT=OTHER, or first remove this one: make clean ROOT={shlex.quote(str(root))}"


def again(what: str, root: Path, seed: int = 0) -> str:
    """The command, as one types it in the project's folder."""
    return f"make {what} ROOT={shlex.quote(str(root))}" + (f" SEED={seed}" if seed else "")


def walk(log: Path) -> "Road":
    """Run the deployment `pretrain-vlbert/default` to its end, as a user would; what it came to."""
    from prefect.client.orchestration import get_client  # here, because what it reads is set by `serving`
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
    from prefect.client.schemas.sorting import FlowRunSort

    say(f"prefect {' '.join(WALK)}")
    with stages_shown(log):
        run_child([sys.executable, "-m", "prefect", *WALK], lambda line: None)
    with get_client(sync_client=True) as client:
        road = FlowRunFilter(tags=FlowRunFilterTags(all_=["road"]))
        (run,) = client.read_flow_runs(flow_run_filter=road, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1)
    return run.state.result()


def write_deployments(file: Path, parameters: dict) -> None:
    """The project's prefect.yaml with the parameters of this world, and the schedule asleep."""
    project = yaml.safe_load((Path(__file__).parents[1] / "prefect.yaml").read_text())
    root, work, datasets, finetuning = (parameters[name] for name in ("root", "work", "datasets", "finetunings"))
    first = datasets[0]
    source = {name: value for name, value in first.items() if name != "detector"}
    scenes = {"root": root, "detector": first["detector"], "datasets": [first["name"]]}
    own = {
        "pretrain_vlbert": parameters,
        "collect_flow": {"root": root, "dataset": source},
        "detect_flow": scenes,
        "finetune_flow": {"root": root, "work": work, "settings": finetuning[0] | {"pretraining": RUNS["pretrain"]}},
    }
    for deployment in project["deployments"]:
        # Copied, so that the file repeats what two of them have in common, where it would refer to it.
        deployment["parameters"] = copy.deepcopy(own[deployment["entrypoint"].rpartition(".")[2]])
        for schedule in deployment.get("schedules", ()):
            schedule["active"] = False
    file.write_text(yaml.safe_dump({name: project[name] for name in ("name", "deployments")}, sort_keys=False))


def flow_parameters(root: Path, world: World, seed: int, processes: int) -> dict:
    """What the flow `pretrain-vlbert` is told for this world."""
    download = DownloadSettings(deadline=3.0, allowed_hosts=(f"127.0.0.1:{world.port}",))
    cut = {"download": download, "rows_per_shard": ROWS_PER_SHARD}
    scenes = DetectorSettings("annotated", annotations=str(world.annotations))
    things = DetectorSettings("annotated", annotations=str(world.refcoco_instances))
    datasets = [
        Dataset(DATASETS[0], captions=str(world.train_tsv), detector=scenes, **cut),
        Dataset(DATASETS[1], captions=str(world.held_out_tsv), detector=scenes, **cut),
        Dataset(DATASETS[2], images=str(world.refcoco_images), detector=things, **cut),
    ]
    machine, seeded = Processes(processes), (f"data.seed={seed}",)
    pretraining = PretrainSettings(
        recipe="pretrain_vlbert_demo",
        run=RUNS["pretrain"],
        held_out="held-out",
        text=(str(world.text),),
        vocabulary_size=500,
        vocabulary_captions=(str(world.train_tsv),),
        watched_words=tuple(world.words_of_the_picture),
        overrides=seeded,
        processes=machine,
    )
    finetunings = [
        FinetuneSettings(
            recipe="finetune_refcoco_demo",
            run=RUNS[role],
            folder=str(world.refcoco),
            checkpoint="latest" if role == "with" else "none",
            overrides=seeded,
            processes=machine,
        )
        for role in ("with", "without")
    ]
    # As JSON, which is how parameters travel.
    return {
        "root": str(root),
        "work": str(root / "work"),
        "datasets": TypeAdapter(list[Dataset]).dump_python(datasets, mode="json"),
        "pretraining": TypeAdapter(PretrainSettings).dump_python(pretraining, mode="json"),
        "finetunings": TypeAdapter(list[FinetuneSettings]).dump_python(finetunings, mode="json"),
    }


@contextmanager
def stages_shown(log: Path) -> Iterator[None]:
    """Print what our stages log, in flows and in tasks, one line each, and none of what Prefect logs about them."""
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(log, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(log: Path, over: threading.Event) -> None:
    with log.open("rb") as lines:
        unfinished, last = b"", False
        while not last:
            last = over.wait(0.2)  # before the look, which then finds all that was written until the end
            *whole, unfinished = (unfinished + lines.read()).split(b"\n")
            for line in whole:
                found = _STAGE_LINE.match(line.decode(errors="replace"))
                if found:
                    print(f"{found['time']}  {found['said']}", flush=True)


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def own_peak() -> int:
    """The most memory that this process has had, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def of_children(name: str, stages: Sequence) -> Stage:
    return Stage(name, sum(stage.seconds for stage in stages), max(stage.peak_bytes for stage in stages))


def table(stages: Sequence[Stage]) -> str:
    lines = [f"\n{'stage':<16}{'seconds':>9}{'budget':>9}{'peak MB of one process':>24}"]
    lines += [
        f"{stage.name:<16}{stage.seconds:>9.1f}{BUDGET[stage.name]:>9}{stage.peak_bytes / 1e6:>24.0f}"
        for stage in stages
    ]
    return "\n".join(lines) + "\n"


def places(root: Path, report: Path, road: "Road") -> str:
    rows = [
        ("report", str(report)),
        ("shards", ", ".join(f"{root / collected.dataset}" for collected in road.collected)),
        ("checkpoints", ", ".join(trained.checkpoint for trained in (road.pretrained, *road.finetuned))),
        ("flow UI", again("ui", root)),
    ]
    return "\n".join(f"{name:<12} {where}" for name, where in rows) + "\n"


def gates(road: "Road") -> list[str]:
    """What the model should have learned and did not, one line each."""
    grounding = road.pretrained.metrics["watched_accuracy_grounding"]
    accuracy = {trained.run: trained.metrics["accuracy"] for trained in road.finetuned}
    with_it, without, chance = accuracy[RUNS["with"]], accuracy[RUNS["without"]], road.finetuned[0].metrics["chance"]
    print(f"grounding {grounding:.3f}; RefCOCO+ {with_it:.3f} pre-trained, {without:.3f} not, {chance:.3f} by chance")
    checks = [
        (grounding >= LEAST_GROUNDING, f"grounding is {grounding:.3f}, under {LEAST_GROUNDING}: it does not look"),
        (with_it > chance, f"RefCOCO+ with pre-training is {with_it:.3f}, not over chance ({chance:.3f})"),
        (with_it > without, f"RefCOCO+ with pre-training is {with_it:.3f}, not over {without:.3f} without it"),
    ]
    return [f"GATE FAILED: {message}" for passed, message in checks if not passed]


def show_ui(root: Path, port: int) -> None:
    """Serve the world, and the deployments on the demo's database with the flow UI, until Ctrl-C."""
    deployments = root / "prefect.yaml"
    if not deployments.is_file():
        raise ValueError(f"{root} holds no demo (no prefect.yaml); run it first: {again('demo', root)}")
    with WorldServer(root / "world"):
        serve(root / "prefect", port, deployments)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("what", nargs="?", choices=["run", "ui"], default="run")
    parser.add_argument("--root", type=Path, default=Path("demo-root"), help="folder for everything (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the world and of training (%(default)s)")
    parser.add_argument("--processes", type=int, default=min(2, cores), help="that train together (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="of the flow UI (%(default)s)")
    chosen = parser.parse_args(arguments)
    command = again("demo", chosen.root, chosen.seed)
    try:
        if chosen.what == "ui":
            show_ui(chosen.root, chosen.port)
        sys.exit(run_demo(chosen.root, chosen.seed, chosen.processes))
    except OtherWorld as error:
        sys.exit(f"error: {error}")
    except (ValueError, RuntimeError, ChildFailed, ConnectionError) as error:
        sys.exit(f"\nthe demo stopped: {error}\nWhat is done stays; `{command}` goes on.")
    except KeyboardInterrupt:
        print(f"\nstopped; `{command}` goes on from here", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
