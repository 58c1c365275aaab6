"""Servers on this machine: one of files and archives, whole, truncated or late, and one like the Hugging Face hub."""

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

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def running(server: ThreadingHTTPServer):
    """Answer in a thread until the end of the block."""
    with server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


class Server(ThreadingHTTPServer):
    """Serves `content` by path. cut: bytes of a body after which it hangs up, or falls silent for `silence` seconds."""

    daemon_threads, block_on_close = True, False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.content, self.asked, self.cut, self.status, self.silence = {}, [], None, 200, 0.0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class FileHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append(self.path)
        body = server.content.get(self.path.lstrip("/"))
        if server.status != 200 or body is None:
            return self.send_error(server.status if body is not None else 404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:server.cut])
        self.wfile.flush()
        time.sleep(server.silence)
        return None

    def log_message(self, *_):
        pass


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


class HubServer(ThreadingHTTPServer):
    """Serves <root>/<owner>/<name> as models and <root>/datasets/<owner>/<name> as sets."""

    daemon_threads, block_on_close = True, False

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.root, self.asked = root, []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(BaseHTTPRequestHandler):
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
