"""A server on this machine that answers like the Hugging Face hub, for the models and sets that lie in a folder."""

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves <root>/<owner>/<name> as models and <root>/datasets/<owner>/<name> as sets."""

    daemon_threads, block_on_close = True, False

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.asked = root, []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        if found := re.fullmatch(r"/(.+)/resolve/[^/]+/(.+)", path):
            return self.send_file(self.server.root / found[1] / found[2])
        if found := re.fullmatch(r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(/.*)?", path):
            folder = self.server.root / found[1]
            if folder.is_dir():
                return self.send_entries(folder, found[2] or "")
        return self.answer(404 if path != "/" else 200, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_POST = do_GET

    def send_file(self, file: Path):
        if not file.is_file():
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        body = file.read_bytes()
        return self.answer(200, body, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'})

    def send_entries(self, folder: Path, rest: str):
        """What the set or model is, the entries of a folder of it (tree), or those that are asked for (paths-info)."""
        length = int(self.headers.get("Content-Length") or 0)
        if rest.startswith("/paths-info/"):
            reply = [self.entry(folder, folder / path) for path in parse_qs(self.rfile.read(length).decode())["paths"]
                     if (folder / path).exists()]
        elif rest.startswith("/tree/"):
            inside = folder / "/".join(rest.split("/")[3:])
            reply = [self.entry(folder, path) for path in sorted(inside.iterdir())] if inside.is_dir() else []
        else:
            names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
            reply = {"id": "/".join(folder.parts[-2:]), "sha": COMMIT, "siblings": [{"rfilename": n} for n in names],
                     "private": False, "tags": []}
        return self.answer(200, json.dumps(reply).encode(), {"Content-Type": "application/json"})

    def entry(self, folder: Path, path: Path) -> dict:
        kind = "file" if path.is_file() else "directory"
        return {"type": kind, "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": "0" * 40}

    def answer(self, status: int, body: bytes, headers: dict[str, str]):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass
