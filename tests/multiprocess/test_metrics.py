"""Metrics: Prometheus' format, the same names in stats(), in the documentation and in the dashboard; what they count."""

import json
import re
import time
import urllib.request
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

import hybridps
from hybridps.backend.load import load_extension

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="about hybridps's own metrics")

ROOT = Path(__file__).resolve().parents[2]


def parsed(text):
    """{(name, labels): value}, by Prometheus' own parser."""
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    found = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge"), family
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    assert found
    return found


def counted(rank, world, folder, port):
    tensor = torch.ones(1 << 16)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.barrier()
    before = hybridps.stats()
    if rank == world - 1:
        time.sleep(2)  # longer than it takes until the others ask who is missing
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    stats = hybridps.stats()
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    missing = None
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/else", timeout=30)
    except urllib.error.HTTPError as error:
        missing = error.code
    dist.barrier()
    return before, stats, text, missing


def counted_by_rank(rank, world, folder, ports):
    return counted(rank, world, folder, ports[rank])


def test_prometheus_takes_what_ranks_say_and_stats_says_the_same(tmp_path):
    ports = []
    while len(ports) < 3:
        ports = list({*ports, harness.free_port()})
    results = run_ranks(
        counted_by_rank,
        "2+1",
        args=(str(tmp_path), ports),
        env={"HYBRIDPS_METRICS_FILE": str(tmp_path / "%p.prom"), "LOCAL_RANK": "0"},
        rank_env={rank: {"HYBRIDPS_METRICS_LISTEN": f"127.0.0.1:{port}"} for rank, port in enumerate(ports)},
    )
    for rank, (before, stats, text, missing) in enumerate(results):
        found = parsed(text)
        assert missing == 404
        values = {(name, dict(labels).get("kind")): value for (name, labels), value in found.items()}
        assert {dict(labels)["rank"] for _, labels in found} == {str(rank)}
        assert values[("hybridps_kind_operations_total", "allreduce")] == 4
        assert values[("hybridps_kind_bytes_total", "allreduce")] == 3 * 4 * (1 << 16) + 16
        assert values[("hybridps_kind_bus_bytes_total", "allreduce")] == pytest.approx(4 / 3 * (3 * 4 * (1 << 16) + 16))
        assert values[("hybridps_kind_operations_total", "barrier")] == 2
        assert values[("hybridps_net_tx_payload_bytes_total", None)] == stats["net_tx_payload_bytes"] > 0
        assert stats["kind_operations"]["allreduce"] == 4
        assert stats["kind_bytes"]["allreduce"] == 3 * 4 * (1 << 16) + 16
        # The last rank came 2 s late: the others have waited for it, and know that.
        waited = {who: stats["waited_seconds"].get(who, 0) - before.get("waited_seconds", {}).get(who, 0) for who in "012"}
        if rank == 2:
            assert max(waited.values()) < 1, waited
        else:
            assert waited["2"] > 1, (stats["waited_seconds"], before.get("waited_seconds"))
        assert stats["pending_operations"] == 0
        # Every metric of the table that a rank has, and no other.
        names = {name.removeprefix("hybridps_").removesuffix("_total") for name, _ in found}
        table = {name for name, *_ in load_extension().metric_table()}
        assert names <= table
        assert {name for name in table if not name.startswith("server_")} - names <= {"errors"}
    files = sorted(tmp_path.glob("*.prom"))
    assert len(files) == 3
    for file in files:
        assert any(name == "hybridps_operations_total" for name, _ in parsed(file.read_text()))
        assert not file.with_suffix(".prom.part").exists()


def failing(rank, world):
    try:
        dist.all_reduce(torch.ones(4 if rank == 0 else 5))
    except RuntimeError:
        pass
    return hybridps.stats()["errors"]


def test_failures_are_counted_by_reason():
    for errors in run_ranks(failing, "1+1", destroy=False):
        assert errors == {"mismatch": 1}


def test_the_page_lists_the_metrics():
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w*) \| (.*) \|$", page, re.MULTILINE)
    table = load_extension().metric_table()
    assert rows == [tuple(row) for row in table], "docs/metrics.md should have:\n" + "\n".join(
        f"| `{name}` | {kind} | {label} | {text} |" for name, kind, label, text in table
    )


def test_the_dashboard_asks_for_metrics_that_there_are():
    dashboard = json.loads((ROOT / "docs" / "dashboards" / "grafana.json").read_text())
    names, labels = {}, {"rank", "host", "job", "instance"}
    for name, kind, label, _ in load_extension().metric_table():
        full = f"hybridps_{name}"
        names[full if kind == "gauge" or full.endswith("_total") else f"{full}_total"] = kind
        labels |= {label}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [item["query"] for item in dashboard["templating"]["list"] if item["type"] == "query"]
    assert len(queries) >= 10
    for query in queries:
        asked = re.findall(r"hybridps_\w+", query)
        assert asked and set(asked) <= set(names), query
        for name in asked:  # rates are of counters
            inside = re.search(rf"(rate|increase)\({name}\b", query)
            assert bool(inside) == (names[name] == "counter") or "label_values" in query, query
        assert set(re.findall(r"by \((\w+)\)", query)) <= labels, query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels, target
