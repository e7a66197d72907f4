"""A model hub on loopback, as much of one as huggingface_hub asks for; it notes each request."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

GOOD_TOKEN = "hf_good"


@dataclass
class Repo:
    """`access`: open to all, only with the good token, or to nobody (a licence not accepted)."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    licence_accepted: bool = True

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


@dataclass
class Hub:
    """`answer_all_with`: this HTTP status for every request, as a hub that is down gives."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    answer_all_with: int | None = None

    def add(self, repo_id: str, files: dict[str, bytes], **options: Any) -> str:
        """A new commit on main; its id."""
        content = json.dumps({name: digest(data) for name, data in files.items()}, sort_keys=True)
        commit = digest(content.encode())
        repo = self.repos.setdefault(repo_id, Repo({}, {}, **options))
        repo.commits[commit] = files
        repo.refs["main"] = commit
        return commit

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        return {
            r.rpartition("/")[2] for r in self.requests if r.startswith("GET") and "/resolve/" in r
        }


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def folder_files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@contextlib.contextmanager
def hub_stand_in() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.requests.append(f"{self.command} {path}")
        if (status := self.served.answer_all_with) is not None:
            self._send(status, b"down")
            return
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        if is_api:
            parts = parts[2:]
        repo = self.served.repos.get("/".join(parts[:2]))
        if repo is None:
            self._refuse(404, "RepoNotFound")
            return
        what, revision, rest = [
            *parts[2:4],
            *["revision", "main"][len(parts[2:4]) :],
            "/".join(parts[4:]),
        ]
        if not is_api and repo.gated and not self._may_read(repo):
            return
        commit = repo.commit(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
        elif is_api and what == "revision":
            siblings = [{"rfilename": name} for name in repo.commits[commit]]
            self._json({"id": "/".join(parts[:2]), "sha": commit, "siblings": siblings})
        elif is_api:
            files = repo.commits[commit].items()
            self._json(
                [{"type": "file", "path": n, "size": len(d), "oid": digest(d)} for n, d in files]
            )
        elif rest not in repo.commits[commit]:
            self._refuse(404, "EntryNotFound", commit)
        else:
            data = repo.commits[commit][rest]
            self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{digest(data)}"'})

    def _may_read(self, repo: Repo) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token == GOOD_TOKEN and repo.licence_accepted:
            return True
        self._refuse(403 if token == GOOD_TOKEN else 401, "GatedRepo")
        return False

    def _refuse(self, status: int, code: str, commit: str | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code}
        if commit is not None:
            headers["X-Repo-Commit"] = commit
        self._send(status, json.dumps({"error": code}).encode(), headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
