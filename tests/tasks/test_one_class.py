"""Examples of a single class: any model is right about them, so a task that tells classes apart refuses them."""

from functools import partial

import pytest
from refusals import check_refused
from small_bert import write_glue, write_model
from small_images import write_images


def of_images(folder, task):
    write_images(folder / "images", classes=1, size=32, train=40)
    own = ["task.dataset=image"] if task == "lra" else []
    return [f"task={task}", f"task.data_dir={folder / 'images'}", *own]


def of_pairs(folder):
    for name in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{name}.tsv").write_text("0.0\ta\tb\tone\ttwo\n" * 6)
    return ["task=lra", "task.dataset=retrieval", f"task.data_dir={folder}"]


def of_sentences(folder):
    write_glue(folder / "glue", "sst2")
    file = folder / "glue" / "train.tsv"
    head, *rows = file.read_text().splitlines()
    file.write_text("\n".join([head, *(row for row in rows if row.endswith("\t0"))]) + "\n")
    write_model(folder / "bert")
    return ["task=glue", "task.dataset=sst2", f"task.data_dir={folder / 'glue'}", f"task.model={folder / 'bert'}",
            "task.max_length=40"]


def of_table(folder):
    (folder / "t.csv").write_text("x,y\n" + "".join(f"{i % 7},a\n" for i in range(30)))
    return ["task=uci", f"task.csv={folder / 't.csv'}", "task.target=y"]


@pytest.mark.parametrize("given, words", [
    (partial(of_images, task="imagenet"), ["/images: one class only (class0)"]),
    (partial(of_images, task="lra"), ["task.dataset=image", "one class only (0)"]),
    (of_pairs, ["task.dataset=retrieval", "one class only (0)"]),
    (of_sentences, ["task.dataset=sst2", "one class only (0)"]),
    (of_table, ["task.csv=", "/t.csv: column y", "expected at least 2 classes"]),
], ids=["imagenet", "lra image", "lra retrieval", "glue", "uci"])
def test_one_class_is_refused_before_training(given, words, typed, tmp_path):
    found = typed(*given(tmp_path), "attention=exact", "logger=none", f"hydra.run.dir={tmp_path / 'run'}")
    check_refused(found, words, tmp_path / "run")
