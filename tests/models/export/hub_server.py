"""A Hub for tests, in memory: the part of its HTTP API for uploads and downloads of models.

Its rules are the Hub's. A request without a token gets 404 for a private repository. A commit whose
parent is not the branch's last commit gets 412. Files in safetensors go through the LFS protocol. A
request to a path in `refused` gets the status that is recorded there.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

WRITER, READER = "hf_writer_secret", "hf_reader_secret"
Files = dict[str, bytes]


@dataclass
class Repository:
    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: Files) -> str:
        sha = hashlib.sha1(repr((branch, len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: Files = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    """Status of the response, by a part of the request's path."""
    message: str = "no"
    """Message of these responses."""
    url: str = ""

    def make(self, name: str, files: Files | None = None, *, private: bool = False) -> Repository:
        self.repositories[name] = repository = Repository(private)
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n", **(files or {})})
        return repository


class RefusalError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "no") -> None:
        self.status, self.code, self.message = status, code, message


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            for part, status in self.hub.refused.items():
                if part in f"{self.command} {path}":
                    raise RefusalError(status, message=self.hub.message)
            for pattern, handle in ROUTES:
                if match := re.fullmatch(pattern, path):
                    value, headers = handle(self, *map(unquote, match.groups()), body=body)
                    break
            else:
                raise RefusalError(404)
        except RefusalError as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            self.reply(refusal.status, json.dumps({"error": refusal.message}).encode(), headers)
            return
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.reply(200, content, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - the names that http.server calls

    def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # --- permissions

    @property
    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def repository(self, name: str, *, writing: bool = False) -> Repository:
        if self.token not in (None, WRITER, READER):
            raise RefusalError(401, message="Invalid credentials in Authorization header")
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and self.token is None):
            raise RefusalError(404 if self.token else 401, "RepoNotFound")
        if writing and self.token != WRITER:
            raise RefusalError(403, message="you don't have the right to write")
        return repository

    def files(self, name: str, revision: str) -> tuple[str, Files]:
        repository = self.repository(name)
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            raise RefusalError(404, "RevisionNotFound")
        return sha, repository.commits[sha]

    # --- responses

    def create(self, body: bytes) -> Any:
        if self.token != WRITER:
            raise RefusalError(401 if self.token is None else 403)
        wanted = json.loads(body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repositories:
            raise RefusalError(409)
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.make(name, private=private)
        return {"url": f"{self.hub.url}/{name}"}, {}

    def info(self, name: str, revision: str = "main", *, body: bytes) -> Any:
        sha, files = self.files(name, revision)
        siblings = [{"rfilename": path} for path in files]
        return {"id": name, "sha": sha, "private": self.repository(name).private, "siblings": siblings, "tags": []}, {}

    def tree(self, name: str, revision: str, *, body: bytes) -> Any:
        _, files = self.files(name, revision)
        return [described(path, content) for path, content in sorted(files.items())], {}

    def branch(self, name: str, branch: str, *, body: bytes) -> Any:
        repository = self.repository(name, writing=True)
        if self.command == "DELETE":
            del repository.branches[branch]
            return {}, {}
        if branch in repository.branches:
            raise RefusalError(409)
        repository.branches[branch] = repository.branches["main"]
        return {}, {}

    def validate(self, *, body: bytes) -> Any:
        return {"errors": [], "warnings": []}, {}

    def preupload(self, name: str, revision: str, *, body: bytes) -> Any:
        self.repository(name, writing=True)
        paths = [file["path"] for file in json.loads(body)["files"]]
        return {"files": [{"path": path, "uploadMode": mode(path), "shouldIgnore": False} for path in paths]}, {}

    def batch(self, name: str, *, body: bytes) -> Any:
        self.repository(name, writing=True)
        objects = [
            {**item, "actions": {"upload": {"href": f"{self.hub.url}/objects/{item['oid']}"}}}
            for item in json.loads(body)["objects"]
        ]
        return {"transfer": "basic", "objects": objects}, {}

    def put(self, oid: str, *, body: bytes) -> Any:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        return {}, {}

    def commit(self, name: str, branch: str, *, body: bytes) -> Any:
        repository = self.repository(name, writing=True)
        header, *operations = map(json.loads, body.splitlines())
        files = dict(repository.commits[repository.branches[branch]])
        if header["value"].get("parentCommit") not in (None, repository.branches[branch]):
            raise RefusalError(412, message="a commit has happened since")
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                assert operation["key"] == "deletedFile"
                del files[value["path"]]
        sha = repository.commit(branch, files)
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha}, {}

    def resolve(self, name: str, revision: str, path: str, *, body: bytes) -> Any:
        sha, files = self.files(name, revision)
        if path not in files:
            raise RefusalError(404, "EntryNotFound")
        return files[path], {"X-Repo-Commit": sha, "ETag": f'"{git_digest(files[path])}"', "Accept-Ranges": "none"}


ROUTES: list[tuple[str, Any]] = [
    ("/api/repos/create", _Handler.create),
    ("/api/validate-yaml", _Handler.validate),
    ("/api/models/([^/]+/[^/]+)", _Handler.info),
    ("/api/models/([^/]+/[^/]+)/revision/([^/]+)", _Handler.info),
    ("/api/models/([^/]+/[^/]+)/tree/([^/]+)", _Handler.tree),
    ("/api/models/([^/]+/[^/]+)/branch/([^/]+)", _Handler.branch),
    ("/api/models/([^/]+/[^/]+)/preupload/([^/]+)", _Handler.preupload),
    ("/api/models/([^/]+/[^/]+)/commit/([^/]+)", _Handler.commit),
    ("/([^/]+/[^/]+).git/info/lfs/objects/batch", _Handler.batch),
    ("/objects/([0-9a-f]+)", _Handler.put),
    ("/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", _Handler.resolve),
]


def mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


def described(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_digest(content)}
    if mode(path) == "lfs":
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def git_digest(content: bytes) -> str:
    """Return what `git hash-object` prints."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


assert git_digest(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
