"""As much of a Weights & Biases server as a run needs, and the reader of the files that wandb leaves."""

import gzip
import json
import re
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "a" * 40
BLOCK_BYTES = 32768  # of LevelDB's log format, in which wandb writes


class FakeWandb:
    """A server on a port of its own, from `with` on.

    Args:
        dies_after: the GraphQL operation whose answer is the last one.
        hangs_at: the GraphQL operation that gets no answer.
    """

    def __init__(self, dies_after: str = "", hangs_at: str = "") -> None:
        self.operations: list[tuple[str, dict[str, Any]]] = []
        self.history: list[dict[str, Any]] = []
        self.ended = threading.Event()
        self._dies_after, self._hangs_at = dies_after, hangs_at
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeWandb":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """No new connection, no answer on those that there are."""
        if not self.ended.is_set():
            self.ended.set()
            self._server.shutdown()
            self._server.server_close()

    def of(self, operation: str) -> list[dict[str, Any]]:
        """The variables of each request for an operation."""
        return [variables for name, variables in self.operations if name == operation]

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL answer."""
        self.operations.append((operation, variables))
        if operation == self._hangs_at:
            self.ended.wait(60)
        match operation:
            case "UpsertBucket":
                project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "someone"}}
                bucket = {"id": "b", "name": variables["name"], "displayName": variables["displayName"]}
                bucket |= {"description": None, "config": "{}", "sweepName": None, "project": project}
                return {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}
            case "RunResumeStatus":
                return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "someone"}, "bucket": None}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}

    def answered(self, operation: str) -> None:
        """After an answer is out."""
        if operation == self._dies_after:
            threading.Thread(target=self.die).start()
            self.ended.wait(5)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The other side may go at any time."""


class _Handler(BaseHTTPRequestHandler):
    fake: FakeWandb
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def parse_request(self) -> bool:
        return super().parse_request() and not self.fake.ended.is_set()

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._reply({})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = gzip.decompress(raw) if self.headers.get("content-encoding") == "gzip" else raw
        if self.path.endswith("/graphql"):
            query = json.loads(body)
            name = re.search(r"(?:query|mutation) (\w+)", query["query"])
            assert name
            self._reply({"data": self.fake.answer(name[1], query.get("variables") or {})})
            self.fake.answered(name[1])
            return
        if self.path.endswith("/file_stream"):
            files = json.loads(body).get("files") or {}
            lines = files.get("wandb-history.jsonl", {}).get("content", [])
            self.fake.history += [json.loads(line) for line in lines]
        self._reply({})

    def _reply(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: LevelDB's log format after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    record_class: Any = vars(wandb_internal_pb2)["Record"]  # made at import, unknown to a type checker
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        left_bytes = BLOCK_BYTES - at % BLOCK_BYTES
        if left_bytes < 7:
            at += left_bytes
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])  # checksum, length, full/first/middle/last
        whole = (whole if kind in (3, 4) else b"") + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield record_class.FromString(whole)


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, one dictionary per step."""
    rows = [record.history for record in wandb_records(path) if record.WhichOneof("record_type") == "history"]
    return [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item} for row in rows]


def offline_file(folder: Path) -> Path:
    """The one offline run of a run folder."""
    (found,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    return found
