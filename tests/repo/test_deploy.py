"""The files in deploy/: of a form that Kubernetes takes, and saying what vLLM's connector and the router understand."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ragblend.integrations.vllm.settings import ConnectorSettings
from ragblend.kvstore.places import Place


@pytest.fixture(scope="module")
def compose(repo):
    return yaml.safe_load((repo / "deploy" / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dockerfile(repo):
    """What the app's Dockerfile says last by each instruction."""
    lines = (
        (repo / "deploy" / "app" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    )
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in lines}


@pytest.fixture(scope="module")
def manifests(repo):
    text = (repo / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8")
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


def container(manifests, kind, name):
    (found,) = manifests[kind, name]["spec"]["template"]["spec"]["containers"]
    return found


def connector(arguments):
    """The connector's settings, as vLLM would hand them over, and the host of the shared store."""
    (said,) = (each for each in arguments if each.startswith("--kv-transfer-config="))
    config = json.loads(said.partition("=")[2])
    assert (config["kv_connector"], config["kv_role"]) == ("RAGBlendConnector", "kv_both")
    settings = ConnectorSettings.of(config["kv_connector_extra_config"])
    return settings, Place.of(settings.remote).where.partition(":")[0]


def workers(command):
    return re.findall(r"http://([\w.-]+):8000", command)


def test_kubernetes_takes_each_manifest(manifests):
    for each in manifests.values():
        kubernetes_validate.validate(each, "1.34", strict=True)
    wrong = {**manifests["Service", "ragblend"], "spec": {"selectr": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.34", strict=True)


@pytest.mark.parametrize("name", ["compose.yaml", "app/compose.yaml"])
def test_compose_takes_its_file(repo, tmp_path, name):
    """By the specification's own schema: where there is no docker, too."""
    text = (repo / "deploy" / name).read_text(encoding="utf-8")
    right, wrong = tmp_path / "right.yaml", tmp_path / "wrong.yaml"
    right.write_text(text)
    wrong.write_text(text.replace("image:", "imago:", 1))
    line = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = [subprocess.run([*line, each], capture_output=True, text=True) for each in (right, wrong)]
    assert done[0].returncode == 0, done[0].stdout
    assert done[1].returncode == 1 and "imago" in done[1].stdout


def test_the_image_has_what_ragblend_depends_on(repo):
    """Its Dockerfile had a list of its own, without what `ragblend ingest` needs."""
    project = tomllib.loads((repo / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = (repo / "deploy" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    (image,) = (line.rpartition(":v")[2] for line in lines if line.startswith("FROM "))
    assert SpecifierSet(extras["vllm"][0].removeprefix("vllm")).contains(image)
    words = shlex.split(next(line for line in lines if line.startswith("RUN ")))
    assert "--no-deps" not in words, "then the dependencies would have to be named, and kept up with"
    there, install = words[words.index(">") + 1], words[words.index("install") :]
    assert install[install.index("--constraint") + 1] == there, "or pip might change what vLLM has"
    (source,) = (Requirement(f"ragblend{word[4:]}") for word in install if word.startswith("/src"))
    named = {Requirement(each).name for extra in source.extras for each in extras[extra]}
    assert {"redis", "obstore"} <= named, "the shared store's"


def test_pods_name_what_is_there(manifests):
    services = {name for kind, name in manifests if kind == "Service"}
    vllm, router = (
        container(manifests, "StatefulSet", "ragblend-vllm"),
        container(manifests, "Deployment", "ragblend-router"),
    )
    settings, host = connector(vllm["args"])
    assert host in services and settings.home in {each["mountPath"] for each in vllm["volumeMounts"]}
    replicas = manifests["StatefulSet", "ragblend-vllm"]["spec"]["replicas"]
    assert workers(router["args"][0]) == [f"ragblend-vllm-{n}.ragblend-vllm" for n in range(replicas)]
    for (kind, name), each in manifests.items():
        if kind == "Service":
            labels = [
                m["metadata"].get("labels")
                for (k, _), m in manifests.items()
                if k in ("StatefulSet", "Deployment")
            ]
            assert each["spec"]["selector"] in labels, name


def test_services_of_compose_name_what_is_there(compose):
    services = compose["services"]
    for name in ("first", "second"):
        settings, host = connector(services[name]["command"])
        assert host in services and any(
            each.endswith(f":{settings.home}") for each in services[name]["volumes"]
        )
    assert workers(services["router"]["command"][-1]) == ["first", "second"]
    assert services["router"]["ports"] == ["127.0.0.1:8000:8000"] and "ports" not in services["kv"]


def test_the_app_s_image_runs_what_is_there(repo, dockerfile):
    """Its command is one of `ragblend ui`, at the port of its health check and of compose; not as root."""
    said, compose = dockerfile, repo / "deploy" / "app" / "compose.yaml"
    (app,) = yaml.safe_load(compose.read_text(encoding="utf-8"))["services"].values()
    command, _, check = json.loads(said["CMD"]), *said["HEALTHCHECK"].partition("CMD ")[1:]
    compile(json.loads(check)[-1], "health check", "exec")
    port = command[command.index("--port") + 1]
    assert said["EXPOSE"] == port and f", {port}," in check
    assert [each.rpartition(":")[2] for each in app["ports"]] == [port]
    assert said["USER"] not in ("0", "root")
    assert (
        app["volumes"][0].rpartition(":")[2] == said["VOLUME"]
        and f"RAGBLEND_HOME={said['VOLUME']} " in said["ENV"]
    )
    assert (repo / "deploy" / "app" / app["build"]["context"]).resolve() == repo.resolve()
    tree = subprocess.run(
        [sys.executable, "-m", "ragblend.app.cli.main", command[0], "--help"], capture_output=True
    )
    assert tree.returncode == 0 and all(
        each.encode() in tree.stdout for each in command[1:] if each[:2] == "--"
    )


@pytest.mark.parametrize(
    ("volume", "warned"), [(None, True), ("5f" * 32, True), ("ragblend_home", False), ("/srv/kv", False)]
)
def test_a_container_without_a_named_volume_says_what_that_means(dockerfile, tmp_path, volume, warned):
    """A lost library looked like an empty one."""
    mounts, command = tmp_path / "mountinfo", tmp_path / "ragblend"
    source = volume if volume and "/" in volume else f"/var/lib/docker/volumes/{volume}/_data"
    home = f"31 20 8:1 {source} /data rw,relatime - ext4 /dev/sda1 rw\n" if volume else ""
    mounts.write_text(f"20 1 0:40 / / rw,relatime - overlay overlay rw\n{home}")
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    line = json.loads(dockerfile["ENTRYPOINT"].replace("/proc/self/mountinfo", str(mounts)))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([*line, "ask", "Why?"], env={"PATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ask Why?\n")
    assert ("ragblend:/data" in done.stderr) is warned
