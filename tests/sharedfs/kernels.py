"""Two hosts and a file server that are kernels of their own, with caches and locks of their own.

Each is a user-mode Linux: a kernel that runs as processes of this machine, here in one PID and one
network namespace, so that all of them end as the hosts of hosts.py do. Between them this kernel
forwards packets; a host is cut off by a rule that drops them, and an agent in each host answers to
the tests all the same. See agent.py and guest.sh.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.lab.commands import search_path
from tests.sharedfs import agent
from tests.sharedfs.hosts import ADDRESS, HOSTS, SERVER, TRACES, Hosts, HostsError, children, joined

if TYPE_CHECKING:
    from io import BufferedWriter

PROGRAMS = ("linux.uml", "rpc.nfsd", "rpc.statd", "rpcbind", "modprobe", "mkfs.ext4", "gcc")

_HERE = Path("/run/rehearsal")
_ADDRESSES = {SERVER: ADDRESS, **{host: f"10.77.{n}.2" for n, host in enumerate(HOSTS, 1)}}
_GATEWAYS = {host: f"{address.rpartition('.')[0]}.254" for host, address in _ADDRESSES.items()}
_MEMORY = {SERVER: "600M", **dict.fromkeys(HOSTS, "1200M")}
_DISK_GIB = 3
_BOOT_S = 300.0
_ANSWER_S = 10.0
_CLONE_NEWNET = 0x40000000

_TAPS = "\n".join(
    f"ip tuntap add {host} mode tap\nip address add {gateway}/24 dev {host}\nip link set {host} up"
    for host, gateway in _GATEWAYS.items()
)


class Kernels(Hosts):
    """A guest kernel for each host and for the server, whose disk outlives a power cut."""

    script = f"""
mkdir {_HERE}/memory
echo 1 >/proc/sys/net/ipv4/ip_forward
{_TAPS}
truncate -s {_DISK_GIB}G {_HERE}/disk
mkfs.ext4 -q {_HERE}/disk
echo ready
exec cat >/dev/null
"""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._kernels: dict[str, subprocess.Popen[bytes]] = {}
        self._boots = dict.fromkeys(_ADDRESSES, 0)
        self._grants = (90, 90)
        self._granting = threading.Lock()
        self._mounts_of: dict[Path, tuple[str, str]] = {}

    def open(self) -> None:
        """Make the hosts. Raises HostsError: a kernel does not start."""
        super().open()
        for name in ("agent.py", "guest.sh", "nfsd.sh"):
            shutil.copy(Path(__file__).with_name(name), self.seen_inside(_HERE))
        compiled = ["-o", str(self.seen_inside(_HERE / "xstate.so"))]
        source = str(Path(__file__).with_name("xstate.c"))
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", source, *compiled], check=True)
        for host in _ADDRESSES:
            self.power_on(host)
        for host in _ADDRESSES:
            self.await_boot(host)

    def mount(self, host: str, path: Path, options: str, source: str) -> None:
        """Mount what the server exports, now and when the host comes back."""
        self._mounts_of[path] = (options, source)
        self.call(host, "mkdir", "-p", path)
        self.call(host, "mount", "-t", "nfs", "-o", options, f"{ADDRESS}:{source}", path)

    def reboot(self, host: str) -> None:
        """Start a host whose power was cut, with its mounts."""
        self.power_on(host)
        self.await_boot(host)
        if host != SERVER:
            for path, (options, source) in self._mounts_of.items():
                self.mount(host, path, options, source)

    def serve(self, lease_s: int, grace_s: int) -> None:
        """Have the server grant this lease and grace period, by an orderly restart if need be."""
        with self._granting:
            if (lease_s, grace_s) != self._grants:
                self._grants = (lease_s, grace_s)
                self.restart_server()

    def restart_server(self) -> None:
        """End and start the server's service in order, while its kernel goes on."""
        self.call(SERVER, "/bin/bash", _HERE / "nfsd.sh", *self._grants)

    def power_on(self, host: str) -> None:
        """Start a host's kernel; it is not up yet."""
        self._boots[host] += 1
        number = self._boots[host]
        lease_s, grace_s = self._grants
        self.seen_inside(TRACES / f"{host}.{number}").mkdir()
        told = {
            "NAME": host,
            "BOOT": number,
            "ADDRESS": f"{_ADDRESSES[host]}/24",
            "GATEWAY": _GATEWAYS[host],
            "ROLE": "server" if host == SERVER else "client",
            "LEASE": lease_s,
            "GRACE": grace_s,
            "PYTHON": Path(sys.executable).resolve(),
        }
        words = [
            *(f"mem={_MEMORY[host]}", f"umid={host}.{number}"),
            f"vec0:transport=tap,ifname={host},depth=128",
            *(f"uml_dir={_HERE}/", "con0=null,fd:1", "con=null", "ssl=null", "panic=-1", "quiet"),
            *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"),
            *([f"ubda={_HERE}/disk"] if host == SERVER else []),
            f"init={_HERE}/guest.sh",
            *(f"{key}={value}" for key, value in told.items()),
        ]
        with self._console(host).open("wb") as console:
            self._kernels[host] = self._start(words, console)

    def _start(self, words: list[str], console: BufferedWriter) -> subprocess.Popen[bytes]:
        preload = f"LD_PRELOAD={_HERE / 'xstate.so'}"
        return subprocess.Popen(
            [*self._enter(self._init, "pid", "net", "mount"), "env", preload, "linux.uml", *words],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"PATH": search_path(), "TMPDIR": str(_HERE / "memory")},
            start_new_session=True,
        )

    def await_boot(self, host: str) -> None:
        """Wait until a host answers. Raises HostsError with its last words: it does not."""
        deadline = time.monotonic() + _BOOT_S
        while True:
            try:
                self._ask(host, "living")
            except OSError:
                if time.monotonic() > deadline or self._kernels[host].poll() is not None:
                    said = self._console(host).read_text(errors="replace")[-6000:]
                    message = f"the kernel of {host} does not start: {said}"
                    raise HostsError(message) from None
                time.sleep(0.1)
            else:
                return

    def power_off(self, host: str) -> None:
        """Cut a host's power: its kernel ends between two instructions, and nothing is flushed."""
        kernel = self._kernels.pop(host)
        # User-mode Linux leads a process group of its own.
        (first,) = children(kernel.pid)
        group = os.getpgid(first)
        os.killpg(group, signal.SIGKILL)
        kernel.wait()
        while any(one for one in self.processes() if _group(one.pid) == group):
            time.sleep(0.01)

    def close(self) -> None:
        super().close()
        for kernel in self._kernels.values():
            kernel.wait()

    def _console(self, host: str) -> Path:
        return self.seen_inside(_HERE / f"console-{host}.{self._boots[host]}")

    def command(self, host: str, argv: list[str]) -> list[str]:
        client = [sys.executable, "-I", "-S", agent.__file__, "run", _ADDRESSES[host]]
        # In the PID namespace it ends with the hosts, even if its guest is gone without a word.
        return [*self._enter(self._init, "pid", "net"), *client, *argv]

    def read(self, host: str, root: Path, pattern: str) -> dict[str, bytes]:
        found = self._ask(host, "read", root=str(root), pattern=pattern)
        return {name: base64.b64decode(text) for name, text in found.items()}

    def traced(self, name: str, host: str = "") -> str:
        own = f"{host}.{self._boots[host]}" if host else "*.*"
        return joined(self.seen_inside(TRACES), f"{own}/{name}")

    def living(self, host: str) -> set[int]:
        return set(self._ask(host, "living")) if host in self._kernels else set()

    def family(self, host: str, mark: str) -> list[int]:
        return list(self._ask(host, "family", mark=mark)) if host in self._kernels else []

    def signal(self, host: str, pids: list[int], number: signal.Signals) -> list[int]:
        if host not in self._kernels:
            return []
        return list(self._ask(host, "signal", pids=pids, number=int(number)))

    def stacks(self, host: str, pids: list[int]) -> list[str]:
        return list(self._ask(host, "stacks", pids=pids))

    def link(self, host: str, state: str) -> None:
        # What the host says to this kernel itself has a rule that comes before all others.
        change = "add" if state == "down" else "del"
        for direction in (("dev", host), ("dev", SERVER, "to", _ADDRESSES[host])):
            rule = ["ip", "rule", change, *direction, "blackhole"]
            subprocess.run([*self._enter(self._init, "net"), *rule], check=True)

    def _ask(self, host: str, what: str, **asked: Any) -> Any:
        """What a host's agent answers. Raises OSError: nothing, or what it was asked for failed."""
        with self._socket() as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect((_ADDRESSES[host], agent.PORT))
            connection.sendall(json.dumps({"do": what, **asked}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
        if not line:
            message = f"{host} hung up"
            raise ConnectionError(message)
        answer = json.loads(line)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["error"])
        return answer["ok"]

    def _socket(self) -> socket.socket:
        """A socket of the guests' network; only a thread of its own can enter that."""
        made: list[socket.socket] = []

        def make() -> None:
            with Path(f"/proc/{self._init}/ns/net").open("rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) == 0:
                    made.append(socket.socket())

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if not made:
            message = "the guests' network is gone"
            raise ConnectionError(message)
        return made[0]


def _group(pid: int) -> int:
    """The process group of a process; 0 if it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
