"""A run that does not read the data that its task is named for prints so in its first line and in its summary."""

import re
from collections import defaultdict

import pytest
from small_images import write_images
from small_speech import write_digits
from test_protein_data import sequences, write

from crt_exp.data.sources import select
from crt_exp.runner import fit


@pytest.fixture
def printed(typed, tmp_path, monkeypatch):
    """The lines of a run that is not trained."""
    def run(*args):
        monkeypatch.setattr(fit, "run_training", lambda *_: [defaultdict(float, split="test")])
        code, out, err = typed(*args, "logger=none", "trainer.steps=0")
        assert code == 0, err
        return out.splitlines()
    return run


@pytest.mark.parametrize("task", ["ptb", "imagenet", "mae", "pixels", "trembl", "books", "librispeech"])
def test_stand_ins_are_named_first_and_last(task, printed, tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text("a bird sings , and a bird flies .\n" * 200)
    options = {"books": [f"task.data_dir={tmp_path}"],
               "librispeech": ["task.corpus=fsdd", f"task.data_dir={write_digits(tmp_path / 'digits')}"]}
    first, last = printed(f"task={task}", *options.get(task, []))
    found = re.fullmatch(r"no .+ here: .+ \(task\.\S+=\S+ after `python -m crt_exp\.data fetch (\S+)`\)", first)
    assert select(found[1]) and f"; {first}  [" in last


@pytest.mark.parametrize("task", ["imagenet", "pixels", "trembl task.dataset=uniprot task.cache_dir=null"])
def test_data_of_the_name_are_not(task, printed, tmp_path, caplog):
    write_images(tmp_path / "data", train=20, size=32)
    write(tmp_path / "data/a.fasta", [*sequences(100, longest=90)] * 2)
    line, = printed(*f"task={task} task.data_dir={tmp_path / 'data'}".split())
    assert "here:" not in line
    assert "trembl" not in task or "skipped 100 of 200 sequences" in caplog.text
