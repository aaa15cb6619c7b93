# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the hub: the part of its HTTP API that fetching and uploading a model use, on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Files = dict[str, bytes]


@dataclass
class Hub:
    """repositories: name -> revision -> files. uploaded: name -> files that were committed. address: of the server."""

    repositories: dict[str, dict[str, Files]] = field(default_factory=dict)
    uploaded: dict[str, Files] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    address: str = ""


def commit_of(name: str, revision: str) -> str:
    return hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def tell(self, value: object, status: int = 200) -> None:
            self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                found = b""
                while size := int(self.rfile.readline(), 16):
                    found += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return found
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def files(self, name: str, revision: str) -> tuple[str, Files] | None:
            for known, files in hub.repositories.get(name, {}).items():
                if revision in (known, commit_of(name, known)):
                    return known, files
            return None

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            hub.asked.append(f"{self.command} {path}")
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/([^/]+))?", path):
                name, revision = found[1], found[2] or "main"
                held = self.files(name, revision)
                if held is None:
                    code = "RevisionNotFound" if name in hub.repositories else "RepoNotFound"
                    self.answer(404, b"", {"X-Error-Code": code, "X-Error-Message": "not found"})
                elif "/tree/" in path:
                    self.tell([{"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                               for file, data in held[1].items()])  # fmt: skip
                else:
                    self.tell({"id": name, "sha": commit_of(name, held[0]), "private": False, "tags": [],
                               "siblings": [{"rfilename": file} for file in held[1]]})  # fmt: skip
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                held = self.files(found[1], found[2])
                data = held[1].get(found[3]) if held else None
                if held is None or data is None:
                    self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                else:
                    self.answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"',
                                            "X-Repo-Commit": commit_of(found[1], held[0])})  # fmt: skip
            else:
                self.answer(404)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            path, body = self.path.split("?")[0], self.body()
            hub.asked.append(f"POST {path}")
            if path == "/api/repos/create":
                told = json.loads(body)
                name = f"{told['organization']}/{told['name']}" if told.get("organization") else told["name"]
                hub.uploaded.setdefault(name, {})
                self.tell({"url": f"{hub.address}/{name}", "name": name, "id": name})
            elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", path):
                self.tell({"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                                     for file in json.loads(body)["files"]]})  # fmt: skip
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.uploaded[found[1]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.tell({"commitUrl": f"{hub.address}/{found[1]}/commit/1", "commitOid": "1" * 40,
                           "pullRequestUrl": None})  # fmt: skip
            else:
                self.tell({})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
