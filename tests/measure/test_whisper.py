"""Whisper with other attention: who is evaluated and what is trained."""

import pytest
from torch.testing import assert_close

from crt_exp.measure.whisper import Dictation, Whisper, exact_transcript
from crt_exp.mechanism import Mechanism

SIZES = {"model": "", "subset": "train", "speakers": ["1", "3"], "tested": 2, "steps": [0, 2, 4], "lr": 1e-2}


@pytest.fixture(autouse=True)
def whisper(speaker):
    exact_transcript.cache_clear()
    yield speaker
    exact_transcript.cache_clear()


def rows(method, **changes):
    return [*Whisper(**SIZES | changes).rows(Mechanism.parse(method), 0)]


def test_dictation_is_the_transcript_of_exact_attention():
    """Nats and agreement of its own tokens, of which exact attention finds each the likeliest."""
    (exact,), *others = ([*Dictation("", "train", 2, 1).rows(Mechanism.parse(method), 1)]
                         for method in ("exact", "uniform", "favorpp m=8"))
    assert exact["above"] == pytest.approx(0, abs=1e-6) and all(other["above"] != 0 for other, in others)
    tokens, nats = exact_transcript("", "train", "2")
    assert nats.shape == (tokens.shape[1] - 1,) and int(tokens[0, 0]) == 1 and int(tokens[0, -1]) == 2
    with pytest.raises(ValueError, match="seed=2: expected a group of task.count=2"):
        [*Dictation("", "train", 2, 1).rows(Mechanism.parse("exact"), 2)]


def test_each_method_is_evaluated_after_each_step(whisper):
    """Exact attention is where it was before it is trained, other attention is not; training changes both, and the
    model that all start from stays."""
    before = {name: p.clone() for name, p in whisper.named_parameters()}
    exact, other = rows("exact"), rows("favorpp m=8")
    assert [row["steps"] for row in exact] == [0, 2, 4] and all(len(row[key]) == 2 for row in [*exact, *other]
                                                               for key in ("above", "agrees", "wer"))
    assert exact[0]["above"] == pytest.approx([0, 0], abs=1e-6) and other[0]["above"] != pytest.approx([0, 0])
    assert exact[0]["above"] != exact[2]["above"] and other[0]["above"] != other[2]["above"]
    assert other == rows("favorpp m=8")
    assert_close(dict(whisper.named_parameters()), before)


def test_speakers_for_evaluation_are_not_trained_on(monkeypatch):
    read, loss = set(), Whisper.loss
    monkeypatch.setattr(Whisper, "loss", lambda self, model, each: read.add(each.name) or loss(self, model, each))
    rows("uniform")
    assert read == {"0", "2", "4"} and [each.name for each in Whisper(**SIZES).utterances()[0]] == ["1", "3"]
    for changes in ({"tested": 3}, {"speakers": ["0", "1", "2", "3", "4"]}):
        with pytest.raises(ValueError, match="task.tested=.*: expected at most"):
            rows("uniform", **changes)


def test_only_the_encoder_is_trained(whisper):
    task = Whisper(**SIZES)
    model = task.swapped(Mechanism.parse("favorpp m=8"), 0, task.utterances()[1][-1])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(name.startswith("model.encoder.") for name in trained)
    assert not model.get_encoder().embed_positions.weight.requires_grad
