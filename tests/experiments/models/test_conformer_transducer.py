"""The Conformer transducer: lengths honoured in every part, losses and searches by their definitions."""

import itertools

import pytest
import torch
from helpers.seeds import seeded
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torchaudio.models.conformer import ConformerLayer

from crt_exp.experiments.data.plan import length_mask
from crt_exp.experiments.models.conformer_transducer import (
    HOP,
    PRESETS,
    STEP,
    WINDOW,
    ConformerTransducer,
    FrameNorm,
    LogMel,
    MaskedBatchNorm,
    apply_spec_augment,
    frames_of,
    greedy,
    subsampled_length,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError

RATE = 8000
SMALL = PRESETS["small"] | {
    "mels": 16,
    "channels": 4,
    "layers": 2,
    "dim": 16,
    "ffn": 32,
    "heads": 2,
    "kernel": 7,
    "predictor": 12,
    "joiner": 12,
    "dropout": 0.0,
    "norm": "frame",
    "ctc": 0.5,
}
SAMPLES = torch.tensor([9000, 6100, 2400])
LENGTHS = torch.tensor([5, 4, 1], dtype=torch.int32)


@pytest.fixture(autouse=True)
def quiet(one_thread):
    pass


def encoder_frames(samples, rate):
    return subsampled_length(frames_of(samples, rate))


def model_of(attention="exact", symbols=6, **sizes):
    torch.manual_seed(0)
    model = ConformerTransducer(symbols, RATE, SMALL | sizes)
    if attention == "exact":
        return model
    return Mechanism.of(attention, **({"m": 16} if attention.startswith("favor") else {})).swap(
        model
    )


def batch_of(samples=SAMPLES, lengths=LENGTHS, symbols=5):
    """Loud noise everywhere, the padding too: nothing may depend on it."""
    g = seeded(1)
    audio = (torch.randn(len(samples), int(samples.max()), generator=g) * 5000).short()
    return {
        "audio": audio,
        "samples": samples,
        "target_lengths": lengths,
        "targets": torch.randint(
            symbols, (len(samples), int(lengths.max())), generator=g, dtype=torch.int32
        ),
    }


def alone(batch, i):
    """Utterance i without any padding."""
    one = {name: part[i : i + 1] for name, part in batch.items()}
    return one | {
        "audio": one["audio"][:, : one["samples"][0]],
        "targets": one["targets"][:, : one["target_lengths"][0]],
    }


# ---- a batch gives what each utterance alone gives ---------------------------------------------------------


@pytest.mark.parametrize(
    "attention, norm",
    [
        ("exact", "batch"),
        ("favorpp", "frame"),
        ("favor", "batch"),
    ],
)
def test_a_batch_recognises_what_each_utterance_alone_gives(attention, norm):
    model = model_of(attention, norm=norm).eval().double()
    batch = batch_of()  # trig features lose digits of float32
    losses, found = model(**batch, search=greedy)
    encoded, lengths = model.encoder(batch["audio"], batch["samples"])
    for i in range(len(losses)):
        one, (own,) = model(**alone(batch, i), search=greedy)
        assert_close(losses[i], one[0], rtol=2e-5, atol=0)
        assert found[i].symbols == own.symbols
        assert found[i].frames == own.frames
        single = model.encoder(
            batch["audio"][i : i + 1, : batch["samples"][i]], batch["samples"][i : i + 1]
        )[0]
        actual = encoded[i, : lengths[i]]
        assert_close(actual, single[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("attention", ["favorpp"])
def test_training_gives_an_utterance_the_same_loss_and_gradient_in_any_batch(attention):
    model = model_of(attention).train()
    batch = batch_of()
    model(**batch).sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    losses = [model(**alone(batch, i)) for i in range(3)]
    torch.cat(losses).sum().backward()
    actual = model(**batch)
    expected = torch.cat(losses)
    assert_close(actual, expected, rtol=2e-5, atol=0)
    largest = max(grad.abs().max() for grad in together.values())
    for name, p in model.named_parameters():
        assert_close(together[name], p.grad, rtol=1e-3, atol=float(largest) * 1e-5, msg=name)


def test_batch_norm_counts_real_frames_alone():
    """In training: the statistics, running ones too, of the real frames one after another."""
    norm = MaskedBatchNorm(4)
    plain = nn.BatchNorm1d(4)
    x = torch.randn(3, 4, 7) * 3 + 1
    lengths = torch.tensor([7, 4, 2])
    keep = length_mask(lengths, 7)
    joined = torch.cat([row[:, :n] for row, n in zip(x, lengths)], 1)[None]  # (1, 4, 13)
    found = norm(x, keep)
    expected = plain(joined)[0]
    actual = torch.cat([row[:, :n] for row, n in zip(found, lengths)], 1)
    assert_close(actual, expected)
    assert_close(norm.running_var, plain.running_var)
    assert_close(norm.running_mean, plain.running_mean)


def test_layer_is_torchaudios_where_nothing_is_padded():
    ours = model_of(norm="batch").encoder.layers[0].eval()
    theirs = ConformerLayer(16, 32, 2, 7).eval()
    assert isinstance(model_of().encoder.layers[0].conv_module.sequential[3], FrameNorm)
    theirs.load_state_dict(ours.state_dict())  # the names are those of torchaudio
    x = torch.randn(9, 2, 16)
    actual = ours(x, torch.ones(2, 9, dtype=torch.bool))
    expected = theirs(x, None)
    assert_close(actual, expected)


# ---- front end ---------------------------------------------------------------------------------------------


def test_the_shortest_audio_with_a_frame(rate=16000):
    samples = round((WINDOW + 6 * HOP) * rate)
    assert encoder_frames(samples, rate) == 1
    assert encoder_frames(samples - 1, rate) == 0
    step = round(STEP * rate)
    assert encoder_frames(samples + 10 * step, rate) == 11


def test_features_are_normalised_over_the_real_frames():
    features = LogMel(RATE, 16)
    x, frames = features(batch_of()["audio"], SAMPLES)
    for row, n in zip(x, frames):
        actual = row[:n].mean(0)
        expected = torch.zeros(16)
        assert_close(actual, expected, atol=1e-5, rtol=0)
        actual = row[:n].std(0, correction=0)
        expected = torch.ones(16)
        assert_close(actual, expected, atol=1e-3, rtol=0)
        assert (row[n:] == 0).all()
    assert (
        features(torch.zeros(1, 4000, dtype=torch.int16), torch.tensor([4000]))[0].isfinite().all()
    )  # silence


def test_masks_set_their_bands_and_spans_to_the_mean():
    x = torch.ones(2, 6, 5)
    bands = torch.tensor([[[1, 3]], [[0, 0]]])
    spans = torch.tensor([[[0, 0]], [[4, 6]]])
    actual = apply_spec_augment(x, bands, spans)
    assert (actual[0, :, 1:3] == 0).all()
    assert actual[0].sum() == 18
    assert (actual[1, 4:] == 0).all()
    assert actual[1].sum() == 20


# ---- losses and searches by their definitions --------------------------------------------------------------


@torch.no_grad()
def log_probability(model, encoded, symbols):
    """log of the sum over all alignments of a transcript with the frames, by Graves' forward recursion."""
    said = model.joiner.said(model.predictor(torch.tensor([[model.blank, *symbols]]))[0])[0]
    logs = model.joiner(model.joiner.heard(encoded)[:, None], said[None]).log_softmax(
        -1
    )  # (T, U + 1, V)
    T = len(encoded)
    U = len(symbols)
    alpha = {}
    for t, u in itertools.product(range(T), range(U + 1)):
        ways = []
        if t > 0:
            ways.append(alpha[t - 1, u] + logs[t - 1, u, model.blank])
        if u > 0:
            ways.append(alpha[t, u - 1] + logs[t, u - 1, symbols[u - 1]])
        alpha[t, u] = torch.stack(ways).logsumexp(0) if ways else torch.tensor(0.0)
    return float(alpha[T - 1, U] + logs[T - 1, U, model.blank])


def test_loss_is_the_sum_over_alignments():
    model = model_of().eval()
    batch = batch_of()
    with torch.no_grad():
        losses = model(**batch)
        encoded, lengths = model.encoder(batch["audio"], batch["samples"])
        for i in range(3):
            symbols = batch["targets"][i, : batch["target_lengths"][i]].tolist()
            expected = log_probability(model, encoded[i, : lengths[i]], symbols)
            assert float(losses[i]) == pytest.approx(-expected, rel=1e-5)


def test_ctc_of_the_encoder_is_added_in_training_alone():
    model = model_of()
    batch = batch_of()
    plain = model_of(ctc=0.0)
    plain.load_state_dict(
        {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("ctc.")}
    )
    with torch.no_grad():
        encoded, lengths = model.encoder(batch["audio"], batch["samples"])
        transducer = plain.train()(**batch)
        logs = model.ctc(encoded).log_softmax(-1)
        own = []
        for i, (n, u) in enumerate(zip(lengths, LENGTHS)):
            own.append(
                F.ctc_loss(
                    logs[i, :n], batch["targets"][i, :u].long(), n, u.long(), model.blank, "sum"
                )
            )
        actual = model.train()(**batch)
        expected = transducer + 0.5 * torch.stack(own)
        assert_close(actual, expected)
        actual = model.eval()(**batch)
        assert_close(actual, transducer)


def test_a_transcript_with_more_symbols_than_frames_has_a_loss_and_a_gradient():
    model = model_of()
    batch = batch_of(torch.tensor([1000]), torch.tensor([20], dtype=torch.int32))
    loss = model(**batch)
    loss.sum().backward()
    assert encoder_frames(1000, RATE) < 20
    assert loss.isfinite().all()
    assert loss > 0
    for p in model.parameters():
        assert p.grad is None or p.grad.isfinite().all()


def quieter(model):
    """Blank and symbols about equally likely, as after training: untrained, a model may say the most in each frame."""
    with torch.no_grad():
        model.joiner.out.bias[-1] += 1.5
        model.joiner.out.weight.mul_(6)
    return model


def test_greedy_search_takes_the_best_symbol_at_each_step():
    model = quieter(model_of()).eval()
    batch = batch_of()
    with torch.no_grad():
        _, actual = model(batch["audio"], batch["samples"], search=greedy)
        encoded, lengths = model.encoder(batch["audio"], batch["samples"])
        for i, hypothesis in enumerate(actual):
            symbols = []
            frames = []
            t = 0
            here = 0
            while t < lengths[i]:
                said = model.predictor(torch.tensor([[model.blank, *symbols]]))[0][0, -1]
                logits = model.joiner(model.joiner.heard(encoded[i, t]), model.joiner.said(said))
                best = int(logits.argmax())
                if best == model.blank or here == 8:
                    t = t + 1
                    here = 0
                else:
                    symbols = [*symbols, best]
                    frames = [*frames, t]
                    here = here + 1
            assert hypothesis.symbols == symbols
            assert hypothesis.frames == frames
            assert symbols


def test_an_untrained_model_comes_to_an_end():
    model = model_of().eval()
    with torch.no_grad():
        model.joiner.out.bias[0] = 100.0  # always says something
    _, (actual,) = model(**alone(batch_of(), 2), search=greedy)
    assert set(actual.symbols) == {0}
    assert len(actual.symbols) == 8 * encoder_frames(2400, RATE)


# ---- sizes, attention, precision ---------------------------------------------------------------------------


def test_sizes_that_do_not_go_together():
    with pytest.raises(ConfigError, match="dim=30: expected a multiple of heads=4"):
        model_of(dim=30, heads=4)
