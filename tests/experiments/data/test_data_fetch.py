"""list, fetch and verify, the table of sources, and files before the hub, against local servers."""

import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from helpers.local_servers import HubHandler, held, running_server, tarred, zipped
from helpers.small_bert import write_model

from crt_exp.experiments.data import DataError, corpora, sources
from crt_exp.experiments.data import __main__ as command
from crt_exp.experiments.data.__main__ import (
    MISSING,
    OK,
    SUBSET,
    WRONG,
    digest,
    fetch_source,
    inspect,
    main,
)
from crt_exp.experiments.data.sources import (
    SOURCES,
    File,
    Source,
    is_on_hub,
    task_folder,
    text_folder,
)
from crt_exp.registry import CONF

ROWS = "".join(f"{i},{i * i},label{i % 3}\n" for i in range(5000)).encode()
KNOWN = hashlib.sha256(ROWS).hexdigest()


def refused(source: Source, root: Path) -> str:
    with pytest.raises(DataError) as caught:
        fetch_source(source, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def source_of(*files: File, name: str = "s") -> Source:
    return Source(name, "t", "https://example.org/page", files=[*files])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("CRT_DATA", raising=False)
    with running_server() as answering:
        yield answering


@pytest.fixture
def plain(server):
    """One file of comma-separated rows on the server, as a source."""
    server.content["t.data"] = ROWS
    return source_of(File("uci/t.data", server.url("t.data"), rows=5000, digest=f"sha256:{KNOWN}"))


# ---- plain files -----------------------------------------------------------------------------------------------------
def test_fetch_is_whole_and_quiet(server, plain, tmp_path, capfd):
    fetch_source(plain, tmp_path / "d")
    assert held(tmp_path / "d") == {"uci/t.data": ROWS}
    assert capfd.readouterr().err == ""  # no progress bar where stderr is no terminal
    fetch_source(plain, tmp_path / "d")
    assert len(server.asked) == 1  # what is good is not fetched again


@pytest.mark.parametrize(
    "body, problem",
    [(ROWS.replace(b"label2", b"label1", 1), "other content"), (ROWS[:30000], "of 5000 rows")],
)
def test_bad_content_leaves_what_was_there(server, plain, body, problem, tmp_path):
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci/t.data").write_bytes(ROWS[:5000])
    server.content["t.data"] = body
    message = refused(plain, tmp_path)
    assert problem in message
    assert plain.files[0].url in message
    assert held(tmp_path) == {"uci/t.data": ROWS[:5000]}
    server.content["t.data"] = ROWS
    fetch_source(plain, tmp_path)  # the published content replaces it
    assert held(tmp_path) == {"uci/t.data": ROWS}


@pytest.mark.parametrize("how", ["404", "breaks off", "falls silent"])
def test_servers_that_fail(server, plain, how, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PATIENCE", 0.05)
    if how == "404":
        server.content = {}
    server.cut = 20_000
    server.silence = 0.2 * (how == "falls silent")
    message = refused(plain, tmp_path)
    assert plain.page in message
    assert plain.files[0].url in message
    assert not held(tmp_path)


# ---- archives --------------------------------------------------------------------------------------------------------
PACKED = {
    "top/a.txt": b"1\n2\n",
    "top/b.txt": b"1\n2\n3\n",
    "top/set/x/1.flac": b"one",
    "top/set/y/2.flac": b"two",
    "top/set/y/list.trans.txt": b"words",
    "other.txt": b"not wanted",
}


def packed_source(server, name: str, body: bytes, checksum: str = "") -> Source:
    server.content[name] = body
    url = server.url(name)
    return source_of(
        File("s/a.txt", url, "top/a.txt", 2, archive_sha256=checksum),
        File("s/b.txt", url, "top/b.txt", 3),
        File("s/set", url, "top/set", 2),
    )


@pytest.mark.parametrize("name, pack", [("p.zip", zipped), ("p.tar.gz", tarred)])
def test_archive_gives_files_and_folders(server, name, pack, tmp_path):
    body = pack(PACKED)
    fetch_source(packed_source(server, name, body, hashlib.sha256(body).hexdigest()), tmp_path)
    assert held(tmp_path) == {
        "s/a.txt": b"1\n2\n",
        "s/b.txt": b"1\n2\n3\n",
        "s/set/x/1.flac": b"one",
        "s/set/y/2.flac": b"two",
        "s/set/y/list.trans.txt": b"words",
    }
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "body, checksum",
    [
        (b"no archive", ""),
        (tarred(PACKED)[:-60], ""),
        (tarred({"top/a.txt": b"1\n2\n"}), ""),
        (tarred(PACKED), "0" * 64),
    ],
)
def test_bad_archive_leaves_nothing_behind(server, body, checksum, tmp_path):
    assert server.url("p.tgz") in refused(packed_source(server, "p.tgz", body, checksum), tmp_path)
    assert not held(tmp_path)


@pytest.mark.parametrize(
    "target, name",
    [
        ("/etc/passwd", "link.txt"),
        ("../../../a.txt", "link.txt"),
        (None, "../../../up.txt"),
    ],
)
def test_nothing_leads_out_of_an_archive(server, target, name, tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for member in ("top/set/one", f"top/set/{name}"):
            info = tarfile.TarInfo(member)
            if target and member.endswith(name):
                info.type = tarfile.SYMTYPE
                info.linkname = target
            archive.addfile(info, io.BytesIO())
    server.content["p.tgz"] = gzip.compress(stream.getvalue())
    source = source_of(File("s/set", server.url("p.tgz"), "top/set", ending=".txt"))
    assert "download failed" in refused(source, tmp_path / "d")
    assert not held(tmp_path)


def test_gzip_is_unpacked(server, tmp_path):
    server.content["e.fasta.gz"] = gzip.compress(b">sp|A\nMKV\n", mtime=0)
    fetch_source(source_of(File("protein/e.fasta", server.url("e.fasta.gz"), "e.fasta")), tmp_path)
    assert held(tmp_path) == {"protein/e.fasta": b">sp|A\nMKV\n"}


def test_folder_of_the_user_is_left_alone(server, tmp_path):
    (tmp_path / "s/set/x").mkdir(parents=True)
    (tmp_path / "s/set/x/1.flac").write_bytes(b"mine")
    assert "move it" in refused(packed_source(server, "p.zip", zipped(PACKED)), tmp_path)
    assert held(tmp_path) == {"s/set/x/1.flac": b"mine"}
    assert not server.asked


# ---- checks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "file, body, state",
    [
        (File("a/b.txt", rows=3), None, MISSING),
        (File("a/b.txt", rows=3), b"1\r\n\n2\n3", OK),
        (File("a/b.txt", rows=3), b"1\n2\n3\n4\n", WRONG),
        (File("a/b.txt"), b"", WRONG),
        (File("a/b.txt", digest="size:4"), b"abcde", WRONG),
        (
            File("a/b.gz", digest="gunzip:" + hashlib.sha256(b"x").hexdigest()),
            gzip.compress(b"x", mtime=0),
            OK,
        ),
        (
            File("a/b.gz", digest="gunzip:" + hashlib.sha256(b"x").hexdigest()),
            gzip.compress(b"x", mtime=0)[:-3],
            WRONG,
        ),
    ],
)
def test_states(file, body, state, tmp_path):
    path = tmp_path / "b"
    if body is not None:
        path.write_bytes(body)
    assert inspect(file, path)[0] == state


def test_states_of_folders(tmp_path):
    (tmp_path / "notes.txt").write_text("no recording")
    states = [inspect(File("a/recordings", rows=2), tmp_path)[0]]
    for name in ("1.wav", "2.WAV", "3.flac"):
        (tmp_path / name).touch()
        states.append(inspect(File("a/recordings", rows=2), tmp_path)[0])
    assert states == [WRONG, SUBSET, OK, WRONG]


@pytest.mark.parametrize("same", [b"\n1, 2 ,a\r\n3,4,b", b"1 2  a\n 3\t4 b\n"])
def test_digest_of_rows_sees_the_fields_only(same, tmp_path):
    (tmp_path / "a").write_bytes(b"1,2,a\n3,4,b\n")
    (tmp_path / "b").write_bytes(same)
    actual = digest(tmp_path / "a", "rows")
    expected = digest(tmp_path / "b", "rows")
    assert actual == expected
    (tmp_path / "b").write_bytes(same.replace(b"4", b"5"))
    actual = digest(tmp_path / "a", "rows")
    assert actual != digest(tmp_path / "b", "rows")


def test_a_data_folder_that_is_missing_is_refused(tmp_path, monkeypatch):
    """Before a task asks the hub."""
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(
        DataError, match="CRT_DATA=.*nowhere: no such folder; expected one with glue"
    ):
        task_folder("glue")


# ---- the command -----------------------------------------------------------------------------------------------------
def test_list_shows_every_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci/car.data").touch()
    assert main([]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path) in out
    for source in SOURCES.values():
        assert source.page in out
    here = {line.split()[0]: line for line in out.splitlines()}
    assert "1 of 1" in here["uci/car"]
    assert "0 of 1" in here["uci/cmc"]
    assert "embedded" in here["uci/digits"]


def test_verify_names_bad_files(tmp_path, capsys):
    assert main(["verify", "--dir", str(tmp_path)]) == 0  # missing is not bad
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci/car.data").write_text("vhigh,vhigh,2,2,small,low,unacc\n")
    capsys.readouterr()
    actual = main(["verify", "uci", "--dir", str(tmp_path)])
    assert actual == 1
    out = capsys.readouterr().out
    assert re.search("^wrong content +uci/car.data: 1 of 1728 rows$", out, re.M)
    assert "glue" not in out


def test_fetch_continues_after_a_set_that_fails(server, plain, tmp_path, monkeypatch, capsys):
    sets = {
        "uci/a": source_of(File("uci/a.data"), name="uci/a"),
        "uci/t": source_of(*plain.files, name="uci/t"),
    }
    monkeypatch.setattr(command, "select", lambda _: sets.values())
    actual = main(["fetch", "uci", "--dir", str(tmp_path)])
    assert actual == 1
    err = capsys.readouterr().err
    assert "uci/a.data: no download link" in err
    assert str(tmp_path / "uci/a.data") in err
    assert held(tmp_path) == {"uci/t.data": ROWS}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["verify"], "--dir DIR"),
        (["fetch", "ucy", "--dir", "x"], "unknown data set 'ucy'; did you mean uci?"),
        (["fetch", "uci/wines", "--dir", "x"], "'uci/wines'; did you mean uci/wine?"),
        (["verify", "abalon", "--dir", "x"], "'abalon'; did you mean uci/abalone?"),
        (["fetch", "models/minilmm", "--dir", "x"], "did you mean models/minilm?"),
        (["fetch", "uci", "zzz", "--dir", "x"], "'zzz'; expected one of uci, "),
    ],
)
def test_commands_that_are_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.delenv("CRT_DATA", raising=False)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("crt_exp data: error: ")
    assert message in err
    assert not out


def test_importing_the_command_loads_no_heavy_library():
    code = "import sys, crt_exp.experiments.data.__main__; print(*{'torch', 'sklearn', 'pandas'} & set(sys.modules))"
    actual = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert actual == ""


# ---- the table -------------------------------------------------------------------------------------------------------
def test_the_table_has_every_file_that_a_recipe_names():
    named = set()
    for file in (CONF / "experiment").glob("*.yaml"):
        for path in re.findall(r"\$\{oc\.env:CRT_DATA,data\}/([\w./-]+)", file.read_text()):
            named.add(path)
    known = set()
    for source in SOURCES.values():
        for file in source.files:
            cases = [Path(file.path), *Path(file.path).parents]
            for folder in cases:
                known.add(str(folder))
    assert (
        {"pg19/train", "lm1b/test", "protein/pfam/Pfam-A.regions.uniprot.tsv.gz"} <= named <= known
    )


# ---- files, then the hub ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("answers", [False, True])
def test_the_network_is_asked_once(answers, server, monkeypatch):
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url("") if answers else "http://127.0.0.1:9")
    sources.check_network.cache_clear()
    sources.check_network()
    sources.check_network()
    assert constants.HF_HUB_OFFLINE == datasets.config.HF_HUB_OFFLINE
    assert (not answers) == datasets.config.HF_HUB_OFFLINE
    assert server.asked == ["/"] * answers


def test_files_come_first(tmp_path):
    assert not is_on_hub("auto", "ptb", tmp_path)
    assert not is_on_hub("files", "ptb", None)
    assert not is_on_hub("auto", "ptb", tmp_path / "none", tmp_path)  # a folder that the user named
    assert is_on_hub("auto", "ptb", tmp_path / "none")
    assert is_on_hub("auto", "ptb", None)
    assert is_on_hub("hub", "ptb", tmp_path)
    with pytest.raises(DataError, match="task.data_dir=x: not used by task.source=hub"):
        is_on_hub("hub", "ptb", None, "x")


def test_a_text_of_the_hub_is_kept_as_files(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.delenv("CRT_DATA", raising=False)
    asked = []

    def load(name, *configs, split, revision):
        asked.append((name, *configs, split, revision))
        return datasets.Dataset.from_dict({"sentence": ["b a", " a \n", ""]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = corpora.word_corpus("ptb", None)
    assert found.words == ("<eos>", "a", "b")
    actual = found.parts["train"].tolist()
    assert actual == [
        2,
        1,
        0,
        1,
        0,
        0,
    ]
    assert asked == [
        ("ptb-text-only/ptb_text_only", split, "refs/convert/parquet")
        for split in ("train", "validation", "test")
    ]
    actual = len([*text_folder("auto", "ptb").iterdir()])
    assert actual == 3
    assert len(asked) == 3  # read once
    text_folder("hub", "wikitext2")
    assert asked[3] == ("Salesforce/wikitext", "wikitext-2-v1", "train", None)


def small_hub(folder: Path) -> dict[str, bytes]:
    """A small BERT under the name of the default model, and a small CoLA."""
    from datasets import ClassLabel, Dataset, Features, Value

    write_model(folder / "google-bert/bert-base-uncased")
    cola = folder / "datasets/nyu-mll/glue/cola"
    cola.mkdir(parents=True)
    (cola.parent / "README.md").write_text(
        "---\nconfigs:\n- config_name: cola\n  data_dir: cola\n---\n"
    )
    features = Features(
        {"sentence": Value("string"), "label": ClassLabel(names=["unacceptable", "acceptable"])}
    )
    rows = {"sentence": [f"the cat {i}" for i in range(40)], "label": [i % 2 for i in range(40)]}
    for split in ("train", "validation", "test"):
        Dataset.from_dict(rows, features=features).to_parquet(
            cola / f"{split}-00000-of-00001.parquet"
        )
    return held(folder)


def run_glue(folder: Path, endpoint: str, *options: str) -> subprocess.CompletedProcess:
    own = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "0",
        "no_proxy": "127.0.0.1",
    }
    env = {key: value for key, value in os.environ.items() if key != "CRT_DATA"} | own
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "crt_exp",
            "task=glue",
            "task.dataset=cola",
            "attention=favorpp",
            "features.m=16",
            "task.max_length=40",
            "trainer.steps=1",
            "logger=none",
            *options,
        ],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_glue_reads_from_the_hub_and_later_from_its_cache(tmp_path):
    with running_server(HubHandler) as hub:
        hub.content = small_hub(tmp_path / "hub")
        run = run_glue(tmp_path, hub.url("").rstrip("/"), f"hydra.run.dir={tmp_path}/run")
    assert run.returncode == 0, run.stderr
    assert "40 examples" in run.stdout, run.stderr
    assert "glue/CoLA: nyu-mll/glue cola of the Hugging Face hub, 377 kB" in run.stderr
    again = run_glue(
        tmp_path, "http://127.0.0.1:9", f"hydra.run.dir={tmp_path}/again"
    )  # where nothing answers
    assert again.returncode == 0, again.stderr
    actual = again.stdout.split("[")[0]
    expected = run.stdout.split("[")[0]
    assert actual == expected, again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_without_files_and_hub_one_line_names_both_ways(local, tmp_path):
    """At once: the libraries alone try again for half a minute."""
    model = [f"task.model={write_model(tmp_path / 'bert')}"] if local else []
    run = run_glue(tmp_path, "http://127.0.0.1:9", f"hydra.run.dir={tmp_path}/run", *model)
    [line] = [line for line in run.stderr.splitlines() if "error" in line]
    assert run.returncode == 2, run.stderr
    assert "Retrying" not in run.stderr, run.stderr
    assert ("the Hugging Face hub" if local else "couldn't connect") in line
    assert not (tmp_path / "run/model").exists()
    assert ("fetch glue/CoLA --dir DIR" if local else "task.model=DIR") in line
