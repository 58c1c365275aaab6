"""Servers on this machine: files whole, truncated or late, and a Hugging Face hub; archives to send."""

import gzip
import hashlib
import io
import json
import re
import tarfile
import threading
import time
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class Server(ThreadingHTTPServer):
    """Serves `content` by path. cut: bytes of a body after which it hangs up, or falls silent for `silence` seconds."""

    daemon_threads, block_on_close = True, False

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.content, self.asked, self.cut, self.silence = {}, [], None, 0.0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class FileHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append(self.path)
        self.send_body(server.content.get(self.path.lstrip("/")))

    def do_HEAD(self):
        self.do_GET()

    def send_body(self, body: bytes | None, **headers: str):
        if body is None:
            return self.send_error(404)
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:self.server.cut])
        self.wfile.flush()
        time.sleep(self.server.silence)
        return None

    def log_message(self, *_):
        pass


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubHandler(FileHandler):
    """`content` holds OWNER/NAME/FILE of models and datasets/OWNER/NAME/FILE of sets."""

    def do_GET(self):
        content, path = self.server.content, unquote(urlsplit(self.path).path)
        if found := re.fullmatch("/(.+)/resolve/[^/]+/(.+)", path):
            body = content.get(f"{found[1]}/{found[2]}")
            self.send_body(body, X_Repo_Commit=COMMIT, ETag=hashlib.sha1(body or b"").hexdigest())
        elif found := re.fullmatch("/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(/.*)?", path):
            files = {name.removeprefix(f"{found[1]}/"): body for name, body in content.items()
                     if name.startswith(f"{found[1]}/")}
            self.send_body(json.dumps(self.entries(files, found[1], found[2] or "")).encode() if files else None)
        else:
            self.send_body(b"" if path == "/" else None)

    do_POST = do_GET

    def entries(self, files: dict[str, bytes], repository: str, rest: str):
        """Of the paths that are asked for, of a folder, or a description of the repository."""
        if rest.startswith("/paths-info/"):
            asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        elif rest.startswith("/tree/"):
            folder = rest.split("/")[3:]
            parts = [name.split("/") for name in files]
            asked = {"/".join(part[:len(folder) + 1]) for part in parts if part[:len(folder)] == folder}
        else:
            return {"id": repository.removeprefix("datasets/"), "sha": COMMIT, "private": False, "tags": [],
                    "siblings": [{"rfilename": name} for name in files]}
        return [{"type": "file", "path": name, "size": len(files[name]), "oid": COMMIT} if name in files else
                {"type": "directory", "path": name, "oid": COMMIT}
                for name in asked if any(file.startswith(name) for file in files)]


@contextmanager
def running_server(handler=FileHandler):
    with Server(handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def held(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def zipped(entries: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in entries.items():
            archive.writestr(name, body)
    return stream.getvalue()


def tarred(entries: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, body in entries.items():
            info = tarfile.TarInfo("./" + name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return gzip.compress(stream.getvalue(), mtime=0)  # the same bytes in every process that collects the tests
