"""The images are built, and what docker/ says runs in them: compose.yaml as a user starts it, Kubernetes' Jobs."""

import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from containers import BASE, Engine, engine
from operated import Operated
from places import PROJECT
from web import draw, encode, send

from demo.serve import free_port
from detectors.annotated import AnnotatedDetector
from storage.catalog import Catalog
from storage.object_store import open_store

pytestmark = [pytest.mark.far, pytest.mark.timeout(600)]

DOCKER = PROJECT / "docker"
USER = 1000
PASSWORD = "operator:of-a-test"
SECRETS = ("POSTGRES_PASSWORD", "PREFECT_API_AUTH_STRING")
MANIFESTS = sorted(path for path in (DOCKER / "kubernetes").iterdir() if "kind:" in path.read_text())
# Debian's Postgres in place of the image postgres:17, which a registry has: with the same variables, volume and check.
DATABASE = """
bin=$(echo /usr/lib/postgresql/*/bin); export PGDATA=/run/postgresql/data
printf %s "$POSTGRES_PASSWORD" > /run/postgresql/password
$bin/initdb --auth scram-sha-256 --username "$POSTGRES_USER" --pwfile /run/postgresql/password
echo "CREATE DATABASE $POSTGRES_USER" | $bin/postgres --single postgres
echo 'host all all all scram-sha-256' >> $PGDATA/pg_hba.conf
exec $bin/postgres -c listen_addresses='*' -c unix_socket_directories=/run/postgresql
"""


def program(name: str) -> Path:
    """One that a package of the extra `dev` has installed."""
    if name == "docker-compose":  # its wrapper among the others ends with 0 whatever happened
        return Path(find_spec("compose").origin).with_name(name)
    return Path(sys.executable).parent / name


@pytest.fixture(scope="module")
def containers(tmp_path_factory) -> Engine:
    with engine(tmp_path_factory.mktemp("containers") / "engine") as made:
        made.build("server", "vlbert-server")
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """What a user puts into the folder /data: images, a list of them, their annotations; it is user 1000's."""
    folder = tmp_path_factory.mktemp("data")
    images, annotations = [], []
    for number in range(12):
        (folder / f"{number}.jpg").write_bytes(encode(draw(seed=number)))
        images.append({"id": number, "file_name": f"{number}.jpg", "width": 96, "height": 64})
        annotations.append({"image_id": number, "category_id": 1, "bbox": [8, 8, 40, 30]})
    coco = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "slope"}]}
    (folder / "coco.json").write_text(json.dumps(coco))
    for path in (folder, *folder.iterdir()):
        os.chown(path, USER, USER)
    for parent in (folder, *folder.parents):  # pytest's folders are closed to others
        parent.chmod(parent.stat().st_mode | 0o011)
    return folder


def captions(url: str) -> str:
    return "".join(f"slopes and noise {number}\t{url}/{number}.jpg\n" for number in range(12))


def keys(catalog: Catalog, stage: str) -> list[str]:
    return sorted(sample.key for shard in catalog.shards(stage) for sample in catalog.read(stage, shard))


# --- the image --------------------------------------------------------------------------------------------------------


def test_the_image_of_the_server_is_small_and_keeps_no_setting_of_the_machine_that_built_it(containers):
    (image,) = json.loads(containers.run("podman", "image", "inspect", "vlbert-server"))
    assert image["Size"] <= 0.9e9
    assert image["User"] == str(USER)
    run = ["podman", "run", "--rm", "vlbert-server", "sh", "-c"]
    history = containers.run("podman", "history", "--no-trunc", "vlbert-server")
    inside = containers.run(*run, "ls -A; env; cat /etc/pip.conf || true")
    for setting in (containers.folder / "pip.conf").read_text().splitlines()[1:]:
        value = setting.partition(" = ")[2]
        assert value not in history + inside or value.isdigit(), setting
    assert {"flows", "storage", "vlbert"} <= set(inside.splitlines())
    assert not {"tests", ".venv", ".git", "prefect.yaml"} & set(inside.splitlines())

    answer = containers.run(*run, "touch /srv/vlbert/x /opt/venv/x /etc/x; touch /scratch/x && id -u")
    assert answer.split() == [str(USER)]


# --- compose ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def composed(containers: Engine, data: Path, tmp_path_factory) -> Iterator[Operated]:
    """docker compose up, by podman. The worker is of the server's image: no flow that is run here needs PyTorch."""
    folder = tmp_path_factory.mktemp("compose")
    (data / "captions.tsv").write_text(captions("http://images:8000"))
    (data / "prefect.yaml").write_text(yaml.safe_dump(deployments()))
    debian = {"volumes": ["/usr:/usr:ro", "/etc/passwd:/etc/passwd:ro"], "tmpfs": ["/run/postgresql"]}
    override = {
        "database": debian | {"image": BASE, "user": str(pwd.getpwnam("postgres").pw_uid), "entrypoint": ["sh", "-ec"]},
        "worker": {"image": "vlbert-server"},
        "images": {"image": "vlbert-server", "init": True, "working_dir": "/data", "volumes": [f"{data}:/data:ro"]},
    }
    override["database"]["command"] = [DATABASE.replace("$", "$$")]
    override["images"]["command"] = ["python", "-m", "http.server", "8000"]
    # There may be no GPU.
    text = yaml.safe_dump({"services": override}).replace("  worker:\n", "  worker:\n    deploy: !reset null\n")
    (folder / "override.yaml").write_text(text)
    port = free_port()
    with containers.docker() as variables:
        variables |= {"POSTGRES_PASSWORD": "of-a-test", "PREFECT_API_AUTH_STRING": PASSWORD}
        variables |= {"VLBERT_DATA": str(data), "PORT": str(port)}
        files = ["--file", DOCKER / "compose.yaml", "--file", folder / "override.yaml"]
        compose = [program("docker-compose"), *files]
        try:
            with ThreadPoolExecutor(1) as pool:
                up = pool.submit(containers.run, *compose, "up", "--no-build", "--detach", seconds=240, **variables)
                # The end of a container that podman has seen is "stopped" until this is called, and compose waits for
                # "exited".
                seen = ["podman", "container", "cleanup", "vlbert-deploy-1"]
                checks = [["podman", "healthcheck", "run", f"vlbert-{service}-1"] for service in ("database", "server")]
                while not up.done():
                    for command in (*checks, seen):
                        with suppress(AssertionError):  # not there yet, not well yet, or not at its end
                            containers.run(*command)
                    time.sleep(1)
                up.result()
            yield Operated(folder / "prefect", f"http://127.0.0.1:{port}", data / "prefect.yaml", PASSWORD)
        finally:
            containers.run(*compose, "down", "--volumes", "--timeout", "20", seconds=120, **variables)


def deployments() -> dict:
    """The project's prefect.yaml with the data of these tests, named as a user does: relative to the file's folder."""
    project = yaml.safe_load((PROJECT / "prefect.yaml").read_text())
    detector = {"backend": "annotated", "annotations": "coco.json"}
    dataset = {"name": "captions", "captions": "captions.tsv", "rows_per_shard": 4}
    own = {"collect_flow": {"dataset": dataset | {"download": {"allowed_hosts": ["images:8000"]}}}}
    own["detect_flow"] = {"detector": detector}
    for deployment in project["deployments"]:
        deployment["parameters"] |= own.get(deployment["entrypoint"].rpartition(".")[2], {})
        for schedule in deployment.get("schedules", ()):
            schedule["active"] = False
    return {name: project[name] for name in ("name", "deployments")}


def test_compose_up_and_a_run_of_a_deployment_are_all_that_a_user_types(composed, data):
    for deployment in ("collect-captions/default", "detect-regions/default"):
        command = [sys.executable, "-m", "prefect", "deployment", "run", deployment, "--watch"]
        variables = os.environ | composed.variables
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    catalog = Catalog(open_store(str(data / "vl-root")), "captions")
    assert len(catalog.shards("images")) == 3
    assert len(keys(catalog, "images")) == 12
    assert keys(catalog, f"regions/{AnnotatedDetector(data / 'coco.json').id}") == keys(catalog, "images")
    assert {path.stat().st_uid for path in (data / "vl-root").rglob("*")} == {USER}


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def pod(job: str) -> dict:
    found = [one for file in MANIFESTS for one in yaml.safe_load_all(file.read_text()) if one["kind"] == "Job"]
    (job,) = [one for one in found if one["metadata"]["name"] == job]
    return job["spec"]["template"]["spec"]


def as_podman(pod: dict, data: Path) -> list[str]:
    """The options of `podman run`, and the command, that make the same of a pod's only container."""
    (container,) = pod["containers"]
    claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
    options = ["--user", str(pod["securityContext"]["runAsUser"])]
    if container["securityContext"]["readOnlyRootFilesystem"]:
        options += ["--read-only", "--read-only-tmpfs=false"]
    options += [f"--cap-drop={name}" for name in container["securityContext"]["capabilities"]["drop"]]
    for mount in container["volumeMounts"]:
        how = "ro" if mount.get("readOnly") else "rw"
        claim = mount["name"] in claims
        options += ["--volume", f"{data}:{mount['mountPath']}:{how}"] if claim else ["--tmpfs", mount["mountPath"]]
    return [*options, container["image"], *container["command"]]


@pytest.mark.parametrize("s3", ["moto"], indirect=True)
def test_two_pods_of_the_collection_share_a_list(containers, data, s3, web):
    for number in range(12):
        web.put(f"/{number}.jpg", send((data / f"{number}.jpg").read_bytes()))
    (data / "captions.tsv").write_text(captions(web.url("")))
    variables = [f"--env={name}" for name in os.environ if name.startswith("AWS_")]
    run = ["podman", "run", "--rm", "--network=host", *variables, *as_podman(pod("collect"), data)]
    run += ["--rows_per_shard=2", "--shards_per_task=1", f"--download.allowed_hosts={web.host}"]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(containers.run, *run, seconds=120) for _ in range(2)]:
            done.result()
    catalog = Catalog(open_store("s3://bucket/vl-root"), "captions")
    assert len(keys(catalog, "images")) == 12
    assert [len(catalog.revisions("images", shard)) for shard in catalog.shards("images")] == [1] * 6
    assert [web.count_of(f"/{number}.jpg") for number in range(12)] == [1] * 12


# --- what docker/ says, against schemas -------------------------------------------------------------------------------


def checked(name: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key not in SECRETS} | variables
    return subprocess.run([program(name), *map(str, arguments)], env=environment, capture_output=True, text=True)


VALIDATORS = [("hadolint", DOCKER / "Dockerfile")]
VALIDATORS += [("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml")]
VALIDATORS += [("kubernetes-validate", "--strict", file) for file in MANIFESTS]


@pytest.mark.parametrize("command", VALIDATORS, ids=lambda command: command[-1].name)
def test_no_program_that_knows_the_format_finds_a_fault(command):
    done = checked(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    if command[-1] in MANIFESTS:
        assert done.stdout.count(" passed for ") == len(list(yaml.safe_load_all(command[-1].read_text())))


def test_compose_yaml_asks_for_its_secrets():
    file, secrets = DOCKER / "compose.yaml", dict.fromkeys(SECRETS, "name:password")
    whole = checked("docker-compose", "--file", file, "config", "--format", "json", **secrets)
    assert whole.returncode == 0, whole.stderr
    for secret in SECRETS:
        lacking = checked("docker-compose", "--file", file, "config", **(secrets | {secret: ""}))
        assert lacking.returncode != 0
        assert secret in lacking.stderr
    for name, service in json.loads(whole.stdout)["services"].items():
        assert name == "database" or (service["read_only"] and service["init"] and service["cap_drop"] == ["ALL"]), name
