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
from urllib.parse import unquote, urlsplit


class Server(ThreadingHTTPServer):
    """Serves `content` by path. cut: bytes of a body after which it hangs up, or falls silent for `silence` seconds."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.content = {}
        self.asked = []
        self.cut = None
        self.silence = 0.0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class FileHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append(self.path)
        self.send_body(server.content.get(self.path.lstrip("/")))

    do_HEAD = do_GET

    def send_body(self, body: bytes | None, **headers: str):
        if body is None:
            return self.send_error(404)
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: self.server.cut])
        self.wfile.flush()
        time.sleep(self.server.silence)
        return None

    def log_message(self, *_):
        pass


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubHandler(FileHandler):
    """`content` holds OWNER/NAME/FILE of models and datasets/OWNER/NAME/FILE of sets."""

    def do_GET(self):
        content = self.server.content
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch("/(.+)/resolve/[^/]+/(.+)", path):
            body = content.get(f"{found[1]}/{found[2]}")
            ETag = hashlib.sha1(body or b"").hexdigest()
            self.send_body(body, X_Repo_Commit=COMMIT, ETag=ETag)
        elif found := re.fullmatch(
            "/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(/tree/[^/]+)?(/.*)?", path
        ):
            about = {
                "id": found[1].removeprefix("datasets/"),
                "sha": COMMIT,
                "private": False,
                "tags": [],
            }
            self.send_body(
                json.dumps(self.entries(found[1], found[3] or "") if found[2] else about).encode()
            )
        else:
            self.send_body(b"" if path == "/" else None)

    do_HEAD = do_GET

    def entries(self, repository: str, folder: str) -> list[dict]:
        content = self.server.content
        inside = f"{repository}{folder}/"
        places = {
            inside + name.removeprefix(inside).split("/")[0]
            for name in content
            if name.startswith(inside)
        }
        return [
            {
                "type": "file" if place in content else "directory",
                "path": place.removeprefix(f"{repository}/"),
                "size": len(content.get(place, b"")),
                "oid": COMMIT,
            }
            for place in places
        ]


@contextmanager
def running_server(handler=FileHandler):
    with Server(handler) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield server
        server.shutdown()


def held(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


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
    return gzip.compress(
        stream.getvalue(), mtime=0
    )  # the same bytes in every process that collects the tests
