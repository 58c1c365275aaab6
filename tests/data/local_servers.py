"""A server on this machine that sends files whole, truncated or late, and archives to send."""

import gzip
import io
import tarfile
import threading
import time
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

class Server(ThreadingHTTPServer):
    """Serves `content` by path. cut: bytes of a body after which it hangs up, or falls silent for `silence` seconds."""

    daemon_threads, block_on_close = True, False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.content, self.asked, self.cut, self.silence = {}, [], None, 0.0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class FileHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append(self.path)
        body = server.content.get(self.path.lstrip("/"))
        if body is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:server.cut])
        self.wfile.flush()
        time.sleep(server.silence)
        return None

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@contextmanager
def running_server():
    with Server() as server:
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
