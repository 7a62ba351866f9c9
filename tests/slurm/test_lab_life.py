"""Labs come up, end wholly, survive their own ruins, and keep to this machine."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.lab import Lab
from hpc_toolkit.lab.commands import program
from hpc_toolkit.lab.settings import LabSettings
from hpc_toolkit.lab.state import Member, members
from tests.integration.realrun import lives, wait_until
from tests.slurm.reallab import LabUnderTest
from tests.slurm.test_lab import script

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this")
SMALL = LabSettings(nodes=2, gpus_per_node=1)
# A grandchild that gives up its session, its parent, its environment and its open files.
STRAY = """
srun --overlap env -i sh -c '
  setsid sh -c "sleep 1000 & echo \\$! >$0.tmp; mv $0.tmp $0" </dev/null >/dev/null 2>&1 &
' "$1"
sleep 1000
"""

# Sessions of their own that see the hosts file of the lab no more; $1 is a directory of the test.
LEAVERS = """
leave() { setsid sh -c "$2" "$1" >/dev/null 2>&1 </dev/null & }
note='echo $$ >$0.tmp; mv $0.tmp $0;'
leave "$1/umount.pid" "$note exec unshare -m sh -c 'umount -l /etc/hosts; exec sleep 1000'"
mkdir "$1/root"
mount --bind / "$1/root"
leave "$1/chroot.pid" "$note exec chroot $1/root sleep 1000"
sleep 1000
"""

# A root directory $1 with everything of this one, but a directory $2 of its own. Where $3 is
# "bound", it is a mount point.
ROOT = """
set -eu
mkdir "$1"
if [ "$3" = bound ]; then mount --bind "$1" "$1"; fi
for entry in /*; do
  if [ -L "$entry" ]; then cp -P "$entry" "$1$entry"
  elif [ -d "$entry" ]; then mkdir "$1$entry"; mount --rbind "$entry" "$1$entry"; fi
done
mount -t tmpfs -o mode=755 tmpfs "$1$2"
echo ready
exec sleep 1000
"""


@pytest.fixture
def small(lab: LabUnderTest, lab_directory: Path, tmp_path: Path) -> Iterator[LabUnderTest]:
    """A lab of two nodes beside that of the session, which a test may ruin."""
    assert lab.lab.status().state == "up"
    own = LabUnderTest(lab_directory / f"own-{tmp_path.name[-20:]}".lower(), SMALL)
    yield own
    own.down()
    assert not processes_of(own)


@pytest.fixture(scope="module")
def kept(lab: LabUnderTest, lab_directory: Path) -> Iterator[LabUnderTest]:
    """A lab of two nodes for tests that leave it as it is."""
    assert lab.lab.status().state == "up"
    with LabUnderTest(lab_directory / "untouched", SMALL) as own:
        yield own
    assert not processes_of(own)


def hpctk(small: LabUnderTest, command: str, *words: str | Path) -> subprocess.Popen[str]:
    """``hpctk lab COMMAND`` for a lab, just started."""
    argv = [sys.executable, "-m", "hpc_toolkit", "lab", command, "--dir", str(small.directory)]
    return subprocess.Popen(
        [*argv, *map(str, words)],
        env=small.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


def up(small: LabUnderTest) -> subprocess.Popen[str]:
    return hpctk(small, "up", "--nodes", "2", "--gpus-per-node", "1")


def processes_of(small: LabUnderTest) -> list[Member]:
    return members(small.lab.paths.token)


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def up_with_a_stray(small: LabUnderTest, directory: Path) -> int:
    """Start the lab with a job of two nodes; return a process that has left the job."""
    small.up()
    job = small.sbatch("--nodes=2", "-o", "/dev/null", script(directory, STRAY), directory / "pid")
    small.wait_for(job, "RUNNING")
    wait_until((directory / "pid").exists, "the stray process to start")
    return int((directory / "pid").read_text())


def test_down_ends_jobs_and_what_they_started_and_leaves_no_file(
    small: LabUnderTest, tmp_path: Path
) -> None:
    stray = up_with_a_stray(small, tmp_path)
    before = [one.pid for one in processes_of(small)]
    assert stray in before
    port = small.lab.status().port
    assert port is not None

    small.down()

    assert [pid for pid in (*before, stray) if lives(pid)] == []
    assert not small.directory.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@as_root
def test_down_ends_what_left_the_labs_mounts_and_spares_a_users_shell(
    small: LabUnderTest, tmp_path: Path
) -> None:
    small.up()
    job = small.sbatch("-o", "/dev/null", script(tmp_path, LEAVERS), tmp_path)
    small.wait_for(job, "RUNNING")
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, "both processes to start")
    left = {path.stem: int(path.read_text()) for path in tmp_path.glob("*.pid")}
    wait_until(lambda: {comm(pid) for pid in left.values()} == {"sleep"}, "them to leave")
    for pid in left.values():
        assert small.lab.paths.token not in Path(f"/proc/{pid}/mountinfo").read_text()
    shell = subprocess.Popen(["sleep", "1000"], env=small.env)

    try:
        small.down()

        assert [name for name, pid in left.items() if lives(pid)] == []
        assert lives(shell.pid)
    finally:
        shell.kill()
        shell.wait()
        for pid in left.values():
            if lives(pid):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def other_root(root: Path, own: Path, kind: str) -> Iterator[Callable[..., str]]:
    """Yield a function that runs ``hpctk lab`` in another root directory: what it prints.

    The processes of both roots see one another, as in a chroot on a machine.
    """
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ROOT, "root"]
    with subprocess.Popen([*private, root, own, kind], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"

        def run(*words: str | Path) -> str:
            done = subprocess.run(
                [
                    *("nsenter", f"--target={holder.pid}", "--mount", "--root", "chroot", root),
                    *("env", "-C", Path.cwd(), sys.executable, "-m", "hpc_toolkit", "lab", *words),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=100,
            )
            return done.stdout

        try:
            yield run
        finally:
            holder.kill()


@as_root
def test_down_in_another_root_ends_no_process_of_this_roots_lab_of_the_same_path(
    small: LabUnderTest, lab_directory: Path, tmp_path: Path
) -> None:
    small.up()
    before = {one.pid for one in processes_of(small)}
    which = ("--dir", small.directory)

    with other_root(tmp_path / "root", lab_directory, "bound") as run:
        try:
            assert run("status", *which).startswith("down ")
            told = run("up", "--nodes", "1", "--gpus-per-node", "0", *which)
            assert told.startswith("1 node, up after "), told
            assert run("status", *which).startswith("up, 1 node,")
        finally:
            ended = run("down", *which)

    assert ended == "down, 4 processes ended\n"
    assert {one.pid for one in processes_of(small)} == before
    assert small.lab.status().state == "up"


@as_root
def test_up_in_a_root_that_is_not_a_mount_point_says_how_to_make_it_one(
    small: LabUnderTest, lab_directory: Path, tmp_path: Path
) -> None:
    with other_root(tmp_path / "root", lab_directory, "plain") as run:
        told = run("up", "--nodes", "1", "--dir", small.directory)

    assert told == (
        "error: namespaces for the lab's hosts cannot be created: / is not a mount point\n"
        "hint: in a chroot: leave it, run 'mount --bind DIR DIR' and enter it again\n"
    )


def test_down_finds_processes_whose_directory_was_removed(small: LabUnderTest) -> None:
    small.up()
    shutil.rmtree(small.directory)

    assert small.lab.down() >= 4
    assert not processes_of(small)


def test_of_several_downs_at_once_each_ends_well(small: LabUnderTest) -> None:
    small.up()

    found = [ended(one) for one in [hpctk(small, "down") for _ in range(4)]]

    assert [(code, err) for code, _, err in found] == [(0, "")] * 4
    assert not small.directory.exists()
    assert not processes_of(small)


def test_a_lab_is_not_ended_or_started_from_inside(kept: LabUnderTest) -> None:
    before = {one.pid for one in processes_of(kept)}
    for command in ("down", "up --nodes 2", "restore n1"):
        word, *options = command.split()
        inner = [sys.executable, "-m", "hpc_toolkit", "lab", word, "--dir", str(kept.directory)]

        code, out, err = ended(hpctk(kept, "exec", *inner, *options))

        assert (code, out) == (1, "")
        assert "error: this process runs inside a lab" in err
    assert {one.pid for one in processes_of(kept)} >= before


@as_root
def test_root_uses_no_lab_that_another_user_could_change(kept: LabUnderTest) -> None:
    os.chown(kept.directory, 65534, -1)
    commands = (["env"], ["exec", "true"])

    found = [ended(hpctk(kept, *command)) for command in commands]
    os.chown(kept.directory, 0, -1)

    assert [(code, out) for code, out, _ in found] == [(1, "")] * 2
    assert all("belongs to user 65534, not to you" in err for _, _, err in found)


def test_two_labs_side_by_side_do_not_know_each_other(
    lab: LabUnderTest, small: LabUnderTest, tmp_path: Path
) -> None:
    small.up()
    jobs = [one.sbatch("-o", "/dev/null", "--wrap=sleep 100", cwd=tmp_path) for one in (lab, small)]
    ports = [one.lab.status().port or 0 for one in (lab, small)]
    blocks = [set(range(ports[0], ports[0] + 10)), set(range(ports[1], ports[1] + 4))]

    assert not blocks[0] & blocks[1]
    assert jobs[0] != jobs[1]
    lab.wait_for(jobs[0], "RUNNING")
    small.down()
    assert lab.state(jobs[0]) == "RUNNING"
    assert lab.lab.status().state == "up"


def test_up_of_a_running_lab_leaves_it_alone_and_refuses_other_settings(kept: LabUnderTest) -> None:
    before = {one.pid for one in processes_of(kept)}

    code, out, _ = ended(up(kept))
    assert (code, out.splitlines()[0]) == (
        0,
        f"2 nodes with 1 l40s each, already up: {kept.directory}",
    )
    code, out, err = ended(hpctk(kept, "up", "--nodes", "3"))
    assert (code, out) == (1, "")
    assert "is up with other settings: 2 nodes with 1 l40s each" in err
    assert "hpctk lab down" in err
    assert {one.pid for one in processes_of(kept)} == before


def test_of_two_ups_at_once_one_starts_the_lab(small: LabUnderTest) -> None:
    found = [ended(one) for one in [up(small) for _ in range(3)]]

    assert [code for code, _, _ in found] == [0, 0, 0], found
    first_lines = [out.splitlines()[0] for _, out, _ in found]
    assert sum("already up" in line for line in first_lines) == 2
    assert len(processes_of(small)) == 2 + 3  # slurmctld has a helper


def test_a_lab_that_lost_daemons_is_cleaned_up_by_the_next_up(
    small: LabUnderTest, tmp_path: Path
) -> None:
    up_with_a_stray(small, tmp_path)
    before = {one.pid for one in processes_of(small)}
    for one in processes_of(small):
        if one.name == "slurmctld" or (one.name, one.node) == ("slurmd", "n1"):
            os.kill(one.pid, signal.SIGKILL)

    gone = {"slurmctld of localhost", "slurmd of n1"}
    wait_until(lambda: set(small.lab.status().gone) == gone, "the missing daemons to be noticed")
    code, out, err = ended(hpctk(small, "env"))
    assert (code, out) == (1, "")
    assert "is broken: slurmctld of localhost, slurmd of n1 ended" in err

    code, out, _ = ended(up(small))

    assert code == 0
    assert "up after" in out
    assert [pid for pid in before if lives(pid)] == []
    assert small.run("sinfo", "-h", "-o", "%D %T").stdout.strip() == "2 idle"
    assert small.run("squeue", "-h").stdout == ""


@pytest.mark.parametrize(
    "moment",
    ["slurmctld", *(pytest.param(one, marks=pytest.mark.soak) for one in ("record", "slurmd"))],
)
def test_a_lab_whose_up_was_killed_is_cleaned_up_by_the_next_up(
    small: LabUnderTest, moment: str
) -> None:
    first = up(small)

    def reached() -> bool:
        if moment == "record":
            return small.lab.paths.record.exists()
        return any(one.name == moment for one in processes_of(small))

    while not reached() and first.poll() is None:
        pass
    first.kill()
    ended(first)

    small.up()

    assert small.lab.status().state == "up"
    names = sorted(one.name for one in processes_of(small))
    assert names == ["munged", "slurmctld", "slurmd", "slurmd", "slurmscriptd"]


def test_an_interrupted_up_leaves_no_process(small: LabUnderTest) -> None:
    code = 0
    for _ in range(5):
        started = up(small)
        while not processes_of(small) and started.poll() is None:
            pass
        started.send_signal(signal.SIGINT)
        code = ended(started)[0]
        if small.lab.status().state != "up":
            break
        small.lab.down()  # on a busy machine the lab was up before its first process was seen

    assert code != 0
    assert not processes_of(small)
    assert small.lab.status().state == "down"


def test_up_ends_what_it_started_when_a_daemon_fails(
    small: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin/slurmd"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho no slurmd today >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")

    with pytest.raises(HpcToolkitError, match=r"slurmd of n1 did not start:\n +no slurmd today"):
        small.up()
    assert not processes_of(small)
    fake.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(HpcToolkitError, match=r"slurmd of n[12] ended"):
        small.up()
    assert not processes_of(small)
    assert small.lab.status().state == "down"


def other_addresses() -> list[str]:
    """Addresses of this machine besides 127.0.0.1, by which others could reach it."""
    done = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False)
    return ["127.0.0.2", *done.stdout.split()]


@pytest.mark.slow
def test_nothing_of_a_lab_listens_but_on_127_0_0_1(small: LabUnderTest, tmp_path: Path) -> None:
    small = LabUnderTest(small.directory, LabSettings(2, 1, accounting=True))
    small.up()
    job = small.sbatch(
        "--nodes=2", "-o", "/dev/null", script(tmp_path, "srun sleep 100"), cwd=tmp_path
    )
    small.wait_for(job, "RUNNING")
    wait_until(
        lambda: sum(one.name == "sleep" for one in processes_of(small)) == 2, "the step to start"
    )
    ports = ports_of({one.pid for one in processes_of(small)})
    first = small.lab.status().port
    assert first is not None
    assert {first, first + 1, first + 2, first + 3} <= set(ports), "a daemon does not listen"
    assert len(ports) > 4, "srun and slurmstepd listen as well"

    for port in ports:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        for address in other_addresses():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5)


def ports_of(pids: set[int]) -> list[int]:
    """The TCP ports on which processes listen, by the inodes of their sockets."""
    inodes = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    found = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd))
            if match and match[1] in inodes:
                found.add(inodes[match[1]])
    return sorted(found)


def test_a_lab_that_could_be_reached_from_elsewhere_does_not_stay_up(
    small: LabUnderTest,
) -> None:
    def open_to_all(conf: str) -> str:
        return re.sub("CommunicationParameters=.*\n", "", conf)

    with pytest.raises(HpcToolkitError, match="could be reached from other machines"):
        LabUnderTest(small.directory, SMALL, edit=open_to_all).up()
    assert not processes_of(small)


def test_a_client_with_another_munge_key_is_refused(kept: LabUnderTest, tmp_path: Path) -> None:
    foreign = kept.directory.parent / "foreign"
    foreign.mkdir(mode=0o711)
    (foreign / "key").write_bytes(os.urandom(1024))
    (foreign / "key").chmod(0o600)
    pid = foreign / "pid"
    munged = [
        program("munged"), "--force", f"--socket={foreign}/socket", f"--key-file={foreign}/key",
        f"--seed-file={foreign}/seed", f"--pid-file={pid}", f"--log-file={foreign}/log",
    ]  # fmt: skip
    subprocess.run(munged, check=True)
    try:
        own = kept.slurm_conf.read_text()
        conf = tmp_path / "slurm.conf"
        conf.write_text(own.replace(str(kept.lab.paths.munge_socket), f"{foreign}/socket"))
        (tmp_path / "gres.conf").write_bytes((kept.slurm_conf.parent / "gres.conf").read_bytes())
        for argv in (
            ["sinfo"],
            ["sbatch", "--wrap=touch x"],
            ["scontrol", "shutdown"],
            ["scontrol", "update", "nodename=n1", "state=down", "reason=x"],
        ):
            done = kept.run(*argv, env={"SLURM_CONF": str(conf)}, cwd=tmp_path, check=False)
            assert done.returncode != 0, argv
    finally:
        os.kill(int(pid.read_text()), signal.SIGTERM)
        wait_until(lambda: not pid.exists(), "the foreign munged to end")
        shutil.rmtree(foreign)
    assert kept.run("sinfo", "-h", "-o", "%D %T").stdout.strip() == "2 idle"
    assert kept.run("squeue", "-h").stdout == ""
    assert kept.lab.paths.log("slurmctld").read_text().count("Invalid credential") >= 4


def test_secrets_of_a_lab_are_its_owners_alone(kept: LabUnderTest) -> None:
    paths = kept.lab.paths

    assert (paths.munge_private / "key").stat().st_mode & 0o777 == 0o600
    for directory in (paths.munge_private, paths.state, paths.database):
        assert directory.stat().st_mode & 0o077 == 0
    for path in kept.directory.rglob("*"):
        assert path.is_socket() or path.is_symlink() or path.lstat().st_mode & 0o022 == 0, path


@pytest.fixture
def elsewhere(lab: LabUnderTest) -> Iterator[LabUnderTest]:
    """A lab beside that of the session, in a directory below which another user may have files."""
    assert lab.env
    home = Path("/tmp") / f"hpctk-user-{os.getpid()}"
    home.mkdir(mode=0o755)
    own = LabUnderTest(home / "lab", SMALL)
    yield own
    own.down()
    shutil.rmtree(home)


OTHER = pwd.getpwnam("daemon").pw_uid  # nobody cannot be SlurmUser, in 26.05


@as_root
def test_an_ordinary_user_has_labs_as_well(elsewhere: LabUnderTest, tmp_path: Path) -> None:
    own, home = elsewhere, elsewhere.directory.parent
    home.chmod(0o700)
    os.chown(home, OTHER, OTHER)
    job = script(tmp_path, "id -u; hostname; echo $CUDA_VISIBLE_DEVICES; exit 3", "--gpus=1")
    shutil.copy(job, home / "job.sh")

    def as_user() -> str:
        os.chdir(home)
        own.up()
        found = own.sbatch("-o", home / "log", home / "job.sh", cwd=home)
        record = own.wait_for(found)
        text = f"{record.state} {record.exit_code} {own.output(record)}"
        mode = own.directory.stat().st_mode & 0o777
        own.down()
        return f"{' '.join(text.split())} mode {mode:o}"

    assert in_a_child(as_user, OTHER) == f"FAILED 3 {OTHER} n1 0 mode 700"


@as_root
def test_roots_lab_runs_others_jobs_as_themselves_and_obeys_root_alone(
    elsewhere: LabUnderTest,
) -> None:
    own, home = elsewhere, elsewhere.directory.parent
    (home / "job.sh").write_text("#!/bin/bash\nid -u; hostname\n")
    (home / "log").touch()
    os.chown(home / "log", OTHER, OTHER)

    def as_user() -> str:
        os.chdir(home)
        record = own.wait_for(own.sbatch("-o", home / "log", home / "job.sh", cwd=home))
        told = f"{record.state} {own.output(record)}"
        for refused in (own.lab.down, lambda: own.lab.crash("n1"), lambda: own.lab.restore("n1")):
            try:
                refused()
            except ConfigError as error:
                told += f" {error.message.rpartition(': ')[2]}"
        key = os.access(own.lab.paths.munge_private / "key", os.R_OK)
        return f"{' '.join(told.split())} key {key}"

    own.up()
    told = in_a_child(as_user, OTHER)
    refusal = "belongs to user 0, not to you"
    assert told == f"COMPLETED {OTHER} n1 {refusal} {refusal} {refusal} key False"
    assert own.run("sinfo", "-h", "-p", "main", "-o", "%D %T").stdout.strip() == "2 idle"


def in_a_child(work: Callable[[], str], uid: int) -> str:
    """What ``work`` returns in a child of another user; not by exec, which may not be allowed
    to read this interpreter."""
    __import__("filelock")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.write(writer, work().encode())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent shall tell
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


def test_where_no_namespace_can_be_had_up_says_why(small: LabUnderTest) -> None:
    """The limit of the inner user namespace is its own: nothing outside it changes."""
    limit = 'echo 0 >/proc/sys/user/max_mnt_namespaces && exec "$@"'
    outer = ["unshare", "--user", "--map-root-user", "sh", "-c", limit, "sh"]
    argv = [sys.executable, "-m", "hpc_toolkit", "lab", "up", "--dir", str(small.directory)]

    done = small.run(*outer, *argv, check=False)

    assert done.returncode == 1
    assert "namespaces for the lab's hosts cannot be created: unshare: " in done.stderr
    assert "hint: a lab needs root with CAP_SYS_ADMIN" in done.stderr
    assert not processes_of(small)


def test_a_broken_lab_refuses_a_crash_and_unknown_nodes(small: LabUnderTest) -> None:
    with pytest.raises(ConfigError, match="is not up"):
        Lab(small.lab.paths).crash("n1")
    small.up()
    with pytest.raises(ConfigError, match="the lab has no node 'n7'"):
        small.lab.crash("n7")
    with pytest.raises(ConfigError, match=r"the lab has no node '\.\./n1'"):
        small.lab.restore("../n1")
