"""Draw a world, serve it, and take it down the whole road with a real Prefect server; ends with a report and a table.

    make demo [ROOT=demo-root] [SEED=0]      everything; what is done already is not done again
    make ui [ROOT=demo-root]                 the flow UI on what was recorded

Exits with 1 where the model did not learn what it should.
"""

import argparse
import logging
import os
import resource
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from demo.serve import WorldServer, free_port
from demo.world import DEFAULT_PORT, ROWS_PER_SHARD, World, WorldSettings, draw_world, read_world
from flows.settings import Dataset, DetectorSettings, FinetuneSettings, PretrainSettings, Processes, quiet_prefect
from flows.supervisor import ChildFailed, background
from storage.download import DownloadSettings

if TYPE_CHECKING:
    from flows.pipeline import Road

UI_PORT = 4200  # of `demo ui`: Prefect's own
RUNS = {"pretrain": "pretrain", "with": "finetune-with", "without": "finetune-without"}  # role -> name below ROOT/runs
LEAST_GROUNDING = 0.12  # accuracy at colour and shape words, minus that with another scene's picture
_SERVER_SECONDS = 120.0  # that the Prefect server may take to start
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
    prefect_home = root / "prefect"
    prefect_home.mkdir(parents=True, exist_ok=True)
    with WorldServer(world.root):
        drawn = time.monotonic() - started
        own = own_peak()
        with prefect_server(prefect_home):
            served = time.monotonic() - started - drawn
            road, walked = walk(root, world, seed, processes)
    worked = [*road.collected, *road.detected.values(), road.pretrained, *road.finetuned]
    stages = [
        Stage("draw and serve", drawn, own),
        # What Prefect itself took: to start, and of the road all that no stage worked.
        Stage("server", served + walked - sum(stage.seconds for stage in worked), own_peak()),
        Stage("download", sum(stage.seconds for stage in road.collected), own_peak()),
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


@contextmanager
def prefect_server(home: Path) -> Iterator[None]:
    """A Prefect server on a free port with its database in `home`, and this process set up to use it."""
    port, log = free_port(0), home / "server.log"
    # Before prefect is imported, which reads them then.
    for name in set(os.environ) - set(without_prefect(os.environ)):
        del os.environ[name]
    os.environ.update(server_environment(home, port))
    # What the stages say is printed by `show_stages`; Prefect's own words are in the UI.
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with background(command, log) as runs:
        say(f"starting a Prefect server at http://127.0.0.1:{port}")
        wait_for(f"{os.environ['PREFECT_API_URL']}/health", runs, log)
        yield


def without_prefect(environment: Mapping[str, str]) -> dict[str, str]:
    """All but PREFECT_*: the user's own server, key or database is not the demo's."""
    return {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}


def server_environment(home: Path, port: int) -> dict[str, str]:
    """What a server on this port and its clients are told."""
    return quiet_prefect(home) | {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
    }


def wait_for(url: str, runs: Callable[[], bool], log: Path) -> None:
    """Until `url` answers; RuntimeError with the end of the log where the server ends or takes too long."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would not find this machine
    deadline = time.monotonic() + _SERVER_SECONDS
    while runs() and time.monotonic() < deadline:
        try:
            with opener.open(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-50:])
    raise RuntimeError(f"the Prefect server did not answer at {url} in {_SERVER_SECONDS:g} s; {log} ends with:\n{tail}")


def walk(root: Path, world: World, seed: int, processes: int) -> tuple["Road", float]:
    """Run the flow `pretrain-vlbert` on the world; what it came to, and its seconds."""
    from prefect.events.worker import EventsWorker  # here, because what it reads is set by prefect_server

    from flows.pipeline import pretrain_vlbert

    parameters = flow_parameters(root, world, seed, processes)
    started = time.monotonic()
    try:
        with show_stages():
            road = pretrain_vlbert(**parameters)
    finally:
        # Prefect sends logs and events in the background; what it still has when the server stops, it would try to
        # send for a minute more.
        for handler in logging.getLogger("prefect.flow_runs").handlers:
            handler.flush()
        EventsWorker.drain_all(timeout=5)
    return road, time.monotonic() - started


def flow_parameters(root: Path, world: World, seed: int, processes: int) -> dict:
    """What the flow `pretrain-vlbert` is told for this world."""
    settings = DownloadSettings(deadline=3.0, allowed_hosts=(f"127.0.0.1:{world.port}",))
    scenes = DetectorSettings("annotated", annotations=str(world.annotations))
    things = DetectorSettings("annotated", annotations=str(world.refcoco_instances))
    datasets = [
        Dataset("captions", scenes, captions=str(world.train_tsv), download=settings, rows_per_shard=ROWS_PER_SHARD),
        Dataset("held-out", scenes, captions=str(world.held_out_tsv), download=settings, rows_per_shard=ROWS_PER_SHARD),
        Dataset("refcoco+", things, images=str(world.refcoco_images), download=settings, rows_per_shard=ROWS_PER_SHARD),
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
            pretrained=role == "with",
            overrides=seeded,
            processes=machine,
        )
        for role in ("with", "without")
    ]
    return {
        "root": str(root),
        "work": str(root / "work"),
        "datasets": datasets,
        "pretraining": pretraining,
        "finetunings": finetunings,
    }


@contextmanager
def show_stages() -> Iterator[None]:
    """Print what our stages log, in flows and in tasks, one line each, and none of what Prefect logs about them."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda record: "prefect" not in Path(record.pathname).parts)
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.task_runs")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


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
    """Become a Prefect server on the demo's database, until Ctrl-C."""
    home = root / "prefect"
    if not home.is_dir():
        raise ValueError(f"{root} holds no demo (no prefect/); run it first: {again('demo', root)}")
    environment = {**without_prefect(os.environ), **server_environment(home, port)}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    say(f"the flow UI will be at http://127.0.0.1:{port}/runs (Ctrl-C stops it)")
    os.execve(sys.executable, command, environment)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("what", nargs="?", choices=["run", "ui"], default="run")
    parser.add_argument("--root", type=Path, default=Path("demo-root"), help="folder for everything (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the world and of training (%(default)s)")
    parser.add_argument("--processes", type=int, default=min(2, cores), help="that train together (%(default)s)")
    parser.add_argument("--port", type=int, default=UI_PORT, help="of the flow UI (%(default)s)")
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
