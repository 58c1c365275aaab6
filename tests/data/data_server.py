"""A server on this machine that sends files whole, cut, late or other than asked for, and archives to send."""

import gzip
import io
import tarfile
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from crt_exp.data import DataError
from crt_exp.data.fetch import fetch
from crt_exp.data.sources import Source


class Server(ThreadingHTTPServer):
    """Serves `content` by path. ranges: whether it understands Range; shift: how much later than asked a part begins;
    cut: bytes of a body after which it hangs up, or falls silent for `silence` seconds; length: whether it says it."""

    daemon_threads, block_on_close = True, False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.asked, self.ranges, self.cut, self.status = {}, [], True, None, 200
        self.shift, self.silence, self.length = 0, 0.0, True

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append((self.path, wanted))
        body = server.content.get(self.path.lstrip("/"))
        if server.status != 200 or body is None:
            return self.send_error(server.status if body is not None else 404)
        start = int(wanted.split("=")[1].rstrip("-")) + server.shift if wanted and server.ranges else 0
        if start and start >= len(body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if server.length:
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:] if server.cut is None else body[start:start + server.cut])
        if server.silence:
            self.wfile.flush()
            time.sleep(server.silence)
        return None

    def log_message(self, *_):
        pass


def held(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def refused(source: Source, root: Path, **options) -> str:
    with pytest.raises(DataError) as caught:
        fetch(source, root, **options)
    assert 1 <= len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


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
