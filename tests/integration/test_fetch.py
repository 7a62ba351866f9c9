"""'hpctk items fetch' against a server that answers as the hub does, on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("huggingface_hub", reason="the extra torch is not installed")
from collections.abc import Iterator

from tests.integration.realrun import Ended, Hpctk

WEIGHTS = os.urandom(3 * 2**20)
FILES = {
    "config.json": b'{"model_type": "gpt_neox"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a second copy of the weights" * 10**5,
}


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


COMMITS = {f"step{step}": _sha1(bytes([step])) for step in (0, 1, 2)}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that a download uses."""

    protocol_version = "HTTP/1.1"
    sent: dict[str, int]
    """Bytes sent, by file."""
    stop_after: int | None

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/m/revision/"):
            revision = path.rpartition("/")[2]
            if revision not in COMMITS:
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
                return
            files = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            found = {"id": "org/m", "modelId": "org/m", "sha": COMMITS[revision], "siblings": files}
            self._send(200, json.dumps(found).encode(), {}, body=body)
            return
        if path.startswith("/api/models/org/m/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _sha1(data)}
                for name, data in FILES.items()
            ]
            self._send(200, json.dumps(tree).encode(), {}, body=body)
            return
        revision, name = path.removeprefix("/org/m/resolve/").split("/", 1)
        data = FILES[name]
        begin = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0] or 0)
        headers = {
            "ETag": json.dumps(hashlib.sha256(data).hexdigest()),
            "X-Repo-Commit": COMMITS.get(revision, revision),
            "Accept-Ranges": "bytes",
        }
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(206 if begin else 200, data[begin:], headers, body=body, name=name)

    def _send(
        self, code: int, data: bytes, headers: dict[str, str], *, body: bool, name: str = ""
    ) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if not body:
            return
        stop = self.stop_after if name == "model.safetensors" else None
        part = data if stop is None else data[:stop]
        self.wfile.write(part)
        if name:
            self.sent[name] = self.sent.get(name, 0) + len(part)
        if stop is not None:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    handler = type("Handler", (Hub,), {"sent": {}, "stop_after": None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()


def fetch(hpctk: Hpctk, url: str, *options: str, steps: tuple[int, ...] = (0, 1)) -> Ended:
    items = "".join(
        json.dumps({"checkpoint": f"org/m@step{step}", "layer": layer}) + "\n"
        for step in steps
        for layer in (1, 2)
    )
    env = {"HF_ENDPOINT": url, "HF_HOME": str(hpctk.cwd / "hf"), "NO_COLOR": "1"}
    return hpctk("items", "fetch", "-", *options, stdin=items, env=env)


def test_checkpoints_are_downloaded_once(hpctk: Hpctk, hub: tuple[str, type[Hub]]) -> None:
    url, handler = hub
    empty = fetch(hpctk, url, "--offline")
    assert " of 2: org/m@step1: not in the local cache, and HF_HUB_OFFLINE is set\n" in empty.out
    assert (empty.code, handler.sent) == (1, {})

    done = fetch(hpctk, url)

    assert done.code == 0, done
    assert "2 of 2: org/m@step" in done.out
    # Both revisions have the same file, and the hub's cache stores it once.
    assert handler.sent["model.safetensors"] <= 2 * len(WEIGHTS)
    assert "pytorch_model.bin" not in handler.sent
    before = dict(handler.sent)
    again = fetch(hpctk, url)
    assert again.out.endswith("2 of 2 checkpoints are in the cache\n")
    assert handler.sent == before
    checked = fetch(hpctk, url, "--offline")
    assert checked.out.endswith("0 of 2 checkpoints are in the cache\n")
    assert checked.out.count("not a complete safetensors file") == 2  # random bytes
    assert "missing: 2 of 2 checkpoints" in checked.err
    assert handler.sent == before


def test_interrupted_download_continues_and_what_is_missing_is_named(
    hpctk: Hpctk, hub: tuple[str, type[Hub]]
) -> None:
    url, handler = hub
    handler.stop_after = 2 * 2**20
    cut = fetch(hpctk, url, steps=(0,))
    handler.stop_after = None
    assert cut.code in (0, 1), cut

    done = fetch(hpctk, url, steps=(0, 9))

    assert done.code == 1
    assert "org/m@step9: the hub has no such revision" in done.out
    assert "missing: 1 of 2 checkpoints" in done.err
    (stored,) = (hpctk.cwd / "hf").glob("hub/models--org--m/snapshots/*/model.safetensors")
    assert stored.read_bytes() == WEIGHTS
