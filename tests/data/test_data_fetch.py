"""Laws of list, fetch and verify, against a server on this machine."""

import gzip
import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from data_server import Server, held, refused, tarred, zipped

from crt_exp.data import sources
from crt_exp.data.__main__ import main
from crt_exp.data.fetch import MISSING, OK, SUBSET, TRUNCATED, WRONG, digest, fetch, inspect, sha256_of_rows
from crt_exp.data.sources import TABLE, File, Source, missing

ROWS = "".join(f"{i},{i * i},label{i % 3}\n" for i in range(5000)).encode()
FOLDERS = ("uci", *(f"glue/{task}" for task in ("CoLA", "SST-2", "MRPC", "STS-B", "QNLI", "RTE", "WNLI")), "ptb",
           "wikitext2", "speech/LibriSpeech", "speech/free-spoken-digit-dataset/recordings", "images/imagenette2-320",
           "protein", "mnist")


@pytest.fixture
def plain(server, tmp_path):
    """One file of comma-separated rows on the server, as a source."""
    (tmp_path / "rows").write_bytes(ROWS)
    server.content["t.data"] = ROWS
    file = File("uci/t.data", server.url("t.data"), rows=5000, digest=digest(tmp_path / "rows", "rows"))
    return Source("uci/t", "uci", "https://example.org/page", (file,))


# ------------------------------------------------------------------------------------------------------- plain
def test_fetch_is_whole_and_quiet(server, plain, tmp_path, capfd):
    fetch(plain, tmp_path / "d")
    assert held(tmp_path / "d") == {"uci/t.data": ROWS}
    assert capfd.readouterr().err == ""                          # no progress bar where stderr is no terminal
    fetch(plain, tmp_path / "d")
    assert len(server.asked) == 1                                # what is good is not fetched again


def test_fetch_continues_a_part(server, plain, tmp_path):
    part = tmp_path / "d/uci/t.data.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(ROWS[:12345])
    fetch(plain, tmp_path / "d")
    assert server.asked == [("/t.data", "bytes=12345-")] and held(tmp_path / "d") == {"uci/t.data": ROWS}


def test_fetch_after_a_broken_connection(server, plain, tmp_path):
    server.cut = 20000
    assert f"broke off after 20000 of {len(ROWS)} bytes" in refused(plain, tmp_path / "d")
    assert held(tmp_path / "d") == {"uci/t.data.part": ROWS[:20000]}
    server.cut = None
    fetch(plain, tmp_path / "d")
    assert server.asked[-1] == ("/t.data", "bytes=20000-") and held(tmp_path / "d") == {"uci/t.data": ROWS}


@pytest.mark.parametrize("ranges", [True, False])
def test_part_that_is_already_whole(server, plain, ranges, tmp_path):
    server.ranges = ranges                                       # with ranges the answer is 416, without the whole file
    (tmp_path / "d/uci").mkdir(parents=True)
    (tmp_path / "d/uci/t.data.part").write_bytes(ROWS)
    fetch(plain, tmp_path / "d")
    assert held(tmp_path / "d") == {"uci/t.data": ROWS}


@pytest.mark.parametrize("stale", [b"x" * 777, ROWS + b"more\n"])
def test_part_of_something_else_is_thrown_away(server, plain, stale, tmp_path):
    (tmp_path / "d/uci").mkdir(parents=True)
    (tmp_path / "d/uci/t.data.part").write_bytes(stale)
    assert "thrown away" in refused(plain, tmp_path / "d")
    assert held(tmp_path / "d") == {}
    fetch(plain, tmp_path / "d")
    assert held(tmp_path / "d") == {"uci/t.data": ROWS}


@pytest.mark.parametrize("body, problem", [(ROWS.replace(b"label2", b"label1", 1), "other content"),
                                           (ROWS[:30000], "truncated"), (ROWS + b"1,1,a\n", "5001 rows, not 5000"),
                                           (b"", "truncated")])
def test_bad_content_leaves_nothing(server, plain, body, problem, tmp_path):
    server.content["t.data"] = body
    message = refused(plain, tmp_path / "d")
    assert problem in message and plain.files[0].url in message and held(tmp_path / "d") == {}


def test_bad_content_does_not_replace_what_is_there(server, plain, tmp_path):
    (tmp_path / "d/uci").mkdir(parents=True)
    (tmp_path / "d/uci/t.data").write_bytes(ROWS[:5000])
    server.content["t.data"] = ROWS[:9000]
    refused(plain, tmp_path / "d")
    assert held(tmp_path / "d") == {"uci/t.data": ROWS[:5000]}
    server.content["t.data"] = ROWS
    fetch(plain, tmp_path / "d")                                 # the published content does
    assert held(tmp_path / "d") == {"uci/t.data": ROWS}


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_server_error(server, plain, status, tmp_path):
    server.status = status
    message = refused(plain, tmp_path / "d")
    assert str(status) in message and plain.page in message and str(tmp_path / "d/uci/t.data") in message
    assert not (tmp_path / "d").exists()


def test_no_connection(tmp_path, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/abalone.data"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(sources, "TABLE", (Source("uci/t", "uci", "https://example.org", (File("uci/t.data", url),)),))
    assert main(["fetch", "uci", "--dir", str(tmp_path / "d")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"No connection for {url}") and "By hand" in err and "Traceback" not in err
    assert not (tmp_path / "d").exists()


def test_folder_that_cannot_be_written(plain, tmp_path):
    (tmp_path / "d").write_text("a file where the data folder should be")
    assert "Cannot write" in refused(plain, tmp_path / "d")


# ---------------------------------------------------------------------------------------------------- archives
PACKED = {"top/a.txt": b"1\n2\n", "top/b.txt": b"1\n2\n3\n", "top/set/x/1.flac": b"one", "top/set/y/2.flac": b"two",
          "top/set/y/list.trans.txt": b"words", "other.txt": b"not wanted", "top/set/../../../evil.flac": b"evil"}


def packed_source(server: Server, name: str, body: bytes, checksum: str = "") -> Source:
    server.content[name] = body
    url = server.url(name)
    return Source("s", "t", "https://example.org/page", (
        File("s/a.txt", url, "top/a.txt", 2, archive_sha256=checksum), File("s/b.txt", url, "top/b.txt", 3),
        File("s/set", url, "top/set", 2)))


@pytest.mark.parametrize("name, pack", [("p.zip", zipped), ("p.tgz", tarred), ("p.tar.gz", tarred)])
def test_archive_gives_files_and_folders(server, name, pack, tmp_path):
    body = pack(PACKED)
    fetch(packed_source(server, name, body, hashlib.sha256(body).hexdigest()), tmp_path / "d")
    assert held(tmp_path / "d") == {
        "s/a.txt": b"1\n2\n", "s/b.txt": b"1\n2\n3\n", "s/set/x/1.flac": b"one", "s/set/y/2.flac": b"two",
        "s/set/y/list.trans.txt": b"words"}
    assert len(server.asked) == 1 and not (tmp_path / "evil.flac").exists()


@pytest.mark.parametrize("body", [b"no archive", tarred(PACKED)[:-4], tarred(PACKED)[:99],
                                  tarred({"top/a.txt": b"1\n2\n"})])
def test_bad_archive_leaves_nothing_behind(server, body, tmp_path):
    source = packed_source(server, "p.tgz", body)
    assert server.url("p.tgz") in refused(source, tmp_path / "d")
    assert set(held(tmp_path / "d")) <= {"s/a.txt"}              # the one member that was whole


def test_archive_with_another_checksum(server, tmp_path):
    source = packed_source(server, "p.zip", zipped(PACKED), "0" * 64)
    assert "another checksum" in refused(source, tmp_path / "d") and held(tmp_path / "d") == {}


def test_archive_continues_a_part(server, tmp_path):
    body = zipped(PACKED)
    (tmp_path / "d/s").mkdir(parents=True)
    (tmp_path / "d/s/p.zip.part").write_bytes(body[:100])
    fetch(packed_source(server, "p.zip", body), tmp_path / "d")
    assert server.asked == [("/p.zip", "bytes=100-")] and "s/p.zip.part" not in held(tmp_path / "d")


def test_gzip_is_unpacked(server, tmp_path):
    server.content["e.fasta.gz"] = gzip.compress(b">sp|A\nMKV\n>sp|B\nMKL\n", mtime=0)
    file = File("protein/e.fasta", server.url("e.fasta.gz"), "e.fasta", 1, at_least=True)
    fetch(Source("protein", "t", "page", (file,)), tmp_path)
    assert held(tmp_path) == {"protein/e.fasta": b">sp|A\nMKV\n>sp|B\nMKL\n"}


def test_folder_of_the_user_is_left_alone(server, tmp_path):
    (tmp_path / "d/s/set/x").mkdir(parents=True)
    (tmp_path / "d/s/set/x/1.flac").write_bytes(b"mine")
    assert "move that folder away" in refused(packed_source(server, "p.zip", zipped(PACKED)), tmp_path / "d")
    assert held(tmp_path / "d") == {"s/set/x/1.flac": b"mine"} and not server.asked


def test_what_has_no_link_says_where_to_get_it(tmp_path):
    source = next(source for source in TABLE if source.name == "glue/MRPC")
    message = refused(source, tmp_path)
    assert source.page in message and str(tmp_path / "glue/MRPC/train.tsv") in message


# ------------------------------------------------------------------------------------------------------ verify
@pytest.mark.parametrize("file, body, state", [
    (File("a/b.txt", rows=3), None, MISSING),
    (File("a/b.txt", rows=3), b"1\r\n\n2\n3", OK),
    (File("a/b.txt", rows=3), b"1\n2\n", TRUNCATED),
    (File("a/b.txt", rows=3), b"1\n2\n3\n4\n", WRONG),
    (File("a/b.txt", rows=3, at_least=True), b"1\n2\n3\n4\n", OK),
    (File("a/b.txt"), b"", TRUNCATED),
    (File("a/b.txt", digest="size:4"), b"abcd", OK),
    (File("a/b.txt", digest="size:4"), b"abcde", WRONG),
    (File("a/b.gz", digest="gunzip:" + hashlib.sha256(b"x").hexdigest()), gzip.compress(b"x", mtime=0), OK),
    (File("a/b.gz", digest="gunzip:" + hashlib.sha256(b"x").hexdigest()), gzip.compress(b"x", mtime=0)[:-3], WRONG),
    (File("a/b.txt", digest="sha256:" + hashlib.sha256(b"x").hexdigest()), b"x", OK),
    (File("a/b.txt", digest="sha256:" + hashlib.sha256(b"x").hexdigest()), b"y", WRONG),
    (File("a/b", rows=2), b"a file, not a folder", WRONG)])
def test_states(file, body, state, tmp_path):
    path = tmp_path / "b"
    if body is not None:
        path.write_bytes(body)
    assert inspect(file, path).state == state


def test_states_of_folders(tmp_path):
    file = File("a/recordings", rows=2)
    (tmp_path / "notes.txt").write_text("no recording")
    states = [inspect(file, tmp_path).state]
    for name in ("1.wav", "2.WAV", "3.flac"):
        (tmp_path / name).touch()
        states.append(inspect(file, tmp_path).state)
    assert states == [WRONG, SUBSET, OK, WRONG]
    assert inspect(File("a/b.txt"), tmp_path).state == WRONG


@pytest.mark.parametrize("same", [b"1,2,a\r\n3,4,b\r\n", b"1,2,a\n\n3,4,b", b" 1, 2 ,a\n3,4,b \n\n",
                                  b"1 2  a\n 3\t4 b\n"])
def test_digest_of_rows_sees_the_fields_only(same, tmp_path):
    (tmp_path / "a").write_bytes(b"1,2,a\n3,4,b\n")
    (tmp_path / "b").write_bytes(same)
    assert sha256_of_rows(tmp_path / "a") == sha256_of_rows(tmp_path / "b")
    (tmp_path / "b").write_bytes(same.replace(b"4", b"5"))
    assert sha256_of_rows(tmp_path / "a") != sha256_of_rows(tmp_path / "b")


def test_verify_says_what_is_bad(tmp_path, capsys):
    assert main(["verify", "--dir", str(tmp_path)]) == 0         # missing is not bad
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci/car.data").write_text("vhigh,vhigh,2,2,small,low,unacc\n")
    capsys.readouterr()
    assert main(["verify", "uci", "--dir", str(tmp_path)]) == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "truncated" in lines["uci/car.data"] and "1 of 1728 rows" in lines["uci/car.data"]
    assert "missing" in lines["uci/nursery.data"] and not any(name.startswith("glue") for name in lines)


@pytest.mark.skipif(not os.environ.get("CRT_DATA"), reason="CRT_DATA is not set: the official files are needed")
@pytest.mark.parametrize("name", ["uci/abalone", "uci/nursery", "uci/chess", "ptb", "wikitext2", "mnist"])
def test_official_files_are_known(name):
    for file in sources.select(name)[0].files:
        assert inspect(file, Path(os.environ["CRT_DATA"]) / file.path).state in (OK, MISSING)


# ----------------------------------------------------------------------------------------------------- command
@pytest.mark.parametrize("arguments", [[], ["list"]])
def test_list_shows_every_folder(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci/car.data").touch()
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(folder in out for folder in FOLDERS) and all(source.page in out for source in TABLE)
    here = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "present" in here["uci/car"] and "missing" in here["uci/cmc"] and "embedded" in here["uci/digits"]
    assert "by hand" in here["images/imagenet"] and str(tmp_path) in out


def test_command_runs_as_a_module():
    run = subprocess.run([sys.executable, "-m", "crt_exp.data", "fetch", "ucy", "--dir", "x"], capture_output=True,
                         text=True)
    assert run.returncode == 1 and "There is no data set 'ucy'" in run.stderr and "uci" in run.stderr


@pytest.mark.parametrize("arguments", [["fetch", "uci"], ["verify"]])
def test_no_folder_given(arguments, monkeypatch, capsys):
    monkeypatch.delenv("CRT_DATA", raising=False)
    assert main(arguments) == 1
    assert "--dir DIR" in capsys.readouterr().err


def test_embedded_set_needs_no_fetching(tmp_path, capsys):
    assert main(["fetch", "uci/iris", "--dir", str(tmp_path)]) == 0
    assert "embedded" in capsys.readouterr().out and not held(tmp_path)


# ------------------------------------------------------------------------------------------------------- table
def test_table_is_consistent():
    assert len({source.name for source in TABLE}) == len(TABLE)
    for source in TABLE:
        assert source.page.startswith(("https://", "http://")) and (source.files or source.embedded)
        for file in source.files:
            assert file.path.startswith(source.name.split("/")[0] + "/")
            assert not file.url or file.member or file.digest or file.digests  # a resumed plain file can be checked
            assert file.url.startswith(("https://", "")) and not file.digest or file.digest.split(":")[1]


def test_missing_names_what_the_user_needs():
    message = str(missing("ptb", None))
    assert "ptb.train.txt" in message and "fetch ptb --dir DIR" in message and "task.data_dir=DIR/ptb" in message
    message = str(missing("mnist", Path("/data/mnist/t10k-images-idx3-ubyte.gz"), 2))
    assert "t10k-images" in message and "fetch mnist --dir /data" in message and "task.data_dir=/data/mnist" in message


def test_rows_of_a_digest_end_at_line_feeds_alone(tmp_path):
    """Line ends of Windows are no others; those that Unicode knows are characters of a row."""
    def of(content):
        (tmp_path / "t").write_bytes(content.encode())
        return sha256_of_rows(tmp_path / "t")

    assert of("a,b\r\nc,d") == of("a,b\nc,d\n") and of("a,b\u2028c,d\n") != of("a,b\nc,d\n")
