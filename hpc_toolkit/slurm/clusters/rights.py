"""What a user may use: the access lists of partitions, and the accounting's accounts and QOS."""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from hpc_toolkit.slurm import client
from hpc_toolkit.system.tomltable import MAX_COUNT

_ANSWER_S = 10.0
ASSOCIATION = ("Cluster", "Account", "User", "Partition", "QOS", "DefaultQOS", "MaxSubmit")
QOS = ("Name", "Flags", "MaxWall", "MaxTRES", "MaxTRESPU", "GrpTRES", "MaxSubmitPU")
_HEADERS = {"defqos": "defaultqos", "maxsubmitjobs": "maxsubmit", "maxsubmitjobspu": "maxsubmitpu"}
"""Headers of sacctmgr that differ from the names of its columns."""

Rows = tuple[dict[str, str], ...]


class User(NamedTuple):
    """A user on a host, and the answers of sacctmgr; empty if it does not answer."""

    groups: frozenset[str] = frozenset()
    host: str = ""
    associations: Rows = ()
    qos: Rows = ()

    def own(self, column: str, partition: str = "") -> list[str]:
        """Return the user's accounts or QOS, for all partitions or for one."""
        rows = [
            row
            for row in self.associations
            if not partition or row.get("partition", "") in ("", partition)
        ]
        return list(dict.fromkeys(one for row in rows for one in words(row.get(column, ""))))


NOBODY = User()


def this_user(cluster: str, *, accounting: bool) -> User:
    """Return the user of this process; asks sacctmgr if the site has accounting."""
    groups, name = set(), str(os.getuid())
    for number in {os.getegid(), *os.getgroups()}:
        with suppress(KeyError):
            groups.add(grp.getgrgid(number).gr_name)
    with suppress(KeyError):
        name = pwd.getpwuid(os.getuid()).pw_name
    host = os.uname().nodename.partition(".")[0]
    rows = _rows(["assoc", f"user={name}"], ASSOCIATION) if accounting else ()
    own = {"cluster": cluster.lower(), "user": name.lower()}
    rows = tuple(r for r in rows if all(r.get(key, own[key]).lower() == own[key] for key in own))
    return User(frozenset(groups), host, rows, _rows(["qos"], QOS) if rows else ())


def _rows(what: list[str], columns: tuple[str, ...]) -> Rows:
    argv = ["sacctmgr", "--parsable2", "show", *what, f"format={','.join(columns)}"]
    return parse_rows(client.text(argv, timeout_s=_ANSWER_S), columns)


def parse_rows(text: str, columns: tuple[str, ...]) -> Rows:
    """Parse ``sacctmgr --parsable2``, with or without its line of headers."""
    names = [name.lower() for name in columns]
    lines = [line.split("|") for line in text.splitlines() if "|" in line]
    headers = [re.sub(r"\W", "", one).lower() for one in lines[0]] if lines else []
    if names[0] in headers:
        names, lines = [_HEADERS.get(one, one) for one in headers], lines[1:]
    return tuple(dict(zip(names, map(str.strip, line), strict=False)) for line in lines)


def closed(record: Mapping[str, str], user: User) -> str:
    """Return why a user cannot use a partition; "" if nothing excludes them.

    Its host lists are written without brackets.
    """
    groups, hosts = record.get("AllowGroups", "ALL"), record.get("AllocNodes", "ALL")
    accounts = record.get("AllowAccounts", "ALL")
    if groups != "ALL" and not user.groups & set(words(groups)):
        return f"AllowGroups={groups}: you are in none of these groups"
    if not takes_from(hosts, user):
        return f"AllocNodes={hosts}: this host is {user.host}"
    if record.get("ReqResv", "NO") != "NO":
        return "ReqResv=YES: jobs need a reservation"
    if user.associations:
        return _excluded(record, user)
    # Most users have no account in such a list; of QOS they may choose one.
    return "" if accounts == "ALL" else f"AllowAccounts={accounts}: your accounts are unknown"


def takes_from(hosts: str, user: User) -> bool:
    """Whether AllocNodes names the user's host; host lists in it are not expanded."""
    return hosts == "ALL" or not {user.host, "localhost"}.isdisjoint(words(hosts))


def _excluded(record: Mapping[str, str], user: User) -> str:
    if not user.own("account", record.get("PartitionName", "")):
        return "no account of yours is for this partition"
    for key, column in (("Accounts", "account"), ("Qos", "qos")):
        own = user.own(column)
        if own and not permitted(record, user, key, column):
            lists = [word for word in (f"Allow{key}", f"Deny{key}") if word in record]
            stated = " ".join(f"{word}={record[word]}" for word in lists)
            return f"{stated}: yours are {', '.join(own)}"
    return ""


def permitted(record: Mapping[str, str], user: User, key: str, column: str) -> list[str]:
    """Return the user's accounts (or QOS) that a partition takes; without the user's, its list."""
    allowed = record.get(f"Allow{key}", "ALL")
    refused = words(record.get(f"Deny{key}", "").lower())
    own = user.own(column, record.get("PartitionName", ""))
    if not user.associations:
        return [] if allowed == "ALL" else words(allowed)
    taken = own if allowed == "ALL" else words(allowed.lower())
    return [
        one for one in own if one.lower() not in refused and one.lower() in map(str.lower, taken)
    ]


def qos_limits(user: User, name: str) -> dict[str, Any]:
    """Return the limits of a QOS for one job, by their keys in a cluster file."""
    row = next((one for one in user.qos if one.get("name") == name), {})
    wall = row.get("maxwall", "")
    found: dict[str, Any] = {"max_walltime": wall if re.search("[1-9]", wall) else None}
    texts = [row.get(column, "") for column in ("maxtres", "maxtrespu", "grptres")]
    numbers: dict[str, int] = {}
    for resource, number in re.findall(r"([^,=]+)=(\d+)", ",".join(texts)):
        numbers[resource] = min(int(number), numbers.get(resource, MAX_COUNT))
    for key, resource in (("nodes", "node"), ("gpus", "gres/gpu"), ("cpus", "cpu")):
        found[key] = numbers.get(resource)
    of_all = numbers.get("gres/gpu", MAX_COUNT)
    typed = [(one.partition(":")[2].lower(), numbers[one]) for one in numbers if "gpu:" in one]
    found["gpu_types"] = {one: min(number, of_all) for one, number in typed} or None
    submit = row.get("maxsubmitpu", "")
    found["max_submit_jobs"] = min(int(submit), MAX_COUNT) if submit.isdecimal() else None
    flags = row.get("flags", "")
    found["overrides_partition"] = "Partition" in flags or None
    found["overrides_partition_qos"] = "OverPartQOS" in flags or None
    return found


def words(text: str) -> list[str]:
    return [one for one in text.split(",") if one and one != "(null)"]
