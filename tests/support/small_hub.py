"""The Hugging Face hub, as far as `huggingface_hub` asks for it: one repository at one revision, on loopback."""

import hashlib
import http.server
import json
import threading
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SmallHub:
    """Serves a directory's files as those of `repo`; a context manager. `asked` has (method, path, authorization)."""

    def __init__(self, repo: str, files: Path) -> None:
        self.asked: list[tuple[str, str, str | None]] = []
        names = sorted(file.relative_to(files).as_posix() for file in files.rglob("*") if file.is_file())
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.asked.append((self.command, path, self.headers.get("authorization")))
                for revision in ("main", "v1", COMMIT):
                    if path == f"/api/models/{repo}/revision/{revision}":
                        siblings = [{"rfilename": name} for name in names]
                        return self.answer({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings})
                    if path == f"/api/models/{repo}/tree/{revision}":
                        return self.answer([_entry(files / name, name) for name in names])
                    prefix = f"/{repo}/resolve/{revision}/"
                    if path.startswith(prefix) and path.removeprefix(prefix) in names:
                        return self.answer((files / path.removeprefix(prefix)).read_bytes())
                code = "RevisionNotFound" if path.startswith(f"/api/models/{repo}/") else "RepoNotFound"
                return self.answer({"error": code}, 404, code)

            def answer(self, body: Any, status: int = 200, code: str = "") -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {
                    "Content-Length": str(len(data)), "Content-Type": "application/json", "X-Repo-Commit": COMMIT,
                    "ETag": f'"{hashlib.sha1(data).hexdigest()}"', **({"X-Error-Code": code} if code else {}),
                }.items():  # fmt: skip
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def files_asked(self) -> set[str]:
        """Names of files whose content was asked for."""
        return {
            path.partition(f"/{COMMIT}/")[2]
            for method, path, _ in self.asked
            if method == "GET" and "/resolve/" in path
        }

    def __enter__(self) -> "SmallHub":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _entry(file: Path, name: str) -> dict[str, Any]:
    data = file.read_bytes()
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": oid}
