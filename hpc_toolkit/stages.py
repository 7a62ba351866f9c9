"""Runs of several stages, which may follow each other."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, ItemsError, WorkloadError, near_miss
from hpc_toolkit.queue.wants import NEEDS, PRIORITY
from hpc_toolkit.rundir.layout import BY_NAME, RESULTS, Manifest, list_stage
from hpc_toolkit.system.record import replace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hpc_toolkit.queue.items import Item, ItemLines
    from hpc_toolkit.rundir.layout import StageSpec


def manifest_of(
    root: str | Path, stages: Mapping[str, Mapping[str, Any]], *, copy_code: bool
) -> tuple[Manifest, dict[str, ItemLines]]:
    """The manifest of a new run of stages, and their given items; see :meth:`Run.create`.

    Raises ItemsError, ConfigError, WorkloadError: a stage cannot work; the message names it.
    """
    from hpc_toolkit.worker.code import collect_provenance

    specs: dict[str, StageSpec] = {}
    items: dict[str, ItemLines] = {}
    keys: dict[str, tuple[set[str], bool]] = {}
    for name in _in_order(stages):
        given = dict(stages[name])
        source = given.pop("items", None)
        after, by, expand = (
            _names(given, "after"),
            given.pop("by", None),
            given.pop("expand", False),
        )
        _check_source(name, source, after, by)
        changes = {"after": after, "by": None if by is None else tuple(by), "expand": expand}
        try:
            spec = replace(list_stage(**given), name=name, **changes)
            if after:
                keys[name] = _keys_after(spec, specs, keys)
                specs[name] = _fitted(spec, *keys[name])
            else:
                specs[name], items[name], keys[name] = _with_items(spec, source)
        except (ConfigError, ItemsError, WorkloadError) as error:
            raise type(error)(f"stages.{name}: {error.message}", hint=error.hint) from error
        except ValueError as error:  # of its name
            raise ConfigError(f"stages.{name}: {error}", hint="rename the stage") from error
    origin = collect_provenance(tuple(specs.values())) | {"copied": copy_code}
    manifest = Manifest(run=Path(root).name, stages=tuple(specs.values()), provenance=origin)
    return manifest, items


def _names(given: dict[str, Any], key: str) -> tuple[str, ...]:
    found = given.pop(key, ())
    return (found,) if isinstance(found, str) else tuple(found)


def _in_order(stages: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The names of the stages, each behind those that it follows."""
    if not stages:
        raise ConfigError(
            "a run needs a stage", hint="such as stages.train with items and a workload"
        )
    before = {name: _names(dict(given), "after") for name, given in stages.items()}
    for name, some in before.items():
        for one in some:
            if one not in before:
                message = f"stages.{name}.after: there is no stage {one!r}"
                raise ConfigError(message, hint=near_miss(one, list(before)))
    done: list[str] = []
    while len(done) < len(before):
        free = [one for one in before if one not in done and set(before[one]) <= set(done)]
        if not free:
            circle = [one for one in before if one not in done]
            message = f"stages.{circle[0]}.after: {', '.join(circle)} wait for each other"
            raise ConfigError(
                message, hint="remove one of these names, so that a stage comes first"
            )
        done += free[:1]
    yield from done


def _check_source(name: str, items: object, after: tuple[str, ...], by: object) -> None:
    if (items is None) == (not after):
        message = f"stages.{name} needs either items or the stages that it follows"
        raise ConfigError(message, hint="such as grid = { seed = '0:4' }, or after = 'train'")
    if by is not None and not after:
        message = f"stages.{name}.by is for a stage that follows others"
        raise ConfigError(message, hint="leave 'by' out, or add 'after'")
    if len(after) > 1 and by is None:
        message = f"stages.{name} follows {' and '.join(after)}, so it needs 'by'"
        raise ConfigError(message, hint="by = [] makes one item of all results")


def _keys_after(
    spec: StageSpec, specs: dict[str, StageSpec], keys: dict[str, tuple[set[str], bool]]
) -> tuple[set[str], bool]:
    """The keys that all items of a stage will have, and whether there may be others."""
    some, more = set(), False
    for name in spec.after:
        known, opened = keys[name]
        expands = specs[name].expand
        if name in known and spec.by is None and not expands:
            message = f"after {name!r}: its items have a key of that name"
            raise ConfigError(message, hint="rename the stage or the key")
        for key in () if opened or expands else set(spec.by or ()) - known:
            message = f"by: the items of {name!r} have no key {key!r}"
            raise ConfigError(message, hint=near_miss(key, sorted(known)))
        more |= opened or expands
        if spec.by is None:
            return known | (set() if expands else {name}), more
        some |= {*spec.by, name}
    return some, False


def _fitted(spec: StageSpec, keys: set[str], more: bool) -> StageSpec:
    """The stage with how its function is called; ConfigError, WorkloadError: keys are missing."""
    from hpc_toolkit.queue.items import has_key
    from hpc_toolkit.worker.arguments import fit
    from hpc_toolkit.worker.command import needed_keys
    from hpc_toolkit.worker.loading import check_stage

    check_stage(spec)
    needed = [key for key in needed_keys(spec.workload.command) if not has_key(keys, key)]
    if spec.group_by is not None and spec.group_by not in keys:
        needed.append(spec.group_by)
    for key in needed:
        if not more:
            raise ConfigError(f"its items have no key {key!r}", hint=near_miss(key, sorted(keys)))
    sample = dict.fromkeys(sorted(keys), 0)
    if not more:
        fitted, checked = fit(spec, [sample])
        list(checked)
        return fitted
    with suppress(WorkloadError):
        return fit(spec, [sample])[0]
    return replace(spec, workload=replace(spec.workload, call=BY_NAME))


def _with_items(
    spec: StageSpec, items: Iterable[Item]
) -> tuple[StageSpec, ItemLines, tuple[set[str], bool]]:
    from hpc_toolkit.worker.arguments import with_items
    from hpc_toolkit.worker.loading import check_stage

    check_stage(spec)
    common: set[str] | None = None

    def noted() -> Iterator[Item]:
        nonlocal common
        for item in items:
            if isinstance(item, dict):
                common = set(item) if common is None else common & item.keys()
            yield item

    spec, lines = with_items(spec, noted())
    keys = (common or set()) - ({NEEDS, PRIORITY} if lines.wants else set())
    if spec.after == (spec.name,):  # its items follow each other
        from hpc_toolkit.queue.graph import GraphLines

        assert isinstance(lines, GraphLines)
        keys = keys - {"after"} | ({RESULTS} if lines.results else set())
    return spec, lines, (keys, False)
