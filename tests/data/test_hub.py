"""Where a set and a model come from: files, the hub (a server on this machine), or one error with both ways."""

import os
import subprocess
import sys
import threading

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from hub_server import HubServer
from small_bert import write_model

from crt_exp.data import DataError, corpora, sources
from crt_exp.data.sources import is_on_hub, text_folder

FEATURES = Features({"sentence": Value("string"), "label": ClassLabel(names=["unacceptable", "acceptable"])})
CARD = "---\nconfigs:\n- config_name: cola\n  data_files:\n" + "".join(
    f"  - split: {split}\n    path: cola/{split}-*\n" for split in ("train", "validation", "test")) + "---\n"


@pytest.fixture
def answering(tmp_path):
    """A hub with a small BERT under the name of the default model, and a small CoLA."""
    write_model(tmp_path / "hub/google-bert/bert-base-uncased")
    folder = tmp_path / "hub/datasets/nyu-mll/glue/cola"
    folder.mkdir(parents=True)
    (folder.parent / "README.md").write_text(CARD)
    rows = {"sentence": [f"the cat {i}" for i in range(40)], "label": [i % 2 for i in range(40)]}
    for split in ("train", "validation", "test"):
        Dataset.from_dict(rows, features=FEATURES).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    with HubServer(tmp_path / "hub") as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def glue(tmp_path, endpoint: str, *options: str) -> subprocess.CompletedProcess:
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "no_proxy": "127.0.0.1"}
    env = {key: value for key, value in os.environ.items() if key != "CRT_DATA"} | own
    return subprocess.run([sys.executable, "-m", "crt_exp", "task=glue", "task.dataset=cola", "attention=favorpp",
                           "features.m=16", "task.max_length=40", "trainer.steps=1",
                           "logger=none", f"hydra.run.dir={tmp_path}/run", *options],
                          env=env, cwd=tmp_path, capture_output=True, text=True)


@pytest.mark.slow
def test_glue_needs_nothing_but_the_hub_and_later_nothing(answering, tmp_path):
    run = glue(tmp_path, answering.url)
    assert run.returncode == 0 and "40 examples" in run.stdout, run.stderr
    assert "glue/CoLA: nyu-mll/glue cola of the Hugging Face hub, 377 kB" in run.stderr
    again = glue(tmp_path, "http://127.0.0.1:9", f"hydra.run.dir={tmp_path}/again")   # where nothing answers
    assert again.returncode == 0 and again.stdout.split("[")[0] == run.stdout.split("[")[0], again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_without_files_and_hub_one_line_names_both_ways(local, tmp_path):
    """At once: the libraries alone try again for half a minute."""
    model = [f"task.model={write_model(tmp_path / 'bert')}"] if local else []
    run = glue(tmp_path, "http://127.0.0.1:9", *model)
    [line] = [line for line in run.stderr.splitlines() if "error" in line]
    assert run.returncode == 2 and "Retrying" not in run.stderr, run.stderr
    assert ("the Hugging Face hub" if local else "couldn't connect") in line and not (tmp_path / "run/model").exists()
    assert ("fetch glue/CoLA --dir DIR" if local else "task.model=DIR") in line


@pytest.mark.parametrize("answers", [False, True])
def test_the_network_is_asked_once(answers, answering, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", answering.url if answers else "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    sources.check_network.cache_clear()
    sources.check_network()
    sources.check_network()
    assert constants.HF_HUB_OFFLINE == datasets.config.HF_HUB_OFFLINE == (not answers)
    assert answering.asked == ["/"] * answers


def test_files_come_first(tmp_path):
    assert not is_on_hub("auto", "ptb", tmp_path) and not is_on_hub("files", "ptb", None)
    assert not is_on_hub("auto", "ptb", tmp_path / "none", tmp_path)     # a folder that the user named
    assert is_on_hub("auto", "ptb", tmp_path / "none") and is_on_hub("auto", "ptb", None)
    assert is_on_hub("hub", "ptb", tmp_path)
    with pytest.raises(DataError, match="task.data_dir=x: not used by task.source=hub"):
        is_on_hub("hub", "ptb", None, "x")


def test_a_text_of_the_hub_is_kept_as_files(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.delenv("CRT_DATA", raising=False)
    asked = []

    def load(name, *configs, split, revision):
        asked.append((name, *configs, split, revision))
        return Dataset.from_dict({"sentence": ["b a", " a \n", ""]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = corpora.word_corpus("ptb", None, None)
    assert found.words == ("<eos>", "a", "b") and found.parts["train"].tolist() == [2, 1, 0, 1, 0, 0]
    assert asked == [("ptb-text-only/ptb_text_only", split, "refs/convert/parquet")
                     for split in ("train", "validation", "test")]
    assert sorted(path.name for path in text_folder("auto", "ptb").iterdir()) == [
        "ptb.test.txt", "ptb.train.txt", "ptb.valid.txt"] and len(asked) == 3
    text_folder("hub", "wikitext2")
    assert asked[3] == ("Salesforce/wikitext", "wikitext-2-v1", "train", None)
