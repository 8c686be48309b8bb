"""The files of ``service/deploy/container``: images, Compose, Kubernetes and monitoring."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import attnserve
from docs.hooks.reference import commands
from service.app import create_app
from service.auth import HEALTH
from service.engine.repository import Repository
from service.settings import Settings

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "service" / "deploy" / "container"
VARIABLES = {f"{Settings.prefix}{name}".upper() for name in Settings.model_fields}
USER = 10001
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/attnserve.json").read_text("utf-8"))
FUNCTIONS = {"by", "count", "histogram_quantile", "max", "min", "rate", "sum", "time"}


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text("utf-8"))


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, without comments and line breaks."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", "").splitlines() if line.strip()]
    return [(name, rest) for name, rest in (line.split(maxsplit=1) for line in lines)]


def instructions(name: str) -> list[str]:
    return [rest for found, rest in dockerfile() if found == name]


def image_variables() -> dict[str, str]:
    pairs = (pair for line in instructions("ENV") for pair in shlex.split(line))
    return dict(pair.split("=", 1) for pair in pairs)


def pod() -> dict[str, Any]:
    return manifest("Deployment")["spec"]["template"]["spec"]


def manifest(kind: str) -> dict[str, Any]:
    text = (FOLDER / "kubernetes.yaml").read_text("utf-8")
    (found,) = [each for each in yaml.safe_load_all(text) if each["kind"] == kind]
    return found


def kubernetes_variables() -> dict[str, str]:
    return {each["name"]: each["value"] for each in pod()["containers"][0]["env"]}


def service(file: str = "compose.yaml") -> dict[str, Any]:
    return read(file)["services"]["attnserve"]


def stops_within(variables: dict[str, str]) -> float:
    """Seconds after which a server with these variables has ended."""
    names = {"ATTNSERVE_DRAIN_DELAY_S", "ATTNSERVE_DRAIN_TIMEOUT_S"} & variables.keys()
    values: dict[str, Any] = {
        name.removeprefix("ATTNSERVE_").lower(): float(variables[name]) for name in names
    }
    settings = Settings(model=Path("/models"), **values)
    return settings.drain_delay_s + settings.drain_timeout_s


def images() -> Iterator[str]:
    stages = {line.split(" AS ")[1] for line in instructions("FROM")}
    yield from {line.split()[0] for line in instructions("FROM")} - stages
    for file in ("compose.yaml", "compose.cuda.yaml"):
        yield from (each["image"] for each in read(file)["services"].values() if "image" in each)
    yield pod()["containers"][0]["image"]


def test_images_have_version_tags_and_no_registry():
    for image in images():
        assert re.fullmatch(r"[a-z]+(/[a-z]+)?:v?\d+\.\d+[\w.-]*", image), image


def test_images_are_tagged_with_the_version_of_the_package():
    own = {image.split(":")[1] for image in images() if image.startswith("attnserve:")}
    assert own == {attnserve.__version__, f"{attnserve.__version__}-cuda"}


def test_variables_are_settings_with_valid_values(monkeypatch: pytest.MonkeyPatch):
    for variables in (image_variables(), kubernetes_variables(), service()["environment"]):
        ours = {name: value for name, value in variables.items() if name.startswith("ATTNSERVE_")}
        assert ours.keys() <= VARIABLES | {"ATTNSERVE_CACHE"}
        with monkeypatch.context() as patch:
            for name, value in ours.items():
                patch.setenv(name, value)
            Settings(model=Path("/models"))


@pytest.mark.parametrize(
    "arguments",
    [pod()["containers"][0]["args"], service()["command"], service("compose.cuda.yaml")["command"]],
    ids=["kubernetes", "compose", "compose.cuda"],
)
def test_command_of_the_container_parses(arguments: list[str]):
    (entry,) = map(json.loads, instructions("ENTRYPOINT"))
    assert entry[:2] == ["attnserve", "serve"]
    parsed = commands()["serve"].make_context("serve", [*entry[2:], *arguments])
    assert str(parsed.params["model"]) == "/models"


def test_container_user_is_not_root_and_the_same_everywhere():
    assert instructions("USER") == [f"{USER}:{USER}"]
    context = pod()["securityContext"]
    assert context["runAsNonRoot"] is True
    assert {context[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
    # A change of the group's rights in a cache would make the service ignore its files.
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"
    own = pod()["containers"][0]["securityContext"]
    assert own["readOnlyRootFilesystem"] and own["capabilities"] == {"drop": ["ALL"]}
    for name, each in read("compose.yaml")["services"].items():
        assert each["cap_drop"] == ["ALL"], name
        assert each["security_opt"] == ["no-new-privileges:true"], name
    assert service()["read_only"] is True


def test_ports_agree():
    port = int(image_variables()["ATTNSERVE_PORT"])
    assert port == Settings.model_fields["port"].default
    assert instructions("EXPOSE") == [str(port)]
    assert pod()["containers"][0]["ports"] == [{"name": "http", "containerPort": port}]
    assert service()["ports"] == [f"{port}:{port}"]
    (job,) = read("prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"attnserve:{port}"]}]
    annotations = manifest("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port)
    assert f"127.0.0.1:{port}/v2/health/ready" in instructions("HEALTHCHECK")[0]


def test_probes_are_health_checks():
    container = pod()["containers"][0]
    paths = {
        name: container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "readiness", "liveness")
    }
    assert paths.pop("readiness") == "/v2/health/ready"
    assert set(paths.values()) == {"/v2/health/live"}
    assert "/v2/health/ready" in HEALTH and "/v2/health/live" in HEALTH


def test_containers_are_killed_later_than_a_drain_ends():
    assert pod()["terminationGracePeriodSeconds"] > stops_within(kubernetes_variables())
    grace = re.fullmatch(r"(\d+)s", service()["stop_grace_period"])
    assert grace is not None and int(grace[1]) > stops_within(service()["environment"])


def test_cache_and_keys_are_volumes():
    variables = image_variables()
    cache = variables["ATTNSERVE_CACHE"]
    assert instructions("VOLUME") == [cache]
    assert f"cache:{cache}" in service()["volumes"]
    mounts = {each["name"]: each for each in pod()["containers"][0]["volumeMounts"]}
    assert mounts["cache"]["mountPath"] == cache and mounts["tmp"]["mountPath"] == "/tmp"
    assert {each["name"] for each in pod()["volumes"]} == mounts.keys()
    keys = Path(kubernetes_variables()["ATTNSERVE_API_KEYS_FILE"])
    assert str(keys.parent) == mounts["keys"]["mountPath"]
    (secret,) = service()["secrets"]
    assert variables["ATTNSERVE_API_KEYS_FILE"] == f"/run/secrets/{secret}"


def test_service_and_disruption_budget_select_the_pods():
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("Service")["spec"]["selector"] == labels
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels


def test_files_that_are_copied_or_mounted_exist():
    for line in instructions("COPY"):
        if not line.startswith("--from="):
            assert all((ROOT / name).exists() for name in line.split()[:-1]), line
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text("utf-8").split()
    copied = {
        name for line in instructions("COPY") if "--from" not in line for name in line.split()[:-1]
    }
    assert {name.removeprefix("!") for name in ignored if name.startswith("!")} == copied
    build = service()["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    for each in read("compose.yaml")["services"].values():
        for volume in each["volumes"]:
            if isinstance(volume, str) and volume.startswith("./"):
                assert (FOLDER / volume.split(":")[0]).exists(), volume


def test_targets_of_the_compose_files_install_existing_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = re.findall(r"'\.\[(.+?)\]'", " ".join(instructions("RUN")))
    assert installed == ["cpu,openvino", "gpu"]
    extras = {extra for each in installed for extra in each.split(",")}
    assert extras <= project["optional-dependencies"].keys()
    stages = {line.split(" AS ")[1] for line in instructions("FROM")}
    assert {service()["build"]["target"], service("compose.cuda.yaml")["build"]["target"]} <= stages


def test_secrets_are_ignored_by_git():
    ignored = (ROOT / ".gitignore").read_text().split()
    for secret in read("compose.yaml")["secrets"].values():
        folder = (FOLDER / secret["file"]).parent.relative_to(ROOT).as_posix()
        assert f"{folder}/" in ignored


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def series(encoder: Path) -> dict[str, set[str]]:
    """The labels of each series of /metrics of a served model, after a request."""
    app = create_app(Settings(model=encoder, probe=False))
    with TestClient(app) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.present_state.gpu_bytes", lambda: 0)  # of other machines
        patch.setattr(Repository, "workers", (2, 2))  # and settings
        assert client.post("/embed", json={"inputs": "a b"}).status_code == 200
        text = client.get("/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
        for suffix in suffixes.get(family.type, ("",)):
            found.setdefault(family.name + suffix, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panel_queries_series_and_labels_that_exist(
    panel: dict[str, Any], series: dict[str, set[str]]
):
    for target in panel["targets"]:
        query = re.sub(r"\$__rate_interval", "5m", target["expr"])
        names = set(re.findall(r"\b[a-z]\w*\b(?=[\s({\[>)]|$)", re.sub(r"\{.*?\}", "{}", query)))
        grouped = {
            label.strip()
            for labels in re.findall(r"by \((.*?)\)", query)
            for label in labels.split(",")
        }
        metrics = names - FUNCTIONS - grouped
        assert metrics and metrics <= series.keys(), metrics - series.keys()
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        selected = set(re.findall(r"[{,](\w+)=", query))
        known = set().union(*(series[name] for name in metrics)) | {"instance", "job"}
        if known > {"instance", "job"}:  # labels of series without values are unknown
            assert grouped | selected <= known
        assert not grouped or shown <= grouped


def test_panels_do_not_overlap_and_have_a_description():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
    assert all(panel["description"] for panel in panels())
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_dashboard_reads_the_provisioned_source():
    (source,) = read("grafana/provisioning/datasources.yaml")["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    (provider,) = read("grafana/provisioning/dashboards.yaml")["providers"]
    mounts = [v.split(":") for v in read("compose.yaml")["services"]["grafana"]["volumes"]]
    assert ["./grafana/dashboards", provider["options"]["path"], "ro"] in mounts
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(DASHBOARD["panels"])))
    assert used - {"__rate_interval"} == variables
