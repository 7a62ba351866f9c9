"""The JSON schema says what the reader says, so that an editor and hpctk agree."""

from __future__ import annotations

import datetime as dt
import importlib.resources
import tomllib
from typing import Any

import jsonschema
import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.clusters.draft import draft
from hpc_toolkit.slurm.clusters.facts import cluster_names, parse_cluster
from hpc_toolkit.slurm.clusters.keys import KEYS
from hpc_toolkit.slurm.clusters.schema import cluster_schema
from tests.scontrol_outputs import MIXED, OLD_LINEAR, ROUTED

VALIDATOR = jsonschema.Draft7Validator(cluster_schema(), format_checker=jsonschema.FormatChecker())

GOOD = [
    "nodes = 1\ngpus_per_node = 0\nmin_nodes = 2\ncpus_per_node = 64\ngpu_type = 'l40s'",
    "mem_per_node = '1T'\nmax_walltime = '7-00:00:00'\nmax_array_size = 1001",
    "checked = 2026-01-19\nverified = true\nextends = 'lab'",
    "partitions = [{name = 'a', min_nodes = 2, restricted = true}]",
    "choose_partition = true\npartitions = [{name = 'a_b+c@d.e', nodes = 1}]",
    "identify = {env = 'A=b c', hostname = 'login*', slurm_cluster = 'x'}",
    "binds = ['/a', '/a:/b', '/a b:/c:ro']\nforbidden_submit_dirs = ['~', '~/x', '/home']",
    "conda_base = '/opt/conda'\ncontainer_runtime = 'pyxis'\ngpu_backend = 'gloo'",
    "env = {A = 'x'}\nfacts = {anything = 'läuft'}",
    "nccl = {NCCL_IB_HCA = 'mlx5', FI_CXI_RX_MATCH_MODE = 'software'}",
    "defaults = {time = '5', cpus_per_task = 4, account = 'a'}",
    "defaults = {mem = '0', partition = 'a,b', constraint = '[a|b]&c', qos = 'q'}",
    "setup = ['source /opt/env.sh']\nmodules = ['cuda/12.4']",
    "account_hint = 'aip-x'\naccount_required = true\nlogin_shell = true\nshrink_jobs = false",
    "price_per_gpu_hour = 2\nprice_per_node_hour = 0.6\ncurrency = 'USD'",
    "partitions = [{name = 'a', price_per_gpu_hour = 0}]",
    "node_setup = ['cp /data/env.tar /tmp']",
]

BAD = [
    *("nods = 1", "nodes = 1.5", "nodes = true", "price_per_node_hour = '2 USD'"),
    *("gpu_request = 'gpu'", "mem_style = 'none at all'", "mem_per_node = 480"),
    *("checked = '19 January'", "verified = 'yes'", "partitions = [{nodes = 1}]"),
    *("partitions = [{name = 'a', nods = 1}]", "partitions = {name = 'a'}"),
    *("identify = {host = 'x'}", "binds = '/a'", "env = {A = 1}", "defaults = {tiem = '5'}"),
    *("defaults = {cpus_per_task = '4'}", "facts = {a = {b = 'c'}}"),
]


def accepted_by_schema(text: str) -> bool:
    return not list(VALIDATOR.iter_errors(as_json(tomllib.loads(text))))


def as_json(table: dict[str, Any]) -> dict[str, Any]:
    """As editors hand it on: TOML's dates are text in JSON."""
    return {key: v.isoformat() if isinstance(v, dt.date) else v for key, v in table.items()}


def accepted_by_reader(text: str) -> bool:
    try:
        parse_cluster(text, file="site.toml", name="site")
    except ConfigError:
        return False
    return True


def test_every_builtin_file_and_every_draft_is_valid() -> None:
    files = importlib.resources.files("hpc_toolkit.slurm") / "data" / "clusters"
    texts = [(files / f"{name}.toml").read_text(encoding="utf-8") for name in cluster_names()]
    texts += [draft("site", told, dt.date(2026, 11, 21)) for told in (OLD_LINEAR, ROUTED, MIXED)]

    assert len(texts) == 6
    assert all(map(accepted_by_schema, texts))


@pytest.mark.parametrize(
    ("text", "accepted"), [*((one, True) for one in GOOD), *((one, False) for one in BAD)]
)
def test_the_schema_accepts_what_the_reader_accepts(text: str, accepted: bool) -> None:
    assert accepted_by_reader(text) is accepted
    assert accepted_by_schema(text) is accepted


def test_every_key_is_in_the_schema_with_a_description() -> None:
    properties = cluster_schema()["properties"]

    assert set(properties) == set(KEYS)
    assert all(one["description"] for one in properties.values())
    inner = properties["partitions"]["items"]["properties"]
    assert inner["max_walltime"]["description"].startswith("Longest job that it accepts")
    assert properties["nodes"]["description"] == "How many nodes one job can get at most."
