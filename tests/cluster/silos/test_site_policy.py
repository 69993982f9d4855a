"""Policies of sites: each rule rejects a run before its data are read, and the rejection is in the record."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import ray
from commands import Raydfl, write_config
from ray.exceptions import RayTaskError

from raydfl.cluster.faults import unwrap_error
from raydfl.cluster.site_guard import call_at_site
from raydfl.cluster.site_policy import POLICIES, SitePolicy, find_policy, read_policy
from raydfl.cluster.site_record import find_break, read_heads
from raydfl.cluster.sites import list_site_classes, place_folder
from raydfl.core.errors import ConfigError, PolicyError
from raydfl.core.yaml import to_yaml
from raydfl.engine.config import Config
from raydfl.engine.storage import digest_components, read_rows, to_rows
from raydfl.runs import _run as runs
from raydfl.testing import assert_same_bits, read_tensors

Silos = Callable[..., Config]
Policies = Callable[..., Path]
ANYTHING: dict[str, Any] = {"methods": ["any"], "rules": ["any"], "code": ["any"]}
METRICS = ["accuracy", "confusion", "loss"]


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    return Raydfl(capfd)


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policies:
    """Give this process policies for both sites; options change the policy of north. Return the folder of the records."""

    def write(**north: Any) -> Path:
        paths = []
        for site, options in (("north", north), ("south", {})):
            path = tmp_path / f"{site}.yaml"
            values = {
                "site": site,
                "record": str(tmp_path / "records" / f"{site}.jsonl"),
                **ANYTHING,
                "metrics": METRICS,
            }
            path.write_text(to_yaml({**values, **options}, flow=False))
            paths.append(str(path))
        monkeypatch.setenv(POLICIES, os.pathsep.join(paths))
        return tmp_path / "records"

    return write


def read_record(folder: Path, site: str = "north") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{site}.jsonl").read_text().splitlines()]


def make_policy(**options: Any) -> SitePolicy:
    return SitePolicy.model_validate({"site": "north", "record": "/record", **options})


def read_bits(config: Config) -> dict[str, bytes]:
    folder = Path(config.run.dir) / str(config.run.name)
    return read_tensors(folder, *(place_folder(config, folder, site) / "private" for site in config.data.sites))


def list_digests(config: Config, kind: str) -> list[str]:
    return [item.digest for item in digest_components(config.model_dump(mode="json")) if item.kind == kind]


# -- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        (["20:00-06:00"], ["20:00", "23:59", "00:00", "05:59"], ["06:00", "12:00", "19:59"]),
        (["08:30-17:00"], ["08:30", "16:59"], ["08:29", "17:00", "00:00"]),
        (["18:00-00:00"], ["18:00", "23:59"], ["00:00", "17:59"]),
        (["00:00-01:00", "12:00-13:00"], ["00:59", "12:00"], ["01:00", "11:59", "13:00"]),
        ([], ["00:00", "12:00"], []),
    ],
)
def test_hours_across_midnight(hours: list[str], inside: list[str], outside: list[str]) -> None:
    policy = make_policy(hours=hours)
    for text in inside:
        policy.check_moment(1, datetime.fromisoformat(f"2026-11-27T{text}"))
    for text in outside:
        with pytest.raises(PolicyError, match=f"it is {text} at the site, and runs are allowed at {hours[0]}"):
            policy.check_moment(1, datetime.fromisoformat(f"2026-11-27T{text}"))


@pytest.mark.parametrize("hours", ["20-06", "24:00-06:00", "20:00-20:00", "20:60-21:00", "20:00"])
def test_wrong_hours_are_rejected(tmp_path: Path, hours: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(to_yaml({"site": "north", "record": "/record", "hours": [hours]}))
    with pytest.raises(ConfigError, match=f"policy.yaml: hours: '{hours}' is"):
        read_policy(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("site: north\n", "record"),
        ("{site: north, record: relative}", "absolute path"),
        ("{site: north, record: /r, minimum_clients: 1}", "minimum_clients"),
        ("{site: north, record: /r, methods: [fedavg]}", "methods"),
        ("{site: north, record: /r, method: [any]}", "methods"),
        ("[1, 2]", "policy.yaml"),
        ("", "policy.yaml"),
        ("{site: [", "policy.yaml"),
    ],
)
def test_a_wrong_policy_is_rejected(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_policy(path)
    with pytest.raises(ConfigError, match="cannot read the policy .*: No such file"):
        read_policy(tmp_path / "missing.yaml")


def test_a_node_with_policies_serves_only_their_sites(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    policies()
    assert find_policy("south") == read_policy(Path(os.environ[POLICIES].split(os.pathsep)[1]))
    with pytest.raises(PolicyError, match="site 'west' has no policy on this node"):
        find_policy("west")
    with pytest.raises(PolicyError, match="the run has no sites"):
        find_policy("")
    monkeypatch.delenv(POLICIES)
    assert find_policy("north") is None


# -- rejections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "is_accepted"),
    [
        (["method.rule={name: gaussian, noise: 1.0}"], True),
        (["method.rule={name: gaussian, epsilon: 8}"], True),
        (["method.rule={name: gaussian, noise: 0}"], False),
        (["method.rule={name: gaussian, noise: 1}", "privacy.key=seed"], False),
        (["method.rule={name: gaussian, noise: 1}", "privacy.as_if={clients: 99, cohort: 9}"], False),
        (["train.optimiser.private={noise: 1.0}"], True),
        (["train.optimiser.private={noise: 0}"], False),
    ],
)
def test_a_policy_accepts_noise_as_differential_privacy(
    tiny: Callable[..., Config], settings: list[str], is_accepted: bool
) -> None:
    policy = SitePolicy(
        site="north",
        record=Path("/record"),
        methods=["any"],
        rules=["any"],
        differential_privacy=True,
        minimum_clients=2,
    )
    rejected = "but the (run has none|noise of the run gives none)"
    config = tiny(*settings, "evaluate.clients=none", method="fedavg")
    with contextlib.nullcontext() if is_accepted else pytest.raises(PolicyError, match=rejected):
        policy.check_run(config, [])


def forbid_hours() -> dict[str, Any]:
    later = datetime.now().astimezone() + timedelta(hours=2)
    return {"hours": [f"{later:%H:%M}-{later + timedelta(hours=1):%H:%M}"]}


@pytest.mark.parametrize(
    ("options", "override", "reason"),
    [
        ({"methods": []}, "", "`methods`.*the method fedmlac has the digest [0-9a-f]{64} at this site"),
        ({"methods": ["0" * 64]}, "", "`methods`.*raydfl site digests"),
        ({"rules": []}, "method.rule=krum", "`rules`.*the rule krum has the digest"),
        ({"code": []}, "", r"`code`.*the code tones.py:Tones has the digest"),
        (
            {"differential_privacy": True},
            "",
            "`differential_privacy`.*it requires differential privacy, but the run has none",
        ),
        ({"maximum_rounds": 2}, "", "`maximum_rounds`.*train.rounds=3 exceeds its 2 rounds. Set train.rounds=2"),
        ({"minimum_clients": 5}, "train.cohort=4", "`minimum_clients`.*a round has 4 clients, fewer than 5"),
        (forbid_hours(), "", "`hours`.*it is .* at the site"),
    ],
)
def test_the_site_rejects_a_run_before_it_reads_data(
    silos: Silos, policies: Policies, tmp_path: Path, raydfl: Raydfl, options: Any, override: str, reason: str
) -> None:
    """The run ends with exit code 2 and the site's reason, and the record has the same reason."""
    records, config = policies(**options), silos(*([override] if override else []))
    result = raydfl("run", write_config(config, tmp_path))
    result.refuses(f"site 'north' rejects the run: its policy \\({reason}".replace("(`", "(`"))
    (entry,) = read_record(records)
    assert entry["event"] == "rejected"
    assert f"error: {entry['reason']}\n" == result.err
    assert entry["code"][0].startswith("method fedmlac ")
    assert entry["code"][0].endswith(list_digests(config, "method")[0])
    assert not config.data.sites["north"].folder.exists()


def test_a_site_with_too_few_clients_sends_no_report(
    silos: Silos, policies: Policies, tmp_path: Path, raydfl: Raydfl
) -> None:
    records, config = policies(minimum_clients=6), silos("train.cohort=9")
    raydfl("run", write_config(config, tmp_path)).refuses("`minimum_clients`.*the site has 5 clients.*fewer than 6")
    assert [entry["event"] for entry in read_record(records)] == ["opened", "sent", "opened", "rejected"]
    assert not list(Path(config.run.dir).rglob("sites.json"))


def test_a_method_with_a_changed_helper_is_rejected(
    silos: Silos, policies: Policies, tmp_path: Path, raydfl: Raydfl
) -> None:
    """The policy lists the digest that `raydfl site digests` prints. Later the user's helper module changes."""
    (tmp_path / "my_method.py").write_text(
        "import my_helper\nfrom raydfl.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    '''A method.'''\n"
    )
    helper = tmp_path / "my_helper.py"
    helper.write_text("x = 1\n")
    config = silos("run.name=first", "models={model: {name: crnn_tiny, hidden: 8, filters: [4]}}", method="fedavg")
    values = config.model_dump(mode="json") | {"method": {"name": f"{tmp_path}/my_method.py:Mine"}}
    (tmp_path / "own.yaml").write_text(to_yaml(values, flow=False))
    printed = raydfl("site", "digests", tmp_path / "own.yaml").out
    allowed = {line.split()[1] for line in printed.splitlines() if line.startswith("- ")}
    assert str(helper) in printed
    records = policies(methods=sorted(allowed), code=sorted(allowed))
    assert raydfl("run", tmp_path / "own.yaml", "--quiet").code == 0
    helper.write_text("x = 2\n")
    result = raydfl("run", tmp_path / "own.yaml", "run.name=second", "--quiet")
    result.refuses("`methods`.*the method my_method.py:Mine has the digest")
    entry = read_record(records)[-1]
    assert (entry["event"], entry["run"]) == ("rejected", "second")


def test_a_run_that_leaves_the_hours_stops_and_resumes(
    silos: Silos, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, config = silos("run.name=whole", "train.cohort=9"), silos("run.name=stopped", "train.cohort=9")
    records = policies()
    runs.run(reference)
    check = SitePolicy.check_moment

    def check_late(self: SitePolicy, round_number: int, now: datetime) -> None:
        check(self.model_copy(update=forbid_hours() if round_number == 2 else {}), round_number, now)

    with monkeypatch.context() as patch:
        patch.setattr(SitePolicy, "check_moment", check_late)
        with pytest.raises(PolicyError, match="The run resumes from its last commit"):
            runs.run(config)
    assert [entry["event"] for entry in read_record(records)][-1] == "rejected"
    runs.run(config)
    assert_same_bits(read_bits(reference), read_bits(config))


# -- data that leave the site ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2])
def test_no_metric_of_a_single_client_leaves_a_site(silos: Silos, policies: Policies, block: int) -> None:
    """Oracle: the same run without policies. Models and allowed metrics of the test set have equal values."""
    options = ("train.cohort=9", "evaluate.clients=all", f"train.block={block}", "method.rule=uniform_mean")
    models = "models={model: {name: crnn_tiny, hidden: 8, filters: [4]}}"
    free = silos("run.name=free", models, *options, method="fedavg")
    runs.run(free)
    records = policies(metrics=["accuracy"])
    limited = silos("run.name=limited", models, *options, method="fedavg")
    runs.run(limited)
    folders = [Path(config.run.dir) / str(config.run.name) for config in (free, limited)]
    assert_same_bits(read_bits(free), read_bits(limited))
    every, rows = (to_rows(read_rows(folder)) for folder in folders)
    measured = {"train", "validation", "client_test", "test"}
    assert any(row.client and row.split in measured for row in every)
    assert not [row for row in rows if row.client and row.split in measured and row.metric != "retried"]
    tests = [row for row in rows if row.split == "test"]
    assert {row.metric for row in tests if row.metric.startswith("model/")} >= {"model/accuracy"}
    ratio = {(row.round, row.metric): (row.value, row.count) for row in every if row.split == "test"}
    south = {row.count for row in tests if row.metric == "model/loss"}
    accuracy = [row for row in tests if row.metric == "model/accuracy"]
    assert len(accuracy) >= 3
    assert all((row.value, row.count) == pytest.approx(ratio[row.round, row.metric]) for row in accuracy)
    assert all(row.count > max(south, default=0) for row in accuracy)  # the loss is that of the south alone
    assert find_break(records / "north.jsonl", read_heads(folders[1], "north"))[1] == ""


def test_the_record_names_the_user_the_code_and_the_bytes(silos: Silos, policies: Policies) -> None:
    """Oracle: the sizes of the shared tensors, and the rounds of the run."""
    records, config = policies(), silos("train.cohort=9", "run.name=noted")
    runs.run(config)
    folder = Path(config.run.dir) / "noted"
    entries = read_record(records)
    assert {entry["event"] for entry in entries} == {"opened", "sent"}
    assert {entry["user"] for entry in entries} == {config.started_by}
    assert {entry["run"] for entry in entries} == {"noted"}
    assert len({entry["configuration"] for entry in entries}) == 1
    sent = [entry for entry in entries if entry.get("bytes", {}).get("tensors")]
    assert [entry["round"] for entry in sent] == sorted(5 * [1, 2, 3])
    shared = read_bits(config)
    size = sum(len(value) for name, value in shared.items() if "plugin" in name and not name.startswith("client "))
    assert {entry["bytes"]["tensors"] for entry in sent} == {size}
    assert [entry["bytes"] for entry in entries if "classes" in entry.get("bytes", {})] == [
        {"classes": len('["tone0", "tone1", "tone2"]')}
    ]
    report = json.loads((folder / "sites.json").read_text())["parts"][""]["sites"][0]
    assert [entry["bytes"]["report"] for entry in entries if "report" in entry.get("bytes", {})] == [
        len(json.dumps(report))
    ]
    heads = read_heads(folder, "north")
    assert max(heads).number <= len(entries)
    assert find_break(records / "north.jsonl", heads)[1] == ""


def test_a_failure_is_recorded_before_its_message_leaves(
    silos: Silos, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, config = policies(), silos("train.cohort=9")
    monkeypatch.setattr("raydfl.methods.fedmlac.FedMLAC.local", lambda *_: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError") as failed:
        runs.run(config)
    entry = read_record(records)[-1]
    assert (entry["event"], entry["round"]) == ("failed", 1)
    assert str(failed.value) == entry["reason"]
    assert entry["bytes"] == {"text": len(entry["reason"])}


def test_policies_do_not_change_the_digest_of_a_configuration(silos: Silos, policies: Policies) -> None:
    before = silos().digest()
    policies(minimum_clients=3)
    assert silos().digest() == before


def test_tasks_at_a_site_return_the_rejection(ray_session: None, silos: Silos, policies: Policies) -> None:
    """The error keeps its type and message across processes."""
    records, config = policies(methods=[]), silos()

    def list_classes(policy: str) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(POLICIES, policy)
            return call_at_site(list_site_classes, config, "north", "")

    with pytest.raises(RayTaskError) as failed:
        ray.get(ray.remote(num_cpus=1)(list_classes).remote(os.environ[POLICIES]))
    error = unwrap_error(failed.value)
    (entry,) = read_record(records)
    assert isinstance(error, PolicyError)
    assert (entry["event"], entry["reason"]) == ("rejected", str(error))
    assert entry["user"] == config.started_by
