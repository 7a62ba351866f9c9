"""Finds objects that Kubernetes servers would reject.

Schemas know fields and their types. They do not know how long the names of pods become, which texts
a server reads as something else, or what a namespace forbids. What no request changes, such as the
rules for failed pods and where they meet, is in the examples that the tests compare.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate
import kubernetes_validate.utils
import yaml

from hpc_toolkit.engines.kubernetes import ManifestSpec, render_manifest

# Otherwise each object costs a reading of the schemas, which have megabytes.
for name in ("schema_contents", "all_versions"):
    setattr(kubernetes_validate.utils, name, cache(getattr(kubernetes_validate.utils, name)))

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"([0-9]+)(Mi|Gi)?")
# Plain scalars that Kubernetes' parser (go-yaml 2) does not read as text.
OTHER_THAN_TEXT = re.compile(
    r"(?i:y|n|yes|no|on|off|true|false|null|~|<<|=|)|"
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|"
    r"[-+]?0[xXoObB][0-9a-fA-F_]+|[-+]?\.(?i:inf)|\.(?i:nan)|"
    r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*"
)
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UniqueKeys(LOADER):  # type: ignore[misc]
    """Rejects a mapping with a duplicate key, as the servers do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key stands twice: {keys}"
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def read(text: str) -> list[Any]:
    """Read the objects of a manifest as strictly as a server does."""
    for document in yaml.compose_all(text, Loader=LOADER):
        for node in scalars(document):
            plain = not node.style and node.tag.endswith(":str")
            assert not (plain and OTHER_THAN_TEXT.fullmatch(node.value)), node.value
    return list(yaml.load_all(text, Loader=UniqueKeys))


def objects_of(request: ManifestSpec) -> list[Any]:
    """The objects of a manifest, as a server reads them."""
    return read(render_manifest(request))


def scalars(node: Any) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for one in node.value:
            yield from scalars(one)
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for one in pair:
                yield from scalars(one)


def check(objects: list[Any], versions: tuple[str, ...] = VERSIONS) -> None:
    """Assert that servers of these versions accept the objects, and pods what is in them."""
    assert objects
    for one in objects:
        for version in versions:
            kubernetes_validate.validate(one, version, strict=True)
        assert LABEL.fullmatch(one["metadata"]["name"]), one["metadata"]["name"]
        for value in one["metadata"]["labels"].values():
            assert LABEL_VALUE.fullmatch(value), value
    named = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(named) == len(set(named)), "two objects have one name"
    assert len({one["metadata"].get("namespace") for one in objects}) == 1
    for one in objects:
        if one["kind"] == "Job":
            check_job(one)


def check_job(job: dict[str, Any]) -> None:
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] >= 1
    longest = f"{name}-{spec['completions'] - 1}"
    assert LABEL.fullmatch(longest), longest
    queued = "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
    assert spec.get("suspend", False) is queued, "Kueue lets go what waits for it alone"
    (container,) = pod["containers"]
    variables = {one["name"]: one for one in container["env"]}
    assert len(variables) == len(container["env"]), "a variable is set twice"
    for one in container["env"]:
        assert ("value" in one) != ("valueFrom" in one)
    check_resources(container.get("resources", {}))
    check_restricted(pod, container)


def check_resources(resources: dict[str, Any]) -> None:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    assert requests.keys() == limits.keys()
    for name, text in limits.items():
        assert QUANTITY.fullmatch(text), text
        assert bytes_of(requests[name]) <= bytes_of(text), name
        assert "/" not in name or requests[name] == text, "extended resources are not shared"


def bytes_of(text: str) -> int:
    found = QUANTITY.fullmatch(text)
    assert found is not None
    return int(found[1]) * {None: 1, "Mi": 2**20, "Gi": 2**30}[found[2]]


def check_restricted(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """Assert that a pod meets the Pod Security Standard "restricted"."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for volume in pod.get("volumes", []):
        assert volume.keys() - {"name"} <= {"persistentVolumeClaim", "emptyDir"}


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand a word as the kubelet does (third_party/forked/golang/expansion/expand.go)."""
    found, position = "", 0
    while position < len(text):
        letter = text[position]
        following = text[position + 1 : position + 2]
        if letter != "$" or not following:
            found += letter
            position += 1
        elif following == "$":
            found += "$"
            position += 2
        elif following == "(" and ")" in text[position + 2 :]:
            end = text.index(")", position)
            name = text[position + 2 : end]
            found += variables.get(name, text[position : end + 1])
            position = end + 1
        else:
            found += text[position : position + 2]
            position += 2
    return found
