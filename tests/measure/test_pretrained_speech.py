"""Whisper with other attention: who is judged, what is trained, and what is said of it."""

import pytest
from torch.testing import assert_close

from crt_exp.mechanism import Mechanism
from crt_exp.measure import pretrained_encoders as encoders
from crt_exp.measure.pretrained_speech import Dictation, Whisper, script

SIZES = {"model": "", "subset": "train", "speakers": ["1", "3"], "tested": 2, "steps": [0, 2, 4], "lr": 1e-2,
         "decoder": False}


@pytest.fixture(autouse=True)
def whisper(speaker):
    script.cache_clear()
    yield speaker
    script.cache_clear()


def rows(method, **changes):
    return [*Whisper(**SIZES | changes).rows(Mechanism.parse(method), 0)]


def swapped(method, **changes):
    task = Whisper(**SIZES | changes)
    return task.swapped(Mechanism.parse(method), 0, task.utterances()[1])


def test_what_exact_attention_writes_is_dictated_to_others():
    """Nats and agreement of its own tokens, of which exact attention finds each the likeliest."""
    (exact,), *others = ([*Dictation("", "train", 2).rows(Mechanism.parse(method), 1)]
                         for method in ("exact", "uniform", "favorpp m=8"))
    assert exact["above"] == pytest.approx(0, abs=1e-6) and all(other["above"] != 0 for other, in others)
    tokens, nats = script("", "train", encoders.utterances("train")[2].name)
    assert nats.shape == (tokens.shape[1] - 1,) and int(tokens[0, 0]) == 1 and int(tokens[0, -1]) == 2
    with pytest.raises(ValueError, match="train has 5 utterances: group 2 of 2 is not there"):
        [*Dictation("", "train", 2).rows(Mechanism.parse("exact"), 2)]


def test_each_method_is_judged_at_each_step(whisper):
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


def test_no_one_who_is_judged_is_trained_on(monkeypatch):
    read, loss = set(), Whisper.loss
    monkeypatch.setattr(Whisper, "loss", lambda self, model, each: read.add(each.name) or loss(self, model, each))
    rows("uniform")
    assert read == {"0", "2", "4"} and [each.name for each in Whisper(**SIZES).utterances()[0]] == ["1", "3"]
    for changes in ({"tested": 3}, {"speakers": ["0", "1", "2", "3", "4"]}):
        with pytest.raises(ValueError, match="train has . utterances of .* are to be judged"):
            rows("uniform", **changes)


@pytest.mark.parametrize("decoder", [False, True])
def test_the_decoder_stays_as_it_is_or_is_trained_too(decoder):
    model = swapped("favorpp m=8", decoder=decoder)
    trained = {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == ({"encoder", "decoder"} if decoder else {"encoder"})
    assert not model.get_encoder().embed_positions.weight.requires_grad


def test_attention_transfer_comes_before_fine_tuning():
    plain, transferred = (swapped("hedgehog m=8", transfer=steps) for steps in (0, 3))
    moved = {name for (name, p), q in zip(plain.named_parameters(), transferred.parameters()) if not p.equal(q)}
    assert moved and all(".swapped." in name for name in moved)
    assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in transferred.parameters()]
    with pytest.raises(ValueError, match="has nothing to learn from the exact layer"):
        rows("favorpp m=8", transfer=3)


def test_adapters_are_trained_in_the_place_of_weights(whisper):
    before = {name: p.clone() for name, p in whisper.named_parameters()}
    trained = [name for name, p in swapped("favorpp m=8", rank=2).named_parameters() if p.requires_grad]
    assert trained and all("encoder" in name and ".lora_" in name for name in trained)
    found = rows("favorpp m=8", rank=2)
    assert found[0] == rows("favorpp m=8")[0] and found[2]["above"] != found[0]["above"]
    assert_close(dict(whisper.named_parameters()), before)
