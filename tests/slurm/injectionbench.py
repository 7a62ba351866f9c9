"""Jobs that tell how they were run: with which words, variables, directory, programs and files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.slurm.render.file import log_directory
from hpc_toolkit.slurm.render.values import file_name
from tests.slurm.injection import Asked, sbatch_options, script, toml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.slurm.injection import Outcome, Place
    from tests.slurm.reallab import LabUnderTest

CANARY = "canary"
ODD_PLACE = 'it\'s "the" $(touch canary) `place`; # \u540d\u524d'
"""Where jobs are submitted."""

_RECORD = """#!/bin/bash
printf '%s\\0' "$#" "${{0##*/}}" "$@" >> {notes}/"${{SLURM_JOB_ID:-login}}.calls"
"""
_PYTHON = """#!/bin/bash
printf '%s\\0' 5 "$0" "${{@:1:5}}" >> {notes}/"${{SLURM_JOB_ID:-login}}.calls"
exec {python} "$@"
"""
_APPTAINER = """
while [[ $1 != */hpctk-probe ]]; do shift; done
exec "$@"
"""
_PROBE = '#!/bin/bash\nexec {python} -I -S {probe} "$0" "$@"\n'
# Mode x: a program that ran twice would fail.
_PROBE_PY = """
import json, os, sys
seen = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
with open({notes!r} + "/" + os.environ["SLURM_JOB_ID"] + ".json", "x") as file:
    json.dump(seen, file)
"""


@dataclass
class Plan:
    """One job, and what must be seen of it."""

    name: str = "probe"
    account: str = ""
    gpus: int = 0
    cwd: Path = Path()
    output: str = "%j.log"
    error: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    site: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    program: str = ""
    env: dict[str, str] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    """Other variables that the program must have."""
    first_on_path: str = ""
    """How its PATH must begin."""
    site_env: dict[str, str] = field(default_factory=dict)
    nccl: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    before: list[list[str]] = field(default_factory=list)
    """What the script calls before its step, in this order."""
    shown: dict[str, str] = field(default_factory=dict)
    """What ``scontrol show job`` must show."""
    tried: list[tuple[str, str]] = field(default_factory=list)
    """Places and their texts."""
    ends: str = "COMPLETED"
    says: str = ""
    """What must be in its log."""

    def listed(self, key: str, text: str) -> None:
        self.lists.setdefault(key, []).append(text)


class Bench:
    """A directory with programs that note their calls, and a place to submit from."""

    def __init__(self, lab: LabUnderTest, root: Path) -> None:
        self.lab = lab
        self.root = root
        self.bin, self.notes, self.place = root / "bin", root / "notes", root / ODD_PLACE
        for directory in (self.bin, self.notes, self.place):
            directory.mkdir()
        self._made = 0
        notes, real = shlex.quote(str(self.notes)), shlex.quote(sys.executable)
        record = _RECORD.format(notes=notes)
        self.python = _PYTHON.format(notes=notes, python=real)
        probe = self.root / "probe.py"
        probe.write_text(_PROBE_PY.format(notes=str(self.notes)))
        # Whatever a hostile text would run is noted as a call, wherever it would leave its traces.
        for name in ("record", "module", "conda", "touch", "id"):
            self.program(self.bin / name, record)
        self.program(self.bin / "apptainer", record + _APPTAINER)
        self.program(self.bin / "python", f'#!/bin/bash\nexec {real} "$@"\n')
        self.program(
            self.bin / "hpctk-probe", _PROBE.format(python=real, probe=shlex.quote(str(probe)))
        )
        self.canaries_before = self._canaries()

    @staticmethod
    def program(path: Path, text: str) -> None:
        """Write a program."""
        path.write_text(text)
        path.chmod(0o755)

    def directory(self, name: str) -> Path:
        """A new directory of this name."""
        self._made += 1
        path = self.root / f"d{self._made}" / name
        path.mkdir(parents=True)
        return path

    def asked(self, plan: Plan) -> Asked:
        lists = {key: tuple(texts) for key, texts in plan.lists.items() if key in _FIELDS}
        fields = {
            "job_name": plan.name,
            "output": plan.output,
            "mem": "50M",
            "time": "5",
            "cpus_per_task": 1,
            "max_restarts": 0,
            "python": str(self.bin / "python"),
            "command": (plan.program or str(self.bin / "hpctk-probe"), *plan.words),
            "env": tuple(plan.env.items()),
            **({"error": plan.error} if plan.error else {}),
            "gpus_per_node": plan.gpus,
            **lists,
            **plan.fields,
        }
        return Asked(fields, self._site(plan))

    def _site(self, plan: Plan) -> str:
        lines = ['container_runtime = "apptainer"']
        lines += [f"{key} = {toml(text)}" for key, text in plan.site.items()]
        for key, texts in plan.lists.items():
            if key not in _FIELDS:
                lines.append(f"{key.removeprefix('site_')} = [{', '.join(map(toml, texts))}]")
        for key, values in (("env", plan.site_env), ("nccl", plan.nccl)):
            lines += [
                f"[{key}]",
                *(f"{toml(name)} = {toml(text)}" for name, text in values.items()),
            ]
        return "\n".join(lines) + "\n"

    def submit(self, plan: Plan, rendered: str | None = None) -> str:
        """The job's id."""
        path = self.root / "script.sbatch"
        path.write_text(rendered or script(self.asked(plan)), encoding="utf-8")
        cwd = plan.cwd if plan.cwd.is_absolute() else self.place
        for pattern in filter(None, (plan.output, plan.error)):
            (cwd / log_directory(pattern)).mkdir(parents=True, exist_ok=True)
        own = {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        return self.lab.sbatch(path, cwd=self.place, env=own)

    def files(self) -> set[Path]:
        """All that is there, but for what the programs note and the scripts."""
        found = set()
        for directory, _, names in os.walk(self.root):
            if not Path(directory).is_relative_to(self.notes):
                found |= {Path(directory, name) for name in names}
        return found - {self.root / "script.sbatch"}

    def canaries(self) -> set[str]:
        """What a hostile text left behind: its file, or the call of the program that makes it."""
        calls = [call for path in self.notes.glob("*.calls") for call in self.calls(path.stem)]
        ran = {shlex.join(call) for call in calls if call[0] in ("touch", "id")}
        return ran | (self._canaries() - self.canaries_before)

    def _canaries(self) -> set[str]:
        trees = (self.root, self.lab.directory)
        found = [path for tree in trees for path in tree.rglob(CANARY)]
        alone = (Path.home(), Path.cwd(), Path("/"), Path("/tmp"), Path("/var/tmp"))
        return {str(path) for path in (*found, *(one / CANARY for one in alone)) if path.exists()}

    def calls(self, job: str) -> list[list[str]]:
        """What the job called, in order: name and words."""
        path = self.notes / f"{job}.calls"
        texts = path.read_bytes().decode().split("\0")[:-1] if path.exists() else []
        found, at = [], 0
        while at < len(texts):
            end = at + 2 + int(texts[at])
            found.append(texts[at + 1 : end])
            at = end
        return found

    def check(self, job: str, plan: Plan) -> set[Path]:
        """Hold a job that ended against its plan; the files that it must have made."""
        what = f"job {job}: {plan.tried}"
        cwd = plan.cwd if plan.cwd.is_absolute() else self.place
        named = [cwd / filled(one, job, plan.name) for one in (plan.output, plan.error) if one]
        logs = set(named)
        for log in logs:
            assert log.exists(), f"{what}: no {log}"
        said = "".join(log.read_text(errors="replace") for log in logs)
        state = self.lab.wait_for(job).state
        assert state == plan.ends, f"{what}: {state}:\n{said}"
        assert plan.says in said, what
        self._check_shown(job, plan, what)
        if plan.ends != "COMPLETED":
            return logs
        seen = json.loads((self.notes / f"{job}.json").read_text())
        assert seen["argv"] == [plan.program or str(self.bin / "hpctk-probe"), *plan.words], what
        assert seen["cwd"] == str(cwd), what
        for name, text in {**plan.env, **plan.site_env, **plan.nccl, **plan.seen}.items():
            assert seen["env"].get(name) == text, f"{what}: {name}"
        assert seen["env"]["PATH"].startswith(plan.first_on_path), what
        after = [_record(line.removeprefix("record ")) for line in plan.lists.get("teardown", [])]
        calls = self.calls(job)
        if "container" in plan.fields:
            self._check_container(plan, calls.pop(len(plan.before)))
        wanted = [*plan.before, *after]
        odd = [pair for pair in zip_longest(calls, wanted) if pair[0] != pair[1]]
        assert calls == wanted, f"{what}: {odd}"
        return logs

    def _check_shown(self, job: str, plan: Plan, what: str) -> None:
        text = self.lab.scontrol("show", "job", job)
        wanted = [f"JobId={job} JobName={plan.name}"]
        wanted += [f"   {name}={value}" for name, value in plan.shown.items()]
        lines = text.split("\n")
        # Before 25.11 the line of a comment ends with a space.
        shown = {*lines, *(line.removesuffix(" ") for line in lines)}
        assert set(wanted) <= shown, f"{what}: {wanted} not in {text}"
        # Slurm makes its letters small.
        assert f" Account={plan.account.lower() or '(null)'} " in text, what

    @staticmethod
    def _check_container(plan: Plan, call: list[str]) -> None:
        binds = (*plan.lists.get("site_binds", ()), *plan.lists.get("bind", ()))
        assert call[:2] == ["apptainer", "exec"]
        assert [word for word in call if word in {f"--bind={one}:{one}" for one in binds}] == [
            f"--bind={one}:{one}" for one in dict.fromkeys(binds)
        ]
        assert plan.fields["container"] in call


_FIELDS = {"modules", "setup", "node_setup", "teardown", "bind"}


def filled(pattern: str, job: str, name: str) -> str:
    """A log's path as sbatch(1) fills it in, for a job that is no array."""
    known = {"j": job, "A": job, "x": name, "a": str(2**32 - 2), "%": "%"}

    def fill(match: re.Match[str]) -> str:
        if match[2] not in known:
            return match[0]
        return known[match[2]].zfill(int(match[1] or 0))

    return re.sub(r"%([0-9]*)([A-Za-z%])", fill, pattern)


def can_be_a_name(text: str) -> bool:
    """Whether a file can be called so."""
    return text not in ("", ".", "..") and "/" not in text and len(os.fsencode(text)) <= 255


@dataclass(frozen=True)
class Part:
    """How a text gets into a job from one place."""

    place: str
    put: Callable[[Bench, Plan, str], object]
    shape: str = "{}"
    """What of the place's values is meant; the text itself is put."""
    named: bool = False
    """Whether the text is the name of a file or a directory."""
    repeated: bool = False
    """Whether a job can have many."""
    notation: bool = False
    """Whether Slurm fills in what follows a percent sign, and drops backslashes."""
    rivals: str = ""
    """Parts that are not together in one job have the same word here."""

    def texts(self, accepted: Iterable[str]) -> list[str]:
        before, after = self.shape.split("{}")
        found = [
            value[len(before) : len(value) - len(after)]
            for value in accepted
            if value.startswith(before) and value.endswith(after)
        ]
        odd = re.compile(r"\\|%[0-9]*[A-Za-z%]" if self.notation else "(?!)")
        names = dict.fromkeys(one for one in found if not odd.search(one))
        return [one for one in names if not self.named or can_be_a_name(one)]


def _called(key: str, *, first: Callable[[str], list[str]]) -> Callable[[Bench, Plan, str], None]:
    def put(_: Bench, plan: Plan, text: str) -> None:
        plan.listed(key, text if key.endswith("modules") else f"record {text}")
        if key != "teardown":
            plan.before.append(first(text))

    return put


def _record(text: str) -> list[str]:
    return ["record", *shlex.split(text)]


def _module(text: str) -> list[str]:
    return ["module", "load", text]


def _python(bench: Bench, plan: Plan, text: str) -> None:
    path = bench.directory(text) / "python"
    bench.program(path, bench.python)
    plan.fields["python"] = str(path)
    plan.before.append([str(path), "-P", "-m", "hpc_toolkit", "batch", "command"])


def _venv(bench: Bench, plan: Plan, text: str) -> None:
    path = str(bench.directory(text))
    plan.fields["venv"] = path
    plan.seen["VIRTUAL_ENV"] = path
    plan.first_on_path = f"{path}/bin:"


def _conda_functions(bench: Bench, base: Path) -> None:
    functions = base / "etc/profile.d/conda.sh"
    functions.parent.mkdir(parents=True)
    functions.write_text(f'conda() {{ {shlex.quote(str(bench.bin / "conda"))} "$@"; }}\n')


def _conda(bench: Bench, plan: Plan, text: str) -> None:
    base = bench.directory(text)
    _conda_functions(bench, base)
    plan.fields["conda"] = f"{base}/envs/{text}"
    plan.before.append(["conda", "activate", f"{base}/envs/{text}"])


def _conda_base(bench: Bench, plan: Plan, text: str) -> None:
    base = bench.directory(text)
    _conda_functions(bench, base)
    plan.site["conda_base"] = str(base)
    plan.fields["conda"] = "e"
    plan.before.append(["conda", "activate", "e"])


def _container(_: Bench, plan: Plan, text: str) -> None:
    plan.fields["container"] = f"/x/{text}"


def _bind(key: str) -> Callable[[Bench, Plan, str], None]:
    def put(_: Bench, plan: Plan, text: str) -> None:
        plan.fields.setdefault("container", "/x/image.sif")
        plan.listed(key, f"/x/{text}")

    return put


def _own_program(bench: Bench, plan: Plan, text: str) -> None:
    path = bench.directory(text) / "hpctk-probe"
    path.symlink_to(bench.bin / "hpctk-probe")
    plan.program = str(path)


def _chdir(bench: Bench, plan: Plan, text: str) -> None:
    plan.cwd = bench.directory(text)
    plan.fields["chdir"] = plan.shown["WorkDir"] = str(plan.cwd)


def _input(bench: Bench, plan: Plan, text: str) -> None:
    path = bench.directory(text) / "input"
    path.touch()
    plan.fields["sbatch"] = (*plan.fields.get("sbatch", ()), f"input={path}")
    plan.shown["StdIn"] = str(path)


def _output(_: Bench, plan: Plan, text: str) -> None:
    plan.output = text


def _error(_: Bench, plan: Plan, text: str) -> None:
    plan.error = f"logs/{text}"


def _comment(_: Bench, plan: Plan, text: str) -> None:
    plan.fields["sbatch"] = (*plan.fields.get("sbatch", ()), f"comment={text}")
    plan.shown["Comment"] = text


def _name(_: Bench, plan: Plan, text: str) -> None:
    plan.name = text


def _account(_: Bench, plan: Plan, text: str) -> None:
    plan.fields["account"] = plan.account = text


def _word(_: Bench, plan: Plan, text: str) -> None:
    plan.words.append(text)


def _variable(kind: str, prefix: str) -> Callable[[Bench, Plan, str], None]:
    def put(_: Bench, plan: Plan, text: str) -> None:
        found: dict[str, str] = getattr(plan, kind)
        found[f"{prefix}{len(found)}"] = text
        plan.gpus |= kind == "nccl"

    return put


def _variable_name(_: Bench, plan: Plan, text: str) -> None:
    plan.env[text] = f"of {text}"


PARTS = (
    # In the order in which a script calls what they name.
    Part("site modules", _called("site_modules", first=_module), repeated=True),
    Part("module", _called("modules", first=_module), repeated=True),
    Part("conda", _conda, "/x/envs/{}", named=True, rivals="conda"),
    Part("site conda_base", _conda_base, "/x/{}", named=True, rivals="conda"),
    Part("venv", _venv, "/x/{}", named=True, rivals="conda"),
    Part("site setup", _called("site_setup", first=_record), "record {}", repeated=True),
    Part("setup", _called("setup", first=_record), "record {}", repeated=True),
    Part("python", _python, "/x/{}", named=True),
    Part("site node_setup", _called("site_node_setup", first=_record), "record {}", repeated=True),
    Part("node-setup", _called("node_setup", first=_record), "record {}", repeated=True),
    Part("container", _container, "/x/{}", rivals="container"),
    Part("site binds", _bind("site_binds"), "/x/{}", repeated=True, rivals="container"),
    Part("bind", _bind("bind"), "/x/{}", repeated=True, rivals="container"),
    Part("program", _own_program, "/x/{}", named=True, rivals="container"),
    Part("program's word", _word, repeated=True),
    Part("env value", _variable("env", "HOSTILE_"), repeated=True),
    Part("env name", _variable_name, repeated=True),
    Part("site env: A", _variable("site_env", "SITE_"), repeated=True),
    Part("site nccl: NCCL_A", _variable("nccl", "NCCL_"), repeated=True),
    Part("teardown", _called("teardown", first=_record), "record {}", repeated=True),
    Part("job-name", _name),
    Part("account", _account),
    Part("comment", _comment),
    Part("chdir", _chdir, "/x/{}", named=True),
    Part("output", _output, named=True),
    Part("error", _error, "logs/{}", named=True),
    Part("sbatch value", _input, "input={}", named=True, notation=True),
)
"""Every place whose text can be seen in a job that runs."""


def single(bench: Bench, part: Part, text: str) -> Plan:
    """A job of one text in one place."""
    plan = Plan(tried=[(part.place, text)])
    part.put(bench, plan, text)
    return plan


def mixed(bench: Bench, taken: dict[str, list[str]], number: int) -> list[Plan]:
    """Few jobs of many texts: all where a job can have many, else one in every part and job.

    Args:
        taken: the texts of each part, by its place.
        number: how many jobs.
    """
    # NCCL's variables are for jobs with GPUs.
    plans = [Plan(gpus=1) for _ in range(number)]
    kinds = ("conda", "container")
    turns = {kind: [part for part in PARTS if part.rivals == kind] for kind in kinds}
    for part in PARTS:
        texts = taken[part.place]
        for at, plan in enumerate(plans):
            rivals = turns.get(part.rivals, [part])
            if part.repeated:
                own = plans[rivals.index(part) :: len(rivals)]
                chosen = texts[own.index(plan) :: len(own)] if plan in own else []
            else:
                mine = rivals[at % len(rivals)] is part
                chosen = [texts[at * len(texts) // number]] if mine else []
            for text in chosen:
                part.put(bench, plan, text)
                plan.tried.append((part.place, text))
    return plans


class Reader:
    """sbatch, asked what it reads in a script."""

    def __init__(self, lab: LabUnderTest, cwd: Path) -> None:
        self.lab, self.cwd, self.env = lab, cwd, lab.env

    def options(self, script: str) -> dict[str, str]:
        """What it read; its error where it gave up before."""
        path = self.cwd / "read.sbatch"
        path.write_text(script, encoding="utf-8")
        told = subprocess.run(
            ["sbatch", "--verbose", "--test-only", str(path)],
            cwd=self.cwd, env=self.env, capture_output=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        text = told.stderr.decode()
        return sbatch_options(text) or {"gave up": text}

    def differences(self, place: Place, values: Sequence[Outcome]) -> list[str]:
        """What sbatch reads other than it was asked for, of accepted texts of one place."""
        plain, found = None, []
        for one in values:
            assert one.script is not None
            if plain is None:
                fields = {**one.asked.fields}
                fields.pop("sbatch", None) or fields.pop(place.directive.replace("-", "_"))
                plain = self.options(script(Asked(fields, one.asked.site)))
            read = self.options(one.script)
            if place.directive == "nodelist" and "sbatch: error: " in read.get("gave up", ""):
                continue  # No list of nodes, or one of more than were asked for.
            names = one.value.split(",")
            # "gres/" since 23.11.
            gres = {",".join(f"gres{sign}{name}" for name in names) for sign in ":/"}
            wanted = {one.value, f"{self.cwd}/{one.value}", *gres}
            wanted |= {"a"} if place.directive == "open-mode" else set()
            odd = {name for name in read.keys() | plain.keys() if read.get(name) != plain.get(name)}
            odd -= {place.directive, *ALONG.get(place.directive, ())}
            # A name that cannot be a file's is changed for the log; see file_name().
            made = place.directive == "job-name" and file_name(one.value) in read["output"]
            odd -= {"output"} if made else set()
            if odd or read.get(place.directive, "") not in wanted:
                found.append(f"{place.name} {one.value!r}: {read.get(place.directive)!r}, {odd}")
        return found


ALONG = {
    **{f"mem-per-{of}": ("mem",) for of in ("cpu", "gpu")},
    "dependency": ("kill-on-invalid-dep",),
    "chdir": ("output",),
}
"""Options that change with another one."""
