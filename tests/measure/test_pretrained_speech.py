"""A recogniser that is trained on after a swap: who is judged, what is trained, and what is said of it."""

import pytest
from torch.testing import assert_close

from crt_exp.mechanism import Mechanism
from crt_exp.measure import pretrained_encoders as encoders
from crt_exp.measure.pretrained_speech import Trained

SIZES = {"model": "", "subset": "train", "speakers": ["1", "3"], "tested": 2, "steps": [0, 2, 4], "lr": 1e-2,
         "decoder": False}


@pytest.fixture(autouse=True)
def whisper(speaker):
    encoders.script.cache_clear()
    yield speaker
    encoders.script.cache_clear()


def rows(arm, **changes):
    return [*Trained(**SIZES | changes).records(Mechanism.parse(arm), 0)]


def test_an_arm_is_judged_at_each_place(whisper):
    """Exact attention is where it was before it is trained, other attention is not; training changes both, and the
    model that all arms start from stays."""
    before = {name: p.clone() for name, p in whisper.named_parameters()}
    exact, other = rows("exact"), rows("favorpp m=8")
    assert [row["steps"] for row in exact] == [0, 2, 4] and all(len(row[key]) == 2 for row in [*exact, *other]
                                                                for key in ("above", "agrees", "wer"))
    assert exact[0]["above"] == pytest.approx([0, 0], abs=1e-6) and other[0]["above"] != pytest.approx([0, 0])
    assert exact[0]["above"] != exact[2]["above"] and other[0]["above"] != other[2]["above"]
    assert other == rows("favorpp m=8")
    assert_close(dict(whisper.named_parameters()), before)


def test_no_one_who_is_judged_is_trained_on(monkeypatch):
    read, loss = set(), Trained.loss
    monkeypatch.setattr(Trained, "loss", lambda self, model, each: read.add(each.name) or loss(self, model, each))
    rows("uniform")
    assert read == {"0", "2", "4"} and [each.name for each in Trained(**SIZES).judged] == ["1", "3"]
    for changes in ({"tested": 3}, {"speakers": ["0", "1", "2", "3", "4"]}):
        with pytest.raises(ValueError, match="train has . utterances of .* are to be judged"):
            Trained(**SIZES | changes)


@pytest.mark.parametrize("decoder", [False, True])
def test_the_decoder_stays_as_it_is_or_is_trained_too(decoder):
    model = Trained(**SIZES | {"decoder": decoder}).swapped(Mechanism.parse("favorpp m=8"), 0)
    trained = {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == ({"encoder", "decoder"} if decoder else {"encoder"})
    assert not model.get_encoder().embed_positions.weight.requires_grad


def test_attention_is_taught_before_it_is_trained_on():
    plain, taught = (Trained(**SIZES | {"transfer": steps}).swapped(Mechanism.parse("hedgehog m=8"), 0)
                     for steps in (0, 3))
    moved = {name for (name, p), q in zip(plain.named_parameters(), taught.parameters()) if not p.equal(q)}
    assert moved and all(".swapped." in name for name in moved)
    assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in taught.parameters()]
    with pytest.raises(ValueError, match="has nothing to learn from the exact layer"):
        rows("favorpp m=8", transfer=3)


def test_adapters_are_trained_in_the_place_of_weights(whisper):
    before = {name: p.clone() for name, p in whisper.named_parameters()}
    model = Trained(**SIZES | {"rank": 2}).swapped(Mechanism.parse("favorpp m=8"), 0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("encoder" in name and ".lora_" in name for name in trained)
    found = rows("favorpp m=8", rank=2)
    assert found[0] == rows("favorpp m=8")[0] and found[2]["above"] != found[0]["above"]
    assert_close(dict(whisper.named_parameters()), before)
