"""Conformer transducer: log-mel front end, Conformer encoder with any attention, LSTM predictor, joiner, RNN-T loss.

Every part honours lengths: an utterance gives the same numbers in a batch of longer ones as alone. Layers of the
encoder are torchaudio's, with the names of its parameters; only their convolution sees which frames are real.
Legend: B utterances, N samples of audio, T frames of the encoder (every 40 ms), U symbols of a transcript, D features
of a frame, J width of the joiner, V symbols of the vocabulary, the last of them blank.
Sources: Graves, 2012 (transducer); Gulati et al., 2020 (Conformer); Park et al., 2019 (SpecAugment).
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torchaudio.functional import rnnt_loss
from torchaudio.models.conformer import ConformerLayer
from torchaudio.transforms import MelSpectrogram

from crt_exp.attention.checks import outside_graphs
from crt_exp.config import ConfigError
from crt_exp.data.vocabularies import Symbols
from crt_exp.mechanism import Mechanism
from crt_exp.models.folder import check_shapes, read_kept, write_kept
from crt_exp.options import Count, NotNegative, check_options
from crt_exp.samplers.noise import as_given

WINDOW, HOP = 0.025, 0.010  # seconds
STEP = 4 * HOP              # seconds between frames of the encoder, each of which sees WINDOW + 6 HOP
FLOOR = 1e-6                # of a mel energy, so that silence has a logarithm: 60 dB below a full-scale tone
MOST = 8                    # symbols in one frame of the encoder, so that the search ends
KIND, PIECES = "conformer_transducer", "pieces.model"  # of config.json; the file of a model of sentencepiece


class ConformerSizes(TypedDict):
    """Of the model; `norm` is that of the convolution modules: see `MaskedBatchNorm` and `FrameNorm`."""

    mels: Annotated[int, Field(ge=7, le=512)]
    channels: Count        # of the subsampling convolutions
    layers: Count
    dim: Count
    ffn: Count
    heads: Count
    kernel: Count          # of the depthwise convolution, frames
    predictor: Count       # LSTM cells
    joiner: Count
    dropout: Annotated[NotNegative, Field(lt=1)]
    norm: Literal["frame", "batch"]
    ctc: NotNegative       # weight of a CTC loss of the encoder that is added in training; 0: none


PRESETS = {
    # for strings of spoken digits on 2 cores, heads of 24 dimensions. After 200 steps without batch norm, and after 550
    # without the CTC loss too, losses still stood where chance is (14 nats a string): with both they fall from there
    "small": ConformerSizes(mels=40, channels=16, layers=3, dim=96, ffn=384, heads=4, kernel=15, predictor=128,
                            joiner=128, dropout=0.0, norm="batch", ctc=1.0),
    # the encoder of Performers' and Chefs' Random Tables' speech experiments
    "paper": ConformerSizes(mels=80, channels=256, layers=17, dim=256, ffn=1024, heads=4, kernel=31, predictor=512,
                            joiner=1024, dropout=0.1, norm="batch", ctc=0.0),
}


def check_sizes(sizes: ConformerSizes) -> None:
    """Raises ConfigError for sizes that do not go together."""
    if sizes["dim"] % sizes["heads"]:
        raise ConfigError(f"task.sizes.dim={sizes['dim']}: expected a multiple of heads={sizes['heads']}")
    if sizes["kernel"] % 2 == 0:
        raise ConfigError(f"task.sizes.kernel={sizes['kernel']}: expected an odd number, around a frame")


# ---- front end -------------------------------------------------------------------------------------------------------
def frames_of(samples, rate: int):
    """Frames of the front end (a number, or a tensor of them): only those that lie within the audio."""
    return (samples - round(WINDOW * rate)) // round(HOP * rate) + 1


def subsampled(frames):
    """Frames of the encoder: two convolutions of width 3 and stride 2, without padding."""
    return ((frames - 1) // 2 - 1) // 2


def real(lengths: Tensor, most: int) -> Tensor:
    """(B,) -> (B, most), True where a frame is real."""
    return torch.arange(most, device=lengths.device) < lengths[:, None]


class LogMel(nn.Module):
    """(B, N) int16 audio -> (B, frames, mels), each mel with mean 0 and deviation 1 over an utterance's real frames.

    In the precision of its window, float32, whatever the rest computes in. A frame lies within its utterance: none is
    padded by reflection, which would differ in a batch.
    """

    def __init__(self, rate: int, mels: int):
        super().__init__()
        self.rate, window = rate, round(WINDOW * rate)
        bins = 2 ** math.ceil(math.log2(rate / 16))  # at most 16 Hz apart, for narrow filters at the low end
        self.around = ((bins - window) // 2, bins - window - (bins - window) // 2)
        with torch.device("cpu"):  # torchaudio looks at the values of its filters, and the meta device has none
            self.spectrum = MelSpectrogram(rate, bins, window, round(HOP * rate), n_mels=mels, center=False)

    def forward(self, audio: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        with as_given(audio):
            audio = audio.to(self.spectrum.spectrogram.window.dtype) / 2**15
            x, frames = torch.log(self.spectrum(F.pad(audio, self.around)) + FLOOR).mT, frames_of(samples, self.rate)
            keep, count = real(frames, x.shape[1])[:, :, None], frames[:, None, None]
            centred = (x - (x * keep).sum(1, keepdim=True) / count) * keep
            return centred / (centred.square().sum(1, keepdim=True) / count + 1e-5).sqrt(), frames


def masked(x: Tensor, bands: Tensor, spans: Tensor) -> Tensor:
    """SpecAugment: (B, frames, mels) with bands of mels and spans of frames set to their mean, 0.

    bands, spans: (B, any number, 2) first index and the one after the last, drawn by the data and not here, so that a
    row has the same ones in any batch, on any process and after any resume.
    """
    for places, dim in ((spans, 1), (bands, 2)):
        index = torch.arange(x.shape[dim], device=x.device)
        inside = ((index >= places[..., :1]) & (index < places[..., 1:])).any(1)  # (B, frames or mels)
        x = x.masked_fill(inside.unsqueeze(3 - dim), 0)
    return x


# ---- encoder ---------------------------------------------------------------------------------------------------------
class Subsampling(nn.Module):
    """(B, frames, mels) -> (B, T, D). Its convolutions are not padded, so a real frame sees real frames alone."""

    def __init__(self, mels: int, channels: int, dim: int, dropout: float):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, channels, 3, 2), nn.Conv2d(channels, channels, 3, 2)
        self.out, self.dropout = nn.Linear(channels * subsampled(mels), dim), nn.Dropout(dropout)
        for part in (self.first, self.second, self.out):  # torch's own values would leave 1% of the features' variance
            nn.init.kaiming_normal_(part.weight, nonlinearity="linear" if part is self.out else "relu")
            nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x[:, None].to(self.out.weight.dtype)))))
        return self.dropout(self.out(x.transpose(1, 2).flatten(2)))


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm whose statistics are those of the real frames, as if the utterances stood one after another.

    They are of one micro-batch on one process: results depend on how a step is split.
    """

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """x (B, D, T), keep (B, T)."""
        x = x.transpose(1, 2)
        return torch.zeros_like(x).masked_scatter(keep[..., None], super().forward(x[keep]).to(x.dtype)).transpose(1, 2)


class FrameNorm(nn.LayerNorm):
    """Normalises the channels of each frame by itself: an utterance has the same loss in any batch."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Layer(ConformerLayer):
    """torchaudio's layer, whose convolution takes padded frames for zeros, like those beyond the ends of the audio."""

    def __init__(self, sizes: ConformerSizes):
        super().__init__(sizes["dim"], sizes["ffn"], sizes["heads"], sizes["kernel"], sizes["dropout"])
        norm = {"frame": FrameNorm, "batch": MaskedBatchNorm}[sizes["norm"]]
        self.conv_module.sequential[3] = norm(sizes["dim"])
        self.self_attn.dropout = 0.0  # linear attention forms no matrix to drop from: all mechanisms then train alike

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """x (T, B, D), keep (B, T)."""
        x = x + 0.5 * self.ffn1(x)
        y = self.self_attn_layer_norm(x)
        y, _ = self.self_attn(query=y, key=y, value=y, key_padding_mask=~keep, need_weights=False)
        x = x + self.self_attn_dropout(y)
        pointwise, gate, depthwise, norm, *rest = self.conv_module.sequential
        y = gate(pointwise(self.conv_module.layer_norm(x.transpose(0, 1)).transpose(1, 2)))
        y = norm(depthwise(y * keep[:, None]), keep)  # (B, D, T)
        for part in rest:
            y = part(y)
        x = x + y.permute(2, 0, 1)
        return self.final_layer_norm(x + 0.5 * self.ffn2(x))


class Encoder(nn.Module):
    """(B, N) audio -> (B, T, D) and how many of the T frames are real, at least one."""

    def __init__(self, rate: int, sizes: ConformerSizes):
        super().__init__()
        self.features = LogMel(rate, sizes["mels"])
        self.subsampling = Subsampling(sizes["mels"], sizes["channels"], sizes["dim"], sizes["dropout"])
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["layers"]))

    def forward(self, audio: Tensor, samples: Tensor, bands: Tensor | None = None,
                spans: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, frames = self.features(audio, samples)
        x = self.subsampling(x if bands is None else masked(x, bands, spans)).transpose(0, 1)
        lengths = subsampled(frames)
        keep = real(lengths, len(x))
        for layer in self.layers:
            x = layer(x, keep)
        return x.transpose(0, 1).to(self.subsampling.out.weight.dtype), lengths  # sharded layers give float32


# ---- transducer ------------------------------------------------------------------------------------------------------
class Predictor(nn.Module):
    """(B, U) symbols -> (B, U, cells): an LSTM over what was said so far. Blank stands for the start."""

    def __init__(self, symbols: int, cells: int, dropout: float):
        super().__init__()
        self.symbol, self.dropout = nn.Embedding(symbols, cells), nn.Dropout(dropout)
        self.lstm = nn.LSTM(cells, cells, batch_first=True)

    def forward(self, symbols: Tensor, state=None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.lstm(self.dropout(self.symbol(symbols)), state)
        return self.dropout(out), state


class Joiner(nn.Module):
    """Log-odds of the next symbol from a frame and from what was said before it."""

    def __init__(self, dim: int, cells: int, width: int, symbols: int):
        super().__init__()
        self.heard, self.said, self.out = nn.Linear(dim, width), nn.Linear(cells, width), nn.Linear(width, symbols)

    def forward(self, heard: Tensor, said: Tensor) -> Tensor:
        """heard (..., J), said (..., J) -> (..., V)."""
        return self.out(torch.tanh(heard + said))


class Hypothesis(NamedTuple):
    """What was recognised: symbols, and the frame of the encoder at which each was said."""

    symbols: list[int]
    frames: list[int]


class ConformerTransducer(nn.Module):
    """See `crt_exp/tasks/librispeech.py` for the task that trains it; its attention is put in by `Mechanism.swap`."""

    def __init__(self, symbols: int, rate: int, sizes: ConformerSizes):
        """symbols: V, blank among them."""
        super().__init__()
        check_sizes(sizes)
        self.blank, self.rate = symbols - 1, rate
        self.encoder = Encoder(rate, sizes)
        self.predictor = Predictor(symbols, sizes["predictor"], sizes["dropout"])
        self.joiner = Joiner(sizes["dim"], sizes["predictor"], sizes["joiner"], symbols)
        self.weight, self.ctc = sizes["ctc"], nn.Linear(sizes["dim"], symbols) if sizes["ctc"] else None

    def forward(self, audio: Tensor, samples: Tensor, targets: Tensor | None = None,
                target_lengths: Tensor | None = None, bands: Tensor | None = None, spans: Tensor | None = None,
                search: Callable | None = None):
        """audio (B, N) int16 with samples (B,); targets (B, U) int32 with target_lengths (B,); bands, spans: `masked`.

        -> losses (B,), nats, None without targets; with a search (`greedy`) these and its hypotheses. In
        training the weighted CTC loss is added.
        """
        encoded, lengths = self.encoder(audio, samples, bands, spans)
        losses = None if targets is None else self.losses(encoded, lengths, targets, target_lengths)
        if self.training and self.ctc is not None and losses is not None:
            losses = losses + self.weight * self.ctc_losses(encoded, lengths, targets, target_lengths)
        return losses if search is None else (losses, search(self, encoded, lengths))

    def losses(self, encoded: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        """(B,): -log of the probability of each transcript, over all alignments."""
        said, _ = self.predictor(F.pad(targets, (1, 0), value=self.blank))
        heard, said = self.joiner.heard(encoded), self.joiner.said(said)
        logits = self.joiner(heard[:, :, None], said[:, None])  # (B, T, U + 1, V)
        lengths, target_lengths = lengths.int(), target_lengths.int()
        return rnnt_loss(logits.float(), targets.int(), lengths, target_lengths, self.blank, reduction="none")

    def ctc_losses(self, encoded: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        """(B,): -log of the probability of each transcript where frames speak for themselves: Graves et al., 2006.

        0 for a transcript that is too long for its frames, which the transducer's loss can tell and this one cannot.
        """
        logs = self.ctc(encoded).float().log_softmax(-1).transpose(0, 1)  # (T, B, V)
        return F.ctc_loss(logs, targets.long(), lengths, target_lengths.long(), self.blank, "none", zero_infinity=True)


# ---- recognition -----------------------------------------------------------------------------------------------------
@outside_graphs
@torch.no_grad()
def greedy(model: ConformerTransducer, encoded: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """The best symbol at each step, of all utterances at once: each has a frame of its own, blank moves it on."""
    joiner, rows = model.joiner, torch.arange(len(encoded), device=encoded.device)
    heard, state = joiner.heard(encoded), None
    said, state = model.predictor(torch.full_like(lengths, model.blank)[:, None])
    frame, here = torch.zeros_like(lengths), torch.zeros_like(lengths)
    steps = []
    while (active := frame < lengths).any():
        logits = joiner(heard[rows, frame.clamp(max=heard.shape[1] - 1)], joiner.said(said[:, 0])).float()
        logits[:, :-1].masked_fill_((here >= MOST)[:, None], -torch.inf)
        symbol = logits.argmax(-1)
        says = active & (symbol != model.blank)
        steps.append(torch.stack([torch.where(says, symbol, model.blank), frame]))
        if says.any():
            new, after = model.predictor(symbol[:, None], state)
            said = torch.where(says[:, None, None], new, said)
            state = tuple(torch.where(says[:, None], a, b) for a, b in zip(after, state))
        here = torch.where(says, here + 1, 0)
        frame = frame + (active & ~says)
    found = []
    for symbols, frames in torch.stack(steps).permute(2, 1, 0).tolist():
        said = [i for i, symbol in enumerate(symbols) if symbol != model.blank]
        found.append(Hypothesis([symbols[i] for i in said], [frames[i] for i in said]))
    return found


# ---- the folder of a run: names and plain values alone, the attention is built from names of conf/ -------------------
class Recogniser(NamedTuple):
    """All but the weights."""

    symbols: Symbols
    rate: int
    sizes: ConformerSizes
    mechanism: Mechanism

    def build(self, tensors: dict[str, Tensor] | None = None) -> nn.Module:
        """With new weights; with the tensors of a run as it was, its noise included, ready to recognise."""
        model = ConformerTransducer(len(self.symbols) + 1, self.rate, self.sizes)  # blank is one symbol more
        model = model if self.mechanism.is_exact else self.mechanism.swap(model)
        if tensors is not None:
            model.load_state_dict(tensors)
        return model if tensors is None else model.eval()


def keep(recogniser: Recogniser, tensors: dict[str, Tensor], directory: Path) -> None:
    """Writes `<directory>/model`, whole or not at all; `tensors` are the model's state. Raises OSError."""
    symbols = recogniser.symbols
    config = {"kind": KIND, "rate": recogniser.rate, "sizes": dict(recogniser.sizes),
              "attention": recogniser.mechanism.saved(), "symbols": {"kind": symbols.kind, "entries": symbols.entries}}
    write_kept(directory, config, tensors, {PIECES: symbols.pieces} if symbols.kind == "pieces" else None)


def load(run: str | Path, option: str) -> tuple[Recogniser, dict[str, Tensor]]:
    """What a run kept, and its weights. Raises DataError, naming `option`, for what is no run of a recogniser."""
    with read_kept(run, option, KIND, "task=librispeech") as (folder, config, tensors):
        kind, entries = config["symbols"]["kind"], tuple(config["symbols"]["entries"])
        symbols = Symbols.of_pieces((folder / PIECES).read_bytes()) if kind == "pieces" else Symbols(kind, entries)
        mechanism = Mechanism.of_saved(config["attention"], f"{option}={run}")
        rate, sizes = config["rate"], config["sizes"]
        check_options("sizes", ConformerSizes, sizes)
        check_shapes(lambda: ConformerTransducer(len(symbols) + 1, rate, sizes), sizes["layers"], tensors,
                     f"{option}={run}")
        return Recogniser(symbols, rate, sizes, mechanism), tensors
