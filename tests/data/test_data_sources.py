"""Downloads that are large, cut, late or not what was asked for, archives that mean harm, and what recipes need."""

import gzip
import hashlib
import io
import re
import stat
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from data_server import held, refused, tarred, zipped

from crt_exp.config import CONF
from crt_exp.data import DataError, archives, download, sources
from crt_exp.data import __main__ as command
from crt_exp.data.__main__ import main
from crt_exp.data.download import free, published, shown
from crt_exp.data.fetch import OK, WRONG, beside, digest, fetch, inspect
from crt_exp.data.sources import SOURCES, TABLE, File, Source, select

ROWS = "".join(f"{i},{i * i}\n" for i in range(3000)).encode()


@pytest.fixture
def plain(server):
    server.content["t.data"] = ROWS
    known = "sha256:" + hashlib.sha256(ROWS).hexdigest()
    return Source("uci/t", "uci", "https://example.org/page", (File("uci/t.data", server.url("t.data"), digest=known),))


# ---- servers ---------------------------------------------------------------------------------------------------------
def test_a_silent_server_is_not_waited_for(server, plain, tmp_path, monkeypatch):
    """All that came is kept, also what fills no block, and the next call goes on behind it."""
    monkeypatch.setattr(download, "PATIENCE", 0.2)
    server.cut, server.silence = 10_001, 1.0
    assert "timed out" in refused(plain, tmp_path)
    assert held(tmp_path) == {"uci/t.data.part": ROWS[:10_001]}
    server.cut, server.silence = None, 0.0
    fetch(plain, tmp_path)
    assert server.asked[-1] == ("/t.data", "bytes=10001-") and held(tmp_path) == {"uci/t.data": ROWS}


@pytest.mark.parametrize("how", ["ignores ranges", "sends another part", "says no length"])
def test_servers_that_do_not_do_as_asked(server, plain, how, tmp_path):
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci/t.data.part").write_bytes(ROWS[:500])
    server.ranges, server.length = how != "ignores ranges", how != "says no length"
    server.shift = 7 if how == "sends another part" else 0
    fetch(plain, tmp_path)
    assert held(tmp_path) == {"uci/t.data": ROWS}


def test_a_body_without_length_that_is_cut(server, plain, tmp_path):
    server.length, server.cut = False, 5000
    assert "other content than published" in refused(plain, tmp_path) and not held(tmp_path)


# ---- size, room and licence ------------------------------------------------------------------------------------------
def test_nothing_larger_than_agreed_is_fetched(server, plain, tmp_path):
    message = refused(plain, tmp_path, most=len(ROWS) - 1)
    assert shown(len(ROWS)) in message and "--yes" in message and not held(tmp_path)
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci/t.data.part").write_bytes(ROWS[:1])     # what is still to come counts
    fetch(plain, tmp_path, most=len(ROWS) - 1)
    assert held(tmp_path) == {"uci/t.data": ROWS}


def test_nothing_is_fetched_without_room(server, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "free", lambda _: len(ROWS) - 1)
    assert "free" in refused(plain, tmp_path / "d") and not (tmp_path / "d").exists()
    body = zipped({"a.txt": ROWS})
    server.content["a.zip"] = body
    packed = Source("s", "t", "https://example.org", (File("s/a.txt", server.url("a.zip"), "a.txt", 3000),))
    monkeypatch.setattr(download, "free", lambda _: 2 * len(body) - 1)   # an archive and what is in it
    assert "with what it unpacks to" in refused(packed, tmp_path / "d") and not (tmp_path / "d").exists()
    monkeypatch.setattr(download, "free", lambda _: 2 * len(body))
    fetch(packed, tmp_path / "d")


def test_room_is_that_of_the_folder_to_be(tmp_path):
    assert 0 < free(tmp_path / "not/yet/there") == pytest.approx(free(tmp_path), rel=0.1)


def large(monkeypatch, size="6 GB"):
    source = Source("uci/t", "uci", "https://example.org", (File("uci/t.data", "http://127.0.0.1:9/t"),), size=size)
    monkeypatch.setattr(sources, "TABLE", (source,))
    monkeypatch.setattr(command, "free", lambda _: 10**11)
    monkeypatch.setattr(command, "fetch", lambda *_, most: fetched.append(most))
    fetched = []
    return fetched


@pytest.mark.parametrize("answer, code, most", [(None, 1, []), ("n", 1, []), ("", 1, []), ("y", 0, [float("inf")])])
def test_large_downloads_are_asked_for(answer, code, most, monkeypatch, tmp_path, capsys):
    fetched = large(monkeypatch)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr("builtins.input", lambda text: answer if "6 GB" in text else pytest.fail(text))
    assert main(["fetch", "uci", "--dir", str(tmp_path)]) == code and fetched == most
    assert answer is not None or "6 GB" in (err := capsys.readouterr().err) and "--yes" in err


def test_yes_is_an_answer(monkeypatch, tmp_path):
    fetched = large(monkeypatch)
    assert main(["fetch", "uci", "--dir", str(tmp_path), "--yes"]) == 0 and fetched == [float("inf")]
    fetched = large(monkeypatch, "4 GB")
    assert main(["fetch", "uci", "--dir", str(tmp_path)]) == 0 and fetched == [command.UNASKED]


def test_too_little_room_is_said_before_anything(monkeypatch, tmp_path, capsys):
    fetched = large(monkeypatch, "200 GB")
    assert main(["fetch", "uci", "--dir", str(tmp_path), "--yes"]) == 1 and not fetched
    assert "200 GB" in (err := capsys.readouterr().err) and "100 GB free" in err


def test_size_and_licence_come_before_the_first_byte(server, plain, tmp_path, capsys):
    source = Source(**vars(plain) | {"size": "33 kB", "licence": "CC0"})
    server.status = 500
    refused(source, tmp_path)
    assert "uci/t: 33 kB to download, licence: CC0" in capsys.readouterr().out


def test_imagenet_is_by_hand_and_says_what_its_licence_asks(tmp_path):
    message = refused(SOURCES["images/imagenet"], tmp_path)
    assert "registration" in message and "image-net.org" in message and "train/<class>/" in message
    assert str(tmp_path / "images/imagenet") in message


# ---- archives --------------------------------------------------------------------------------------------------------
def archive_of(server, name, body) -> Source:
    server.content[name] = body
    return Source("s", "t", "https://example.org", (File("s/set", server.url(name), "top/set", 1, ending=".txt"),))


def with_links(pack) -> bytes:
    """A folder with a file, a link out of it, and names that lead out."""
    stream = io.BytesIO()
    if pack is zipped:
        with zipfile.ZipFile(stream, "w") as archive:
            link = zipfile.ZipInfo("top/set/link.txt")
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(link, "/etc/passwd")
            for name in ("top/set/one", "/top/set/abs.txt", "top/set/../../../up.txt", "../top/set/up.txt"):
                archive.writestr(name, "x")
        return stream.getvalue()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo(f"top/set/kind{kind.decode()}.txt")
            info.type, info.linkname = kind, "../../../secret"
            archive.addfile(info)
        for name in ("top/set/one", "/top/set/abs.txt", "top/set/../../../up.txt", "../top/set/up.txt"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
    return gzip.compress(stream.getvalue())


@pytest.mark.parametrize("name, pack", [("p.zip", zipped), ("p.tar.gz", tarred)])
def test_only_plain_files_of_the_folder_are_unpacked(server, name, pack, tmp_path):
    fetch(archive_of(server, name, with_links(pack)), tmp_path / "d")
    assert held(tmp_path) == {"d/s/set/one.txt": b"x"}       # with the ending that files of this folder have
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name, pack", [("p.zip", zipped), ("p.tar.gz", tarred)])
@pytest.mark.parametrize("entries", [{"top/set/zeros.txt": bytes(3_000_000)},
                                     {f"top/set/{i}.txt": b"" for i in range(1000)}], ids=["large", "many"])
def test_bombs_are_not_unpacked(server, name, pack, entries, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "FLOOR", 1 << 20)
    monkeypatch.setattr(archives, "RATIO", 10)
    assert "unpacks to more than 10 times" in refused(archive_of(server, name, pack(entries)), tmp_path)
    assert not held(tmp_path)


def test_an_encrypted_archive(server, tmp_path):
    body = bytearray(zipped({"top/set/a.txt": b"x"}))
    for place in (body.index(b"PK\3\4") + 6, body.index(b"PK\1\2") + 8):
        body[place] |= 1
    assert "cannot be unpacked" in refused(archive_of(server, "p.zip", bytes(body)), tmp_path) and not held(tmp_path)


# ---- digests of the day ----------------------------------------------------------------------------------------------
MD5 = hashlib.md5(ROWS).hexdigest()
LISTS = {"md5": f"{'0' * 32}  x.t.data\n{MD5}  t.data\n{'1' * 32}  t.data.gz\n",
         "metalink": f'<files><file name="x"><verification><hash type="md5">{"0" * 32}</hash></verification></file>\n'
                     f'<file name="t.data">\n<size>1</size><verification>\n<hash type="md5">{MD5}</hash></verification>'
                     "</file></files>"}


@pytest.fixture(params=LISTS)
def listed(request, server):
    """A file whose digest the publisher lists with each release."""
    server.content |= {"t.data": ROWS, "list": LISTS[request.param].encode()}
    file = File("uci/t.data", server.url("t.data"), digests=server.url("list"))
    return Source("uci/t", "uci", "https://example.org", (file,))


def test_the_digest_of_a_release_is_asked_for_first_and_kept(server, listed, tmp_path):
    fetch(listed, tmp_path)
    path, file = tmp_path / "uci/t.data", listed.files[0]
    assert [path for path, _ in server.asked] == ["/list", "/t.data"] and path.read_bytes() == ROWS
    assert beside(path).read_text() == f"{MD5}  t.data\n" and inspect(file, path).state == OK
    path.write_bytes(ROWS[:-2] + b"0\n")
    assert inspect(file, path).state == WRONG                # without the network


def test_a_file_that_is_not_the_listed_one(server, listed, tmp_path):
    server.content["t.data"] = ROWS + b"x"
    assert "other content" in refused(listed, tmp_path) and not held(tmp_path)


def test_a_digest_that_cannot_be_had_stops_it(server, listed, tmp_path):
    server.content["list"] = b"nothing"
    assert "does not list the digest of t.data" in refused(listed, tmp_path)
    del server.content["list"]
    assert "which lists the digest of t.data" in refused(listed, tmp_path)
    assert not held(tmp_path) and "/t.data" not in dict(server.asked)
    with pytest.raises(DataError, match=re.escape("?.data")):
        published(server.url("t.data"), "?.data")


def test_letters_are_known_whatever_the_header_says(tmp_path):
    texts = {"a": b">sp|P1|A OS=x\nMKV\nLL\n", "b": b">sp|P1|A OS=y\r\nMK\r\nVLL", "c": b">x\nMKVLK\n"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    a, b, c = (digest(tmp_path / name, "letters") for name in "abc")
    assert a == b != c


# ---- what recipes need -----------------------------------------------------------------------------------------------
NAMED = re.compile(r"\$\{oc\.env:CRT_DATA,data\}/([\w./-]+)")


def test_the_table_has_every_file_that_a_recipe_names():
    named = {path for file in (CONF / "experiment").glob("*.yaml") for path in NAMED.findall(file.read_text())}
    known = {str(folder) for source in TABLE for file in source.files
             for folder in (Path(file.path), *Path(file.path).parents)}
    assert {"pg19/train", "lm1b/test", "protein/pfam/Pfam-A.regions.uniprot.tsv.gz"} <= named <= known


@pytest.mark.parametrize("name", ["protein/trembl", "protein/families", "protein/BPT1_BOVIN", "pg19", "lm1b", "imdb",
                                  "aan", "glue", "wikitext2", "wikitext103", "images/imagenet", "speech/LibriSpeech"])
def test_sources_of_the_recipes(name):
    chosen = select(name)
    for source in chosen:
        by_hand = not all(file.url or file.made for file in source.files)
        checked = all(file.digest or file.digests or file.archive_sha256 or file.rows or file.made
                      for file in source.files)
        assert source.note if by_hand else checked


def test_a_name_is_itself_and_not_what_lies_below():
    assert [source.name for source in select("protein")] == ["protein"]
    assert sum(source.bytes for source in select("speech")) == pytest.approx(61e9, rel=0.02)
