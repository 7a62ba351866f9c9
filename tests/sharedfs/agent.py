"""In a guest kernel: runs commands and looks at processes and files, for tests on the machine.

    python agent.py serve
    python agent.py run ADDRESS WORD...

``serve`` answers one request per connection. ``run`` is the machine's side of a command: it passes
its environment and standard input on, and prints and exits as the command does. Only the standard
library is imported, since Python starts slowly in a guest.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

PORT = 4077
MARK = "REHEARSED"
"""The environment variable by which a command and all that it starts are found."""

_CHUNK = 1 << 16
_AT_ONCE = 1 << 20
_LAST_WORDS_S = 1.0
_LOST = 255


def contents(root: Path, pattern: str) -> dict[str, bytes]:
    """The files below a directory that match; of a symlink its target, of a directory nothing.

    Raises OSError: the filesystem does not answer.
    """
    found = {}
    for path in sorted(root.glob(pattern)):
        with suppress(FileNotFoundError):
            name = str(path.relative_to(root))
            if path.is_symlink():
                found[name] = os.readlink(path).encode()
            else:
                found[name] = b"" if path.is_dir() else _read(path)
    return found


def _read(path: Path) -> bytes:
    """A file in as few reads as possible.

    What another host appends meanwhile may be zeros at the end of a read, as with CephFS in the
    kernel. They belong to no complete line unless a further read follows; Python's own reading
    asks for one byte more than the file had, and goes on.
    """
    found = b""
    with path.open("rb", buffering=0) as file:
        while True:
            data = file.read(_AT_ONCE)
            found += data
            if len(data) < _AT_ONCE:
                return found


def is_marked(process: Path, mark: str) -> bool:
    """Whether a process, by its directory in /proc, belongs to the command with this mark."""
    with suppress(OSError):
        return f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
    return False


def age(process: Path) -> int:
    """When a process was started, in clock ticks since the boot; older ones have less."""
    with suppress(OSError):
        return int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return 0


def stack(process: Path) -> str:
    """What a process waits for in its kernel."""
    try:
        return (process / "stack").read_text().replace("\n", " ")
    except OSError as error:
        return str(error)


def _living() -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state != "Z":
                found.append(int(entry.name))
    return found


def _signalled(pids: list[int], number: int) -> list[int]:
    """Those of the processes that were there."""
    found = []
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            found.append(pid)
    return found


def _answer(asked: dict[str, Any]) -> Any:
    match asked.pop("do"):
        case "living":
            return _living()
        case "family":
            marked = [one for one in map(_process, _living()) if is_marked(one, asked["mark"])]
            return [int(one.name) for one in sorted(marked, key=age)]
        case "signal":
            return _signalled(asked["pids"], asked["number"])
        case "stacks":
            return [stack(_process(pid)) for pid in asked["pids"]]
        case "read":
            found = contents(Path(asked["root"]), asked["pattern"])
            return {name: base64.b64encode(data).decode() for name, data in found.items()}
    message = "not a request"
    raise ValueError(message)


def _process(pid: int) -> Path:
    return Path(f"/proc/{pid}")


def _serve_one(connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as requests:
        asked = json.loads(requests.readline())
        if asked["do"] == "run":
            with suppress(OSError):
                _Command(connection, asked["argv"], asked["env"]).run(requests)
            return
        try:
            answer: Any = {"ok": _answer(asked)}
        except OSError as error:
            answer = {"errno": error.errno, "error": str(error)}
        connection.sendall(json.dumps(answer).encode() + b"\n")


class _Command:
    """A command whose output goes over a connection in frames: what, length, bytes."""

    def __init__(self, connection: socket.socket, argv: list[str], env: dict[str, str]) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._argv, self._env = argv, env

    def run(self, requests: IO[bytes]) -> None:
        try:
            process = subprocess.Popen(
                self._argv,
                env=self._env,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._send(b"e", f"{error}\n".encode())
            self._send(b"x", b"127")
            return
        feeder = threading.Thread(target=_feed, args=(requests, process.stdin), daemon=True)
        outputs = [
            threading.Thread(target=self._pump, args=args, daemon=True)
            for args in ((b"o", process.stdout), (b"e", process.stderr))
        ]
        for thread in (feeder, *outputs):
            thread.start()
        code = process.wait()
        # A daemon that it left behind may hold its output open.
        for thread in outputs:
            thread.join(_LAST_WORDS_S)
        self._send(b"x", str(code).encode())

    def _pump(self, what: bytes, stream: IO[bytes]) -> None:
        with suppress(OSError):
            while data := stream.read(_CHUNK):
                self._send(what, data)

    def _send(self, what: bytes, data: bytes) -> None:
        with self._sending:
            self._connection.sendall(what + len(data).to_bytes(4, "big") + data)


def _feed(requests: IO[bytes], stdin: IO[bytes]) -> None:
    with suppress(OSError):
        while data := requests.read1(_CHUNK):  # type: ignore[attr-defined]  # of a socket's file
            stdin.write(data)
    with suppress(OSError):
        stdin.close()


def serve() -> None:
    """Answer until the kernel ends."""
    with socket.create_server(("0.0.0.0", PORT), backlog=64) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_serve_one, args=(connection,), daemon=True).start()


def run(address: str, argv: list[str]) -> int:
    """Run a command in the guest with this address; its exit code, 255 if the guest is lost."""
    with socket.create_connection((address, PORT)) as connection:
        asked = {"do": "run", "argv": argv, "env": dict(os.environ)}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        threading.Thread(target=_pass_on, args=(connection,), daemon=True).start()
        with connection.makefile("rb") as frames:
            while head := frames.read(5):
                data = frames.read(int.from_bytes(head[1:], "big"))
                if head[:1] == b"x":
                    return int(data)
                os.write(1 if head[:1] == b"o" else 2, data)
    print(f"the guest at {address} is lost", file=sys.stderr)
    return _LOST


def _pass_on(connection: socket.socket) -> None:
    with suppress(OSError):
        while data := os.read(0, _CHUNK):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    code = run(sys.argv[2], sys.argv[3:])
    if code < 0:
        os.kill(os.getpid(), -code)
        signal.pause()
    # The thread that waits for standard input must not delay the end.
    sys.stdout.flush()
    os._exit(code)
