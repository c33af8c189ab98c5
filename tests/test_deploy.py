"""The files of deploy/ parse, and name only options and metrics that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]  # stubs would be one more package

from taskyard.cli.entry import taskyard
from taskyard.net.endpoints import parse_addresses
from taskyard.web.metrics import DEFINITIONS
from tests.kit.cases import each_case
from tests.kit.requirements import need

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SINGLE_UNIT, PAIR_UNIT = "taskyard-broker.service", "taskyard-pair.service"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
METRIC = re.compile(r"\btaskyard_[a-z_]+")
#: Series of a histogram.
PARTS = re.compile(r"_(?:bucket|sum|count)$")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def kind(name: str) -> list[dict[str, Any]]:
    return [one for path in MANIFESTS for one in documents(path) if one["kind"] == name]


def of_kind(file: str, name: str) -> list[dict[str, Any]]:
    return [one for one in documents(DEPLOY / "kubernetes" / file) if one["kind"] == name]


def stateful(file: str) -> dict[str, Any]:
    (found,) = of_kind(file, "StatefulSet")
    return found


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as its documentation says
    parser.read_string(path.read_text())
    return parser


def shell_words(text: str) -> list[str]:
    """Return the words of the command of this package in a line for `sh -c`."""
    _, found, rest = text.partition("|| taskyard ")
    return shlex.split(rest) if found else []


def containers() -> Iterator[dict[str, Any]]:
    for document in kind("StatefulSet") + kind("Deployment"):
        spec = document["spec"]["template"]["spec"]
        yield from spec.get("initContainers", [])
        yield from spec["containers"]


def compose_services() -> dict[str, dict[str, Any]]:
    (document,) = documents(DEPLOY / "docker" / "compose.yaml")
    services: dict[str, dict[str, Any]] = document["services"]
    return services


def docker_lines(instruction: str) -> list[str]:
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    return [
        line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{instruction} ")
    ]


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield each command of this package in deploy/, with its place."""
    for path in UNITS:
        program, *words = shlex.split(unit(path)["Service"]["ExecStart"])
        assert program == "/usr/local/lib/taskyard/bin/taskyard", path
        yield path.name, [word.replace("%i", "1").replace("%H", "host") for word in words]
    for one in containers():
        if "args" not in one:
            continue  # another program
        words = one["args"]
        yield f"container {one['name']}", shell_words(words[0]) if len(words) == 1 else words
    for name, service in compose_services().items():
        words = service["command"]
        yield f"compose {name}", shell_words(words[0]) if len(words) == 1 else words
    yield "Dockerfile", json.loads(docker_lines("CMD")[0])


def parse(words: list[str]) -> None:
    """Parse a command line and convert its values. No settings are read, and nothing runs."""
    context = taskyard.make_context("taskyard", [], resilient_parsing=True)
    command: click.Command = taskyard
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, f"no command {words[0]}"
        context = click.Context(found, context, words[0])
        command, words = found, words[1:]
    values, rest, _ = command.make_parser(context).parse_args(list(words))
    assert not rest
    for one in command.params:
        if values.get(one.name or "") is not None:
            one.type_cast_value(context, values[one.name or ""])


def test_every_command_line_is_valid() -> None:
    lines = list(command_lines())
    assert len(lines) == 17
    for place, words in lines:
        try:
            parse(words)
        except click.UsageError as error:
            pytest.fail(f"{place}: {error.format_message()}")


@each_case("words", [["broker", "--no-such"], ["worker", "--slots", "x"], ["broker", "more"]])
def test_invalid_command_lines_are_detected(words: list[str]) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        parse(words)


def test_units_are_hardened_and_restart() -> None:
    for path in UNITS:
        service = unit(path)["Service"]
        assert service["NoNewPrivileges"] == "yes"
        assert service["User"].startswith("taskyard")
        if path.name == PAIR_UNIT:
            continue
        assert service["Restart"] == "on-failure"
        assert "2" in service["RestartPreventExitStatus"].split()
    users = (DEPLOY / "systemd" / "taskyard.sysusers").read_text()
    assert {unit(path)["Service"]["User"] for path in UNITS} <= set(users.split())


def test_broker_of_a_pair_always_comes_back_and_has_the_rights_of_a_single_one() -> None:
    pair, single = (unit(DEPLOY / "systemd" / name) for name in (PAIR_UNIT, SINGLE_UNIT))
    service = pair["Service"]
    assert (service["Restart"], pair["Unit"]["StartLimitIntervalSec"]) == ("always", "0")
    assert "RestartPreventExitStatus" not in service
    assert pair["Unit"]["Conflicts"] == SINGLE_UNIT
    own = {"EnvironmentFile", "LoadCredential", "Environment", "ExecStartPre", "ExecStart"}
    own |= {"RuntimeDirectory", "RuntimeDirectoryMode", "Restart", "RestartPreventExitStatus"}
    shared = {*service, *single["Service"]} - own
    assert "SystemCallFilter" in shared
    assert {name: service[name] for name in shared} == {
        name: single["Service"][name] for name in shared
    }
    assert "broker --standby " in service["ExecStart"]


def test_password_file_of_a_pair_is_private_as_libpq_demands() -> None:
    service = unit(DEPLOY / "systemd" / PAIR_UNIT)["Service"]
    *copy, source, target = shlex.split(service["ExecStartPre"])
    assert copy == ["/usr/bin/install", "-m", "0600"]
    assert service["LoadCredential"].partition(":")[0] == Path(source).name
    assert service["Environment"] == f"PGPASSFILE={target}"
    assert Path(target).parent == Path("/run") / service["RuntimeDirectory"]
    assert service["RuntimeDirectoryMode"] == "0700"


@pytest.mark.needs("systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        # The program is not installed here.
        text = path.read_text().replace("/usr/local/lib/taskyard/bin/taskyard", "/bin/true")
        (tmp_path / path.name).write_text(text)
    verify = ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_broker_is_one_pod_with_a_volume_and_probes_that_need_no_token() -> None:
    spec = stateful("broker.yaml")["spec"]
    assert spec["replicas"] == 1
    assert spec["volumeClaimTemplates"][0]["spec"]["accessModes"] == ["ReadWriteOnce"]
    (page,) = [one for one in spec["template"]["spec"]["containers"] if one["name"] == "page"]
    probes = {page[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")}
    assert probes == {"/healthz", "/readyz"}


def test_pair_is_two_pods_on_two_nodes_of_which_one_is_drained_at_a_time() -> None:
    pair = stateful("pair.yaml")["spec"]
    pod = pair["template"]["spec"]
    assert pair["replicas"] == 2
    labels = pair["selector"]["matchLabels"]
    assert labels == stateful("broker.yaml")["spec"]["selector"]["matchLabels"]  # as workers expect
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"] == labels
    (budget,) = of_kind("pair.yaml", "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"] == labels
    # A standby would never be ready: rolling updates and drains would wait for ever.
    assert not any("readinessProbe" in one for one in pod["containers"])


def test_peers_find_both_pods_of_a_pair_by_name() -> None:
    (service,) = of_kind("pair.yaml", "Service")
    pair = stateful("pair.yaml")
    name, spec = service["metadata"]["name"], service["spec"]
    assert pair["spec"]["serviceName"] == name
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
    places = "+".join(f"tcp://{pair['metadata']['name']}-{n}.{name}:6125" for n in range(2))
    assert places in (DEPLOY / "kubernetes" / "pair.yaml").read_text()
    assert places in (DEPLOY.parent / "docs" / "deploy.md").read_text()
    assert [str(place) for place in parse_addresses(places)] == places.split("+")


def test_password_file_of_a_pod_is_private_as_libpq_demands() -> None:
    pod = stateful("pair.yaml")["spec"]["template"]["spec"]
    every = {one["name"]: one for one in [*pod["initContainers"], *pod["containers"]]}
    assert [*every] == ["pgpass", "store", "keys", "broker", "page"]
    *copy, source, target = every.pop("pgpass")["command"]
    assert copy == ["install", "-m", "0600"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["store"]["secret"]["items"] == [{"key": "pgpass", "path": Path(source).name}]
    assert volumes["pgpass"]["emptyDir"]["medium"] == "Memory"
    for one in every.values():
        mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
        assert mounts[str(Path(target).parent)] == "pgpass"
        assert "store" not in mounts.values()
        values = {value["name"]: value for value in one["env"]}
        assert values["PGPASSFILE"]["value"] == target
        url = values["TASKYARD_BROKER_STORE"]["valueFrom"]["secretKeyRef"]
        assert url == {"name": volumes["store"]["secret"]["secretName"], "key": "url"}
        assert one["securityContext"]["readOnlyRootFilesystem"]


def test_image_has_the_extras_of_its_programs() -> None:
    assert any('".[web,postgres]"' in line for line in docker_lines("RUN"))


def test_labels_of_services_and_policies_select_pods() -> None:
    labels = [
        document["spec"]["template"]["metadata"]["labels"]
        for document in kind("StatefulSet") + kind("Deployment")
    ]
    for policy in kind("NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"] in labels
    for service in kind("Service"):
        assert service["spec"]["selector"] in labels
    for document in kind("StatefulSet") + kind("Deployment"):
        assert document["spec"]["selector"]["matchLabels"] in labels


def test_autoscalers_scale_the_workers_by_the_backlog() -> None:
    (workers,) = kind("Deployment")
    (hpa,), (keda,) = kind("HorizontalPodAutoscaler"), kind("ScaledObject")
    assert "replicas" not in workers["spec"]
    for one in (hpa, keda):
        assert one["spec"]["scaleTargetRef"]["name"] == workers["metadata"]["name"]
    metric = hpa["spec"]["metrics"][0]["external"]["metric"]["name"]
    assert metric.removeprefix("taskyard_") in DEFINITIONS
    query = keda["spec"]["triggers"][0]["metadata"]["query"]
    assert query == "sum(taskyard_backlog_tasks)"


def test_image_is_not_root_and_checks_its_health() -> None:
    assert docker_lines("USER") == ["taskyard"]
    assert docker_lines("STOPSIGNAL") == ["SIGTERM"]
    assert "/healthz" in docker_lines("HEALTHCHECK")[0]
    for line in docker_lines("COPY"):
        *sources, _ = line.split()
        if not sources[0].startswith("--"):
            assert all((DEPLOY.parent / name).exists() for name in sources), line


def queries() -> Iterator[tuple[str, str]]:
    """Yield the queries of the dashboard and the rules, with their names."""
    board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    (rules,) = documents(DEPLOY / "prometheus" / "rules.yml")
    for rule in rules["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]


def test_every_metric_of_a_query_exists_and_every_metric_is_used() -> None:
    used = set()
    for title, query in queries():
        for name in METRIC.findall(query):
            found = PARTS.sub("", name).removeprefix("taskyard_")
            assert found in DEFINITIONS, f"{title}: {name}"
            used.add(found)
    assert used == set(DEFINITIONS)


def test_panels_do_not_overlap_and_have_own_ids() -> None:
    board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    cells = [
        (x, y)
        for panel in board["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def test_prometheus_accepts_rules_and_configuration(tmp_path: Path) -> None:
    promtool = need("prometheus")
    for path in (DEPLOY / "prometheus").iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "metrics.token").write_text("secret\n")
    for words in (["check", "rules", "rules.yml"], ["check", "config", "prometheus.yml"]):
        done = subprocess.run(
            [promtool, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


#: Input series, and the alerts that must fire after 20 minutes, with one of their labels.
ALERTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "TaskyardPageDown": ({'up{job="taskyard"}': "0x30"}, {"job": "taskyard"}),
    "TaskyardBrokerDown": ({"taskyard_broker_up": "0x30"}, {}),
    "TaskyardBrokerRestarts": ({"taskyard_broker_start_time_seconds": "0+60x30"}, {}),
    "TaskyardReadyTooLong": (
        {'taskyard_oldest_ready_seconds{service="exec"}': "1801x30"},
        {"service": "exec"},
    ),
    "TaskyardNoWorkers": ({'taskyard_backlog_tasks{service="exec"}': "3x30"}, {}),
    "TaskyardDiskLow": ({"taskyard_disk_free_bytes": "1e9x30"}, {}),
    "TaskyardSyncSlow": (
        {
            'taskyard_sync_seconds_bucket{le="0.1"}': "0x30",
            'taskyard_sync_seconds_bucket{le="1"}': "0+60x30",
            'taskyard_sync_seconds_bucket{le="+Inf"}': "0+60x30",
        },
        {},
    ),
    "TaskyardMalformedInputs": (
        {'taskyard_malformed_inputs_total{dialect="wmp"}': "0+2x30"},
        {"dialect": "wmp"},
    ),
    "TaskyardLeaseExpiries": ({"taskyard_lease_expiries_total": "0+1x30"}, {}),
    "TaskyardFailures": (
        {
            'taskyard_attempts_total{service="exec",outcome="finished"}': "0+2x30",
            'taskyard_attempts_total{service="exec",outcome="failed"}': "0+1x30",
        },
        {"service": "exec"},
    ),
    "TaskyardPageBehind": ({"taskyard_page_rows_behind": "10001x30"}, {}),
    "TaskyardStandbyMissing": (
        {'taskyard_standby_rows_behind{job="taskyard",standby="b"}': "0x5"},
        {"job": "taskyard"},
    ),
    "TaskyardStandbyBehind": (
        {'taskyard_standby_seconds_behind{standby="b"}': "61x30"},
        {"standby": "b"},
    ),
    "TaskyardTakeovers": ({"taskyard_leader_epoch": "1+1x30"}, {}),
    "TaskyardOutboxRefused": (
        {'taskyard_outbox_tasks{state="refused"}': "1x30"},
        {"state": "refused"},
    ),
}


def test_each_alert_fires_on_its_trouble_and_none_on_a_healthy_broker(tmp_path: Path) -> None:
    promtool = need("prometheus")
    (rules,) = documents(DEPLOY / "prometheus" / "rules.yml")
    by_name = {rule["alert"]: rule for rule in rules["groups"][0]["rules"]}
    assert [*by_name] == [*ALERTS]
    for rule in by_name.values():  # the texts have values
        del rule["annotations"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))

    def alerts(firing: str, labels: dict[str, str]) -> list[dict[str, Any]]:
        found = [{"exp_labels": by_name[firing]["labels"] | labels}] if firing else []
        return [
            {"eval_time": "20m", "alertname": name, "exp_alerts": found if name == firing else []}
            for name in ALERTS
        ]

    healthy = {
        'taskyard_broker_up{instance="a"}': "1x10 0x20",
        'taskyard_broker_up{instance="b"}': "0x10 1x20",
        "taskyard_backlog_tasks": "3x30",
        'taskyard_workers{dialect="dwork"}': "1x30",
        "taskyard_disk_free_bytes": "1e12x30",
        "taskyard_lease_expiries_total": "4x30",
        "taskyard_leader_epoch": "1x10 2x20",
        'taskyard_standby_rows_behind{standby="b"}': "3x10",
        'taskyard_standby_rows_behind{standby="a"}': "_x11 3x20",
        'taskyard_standby_seconds_behind{standby="a"}': "1x30",
        'taskyard_outbox_tasks{state="new"}': "5x30",
    }
    cases = {name: (series, labels) for name, (series, labels) in ALERTS.items()}
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": text} for name, text in series.items()],
            "alert_rule_test": alerts(firing, labels),
        }
        for firing, (series, labels) in {**cases, "": (healthy, {})}.items()
    ]
    document = {"rule_files": ["rules.yml"], "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(document))
    words = [promtool, "test", "rules", "tests.yml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
