"""What a swap loses and light training brings back, of language models and Whisper: rows, methods that are exact where
nothing is lost, seeds, and who is evaluated."""

import pytest
import torch
from torch.testing import assert_close

from crt_exp.experiments.measure.adapt import AdaptPretrained, training_rows
from crt_exp.experiments.measure.whisper import Whisper
from crt_exp.mechanism import Mechanism

LANGUAGE = {
    "model": "",
    "texts": ["new", "repeated"],
    "length": 64,
    "tested": 2,
    "captured": 2,
    "transfer": 3,
    "steps": [0, 3, 4, 5],
    "lora_lr": 1e-2,
    "rank": 2,
}
STEPS = []
for steps in (0, 3, 4, 5):
    STEPS += [("new", steps), ("repeated", steps)]


def above(method, seed=0):
    actual = [
        row
        for row in AdaptPretrained(**LANGUAGE).rows(Mechanism.parse(method), seed)
        if "text" in row
    ]
    for row in actual:
        assert len(row["above"]) == 2
    return {(row["text"], row["step"]): row["above"] for row in actual}


def test_a_language_model_at_each_step(reader):
    """Exact attention loses nothing before it is trained, and what has nothing to learn stays as it is till then; the
    model that all methods start from stays as well. A repetition is the same, another seed is not."""
    before = {name: p.clone() for name, p in reader.named_parameters()}
    exact, window, hedgehog = map(above, ("exact", "window block=8 first=2", "hedgehog m=4"))
    assert [*exact] == [*window] == [*hedgehog] == STEPS
    assert exact["new", 0] == exact["repeated", 3] == [0, 0]
    assert exact["new", 5] != exact["new", 4] != [0, 0]
    assert above("hedgehog m=4") == hedgehog != above("hedgehog m=4", 1)
    assert window["new", 3] == window["new", 0] != window["new", 5]
    assert hedgehog["new", 3] != hedgehog["new", 0]
    for name, p in reader.named_parameters():
        assert torch.equal(p, before[name])
        assert p.requires_grad


def test_rows_are_of_the_seed(reader):
    rows = training_rows("", 64, 0, 20)
    others = training_rows("", 64, 1, 20)
    actual = len({*map(tuple, rows.tolist())})
    assert actual == 20
    assert not torch.equal(rows, others)
    with pytest.raises(
        ValueError, match="438 rows of 64 tokens: the training text of WikiText-2 has only 437"
    ):
        training_rows("", 64, 0, 438)


# ---- Whisper


SPEECH = {
    "model": "",
    "subset": "train",
    "speakers": ["1", "3"],
    "tested": 2,
    "steps": [0, 2, 4],
    "lr": 1e-2,
}


def spoken(method, **changes):
    return [*Whisper(**SPEECH | changes).rows(Mechanism.parse(method), 0)]


def test_each_method_is_evaluated_after_each_step(speaker):
    """Exact attention is where it was before it is trained, other attention is not; training changes both, and the
    model that all start from stays."""
    before = {name: p.clone() for name, p in speaker.named_parameters()}
    exact = spoken("exact")
    other = spoken("favorpp m=8")
    assert [row["steps"] for row in exact] == [0, 2, 4]
    for row in [*exact, *other]:
        for key in ("above", "agrees", "wer"):
            assert len(row[key]) == 2
    assert exact[0]["above"] == pytest.approx([0, 0], abs=1e-6)
    assert other[0]["above"] != pytest.approx([0, 0])
    assert exact[0]["above"] != exact[2]["above"]
    assert other[0]["above"] != other[2]["above"]
    assert other == spoken("favorpp m=8")
    assert_close(dict(speaker.named_parameters()), before)


def test_speakers_for_evaluation_are_not_trained_on(monkeypatch, speaker):
    read = set()
    loss = Whisper.loss

    def recorded(self, student, utterance):
        read.add(utterance.name)
        return loss(self, student, utterance)

    monkeypatch.setattr(Whisper, "loss", recorded)
    spoken("uniform")
    assert read == {"0", "2", "4"}
    actual = [each.name for each in Whisper(**SPEECH).split_utterances()[0]]
    assert actual == ["1", "3"]
    for changes in ({"tested": 3}, {"speakers": ["0", "1", "2", "3", "4"]}):
        with pytest.raises(ValueError, match="task.tested=.*: expected at most"):
            spoken("uniform", **changes)


def test_only_the_encoder_is_trained(speaker):
    task = Whisper(**SPEECH)
    utterance = task.split_utterances()[1][-1]
    model = task.student(Mechanism.parse("favorpp m=8"), utterance).model
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    for name in trained:
        assert name.startswith("model.encoder.")
    assert not model.get_encoder().embed_positions.weight.requires_grad
