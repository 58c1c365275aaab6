"""Conformer transducer for speech recognition, with any attention.

Log-mel features, Conformer encoder, LSTM predictor, joiner and RNN-T loss. Outputs do not depend on padding: an
utterance gives the same numbers in a batch of longer ones as alone. Batch norm in training is the exception. The
encoder layers are torchaudio's, with the same parameter names; their convolution also takes the padding mask.

Notation: B utterances, N audio samples, T encoder frames (every 40 ms), U symbols of a transcript, D encoder width, J
joiner width, V vocabulary size, whose last symbol is blank.

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
from crt_exp.experiments.data.plan import length_mask
from crt_exp.experiments.data.vocabularies import Symbols
from crt_exp.experiments.models.folder import (
    TRANSDUCER,
    Tensors,
    check_shapes,
    open_folder,
    save_folder,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError, read_yaml
from crt_exp.samplers.noise import no_autocast
from crt_exp.validation import Count, NotNegative, check_options

# seconds
WINDOW = 0.025
HOP = 0.010
# seconds between encoder frames; the receptive field of a frame is WINDOW + 6 HOP before the Conformer
STEP = 4 * HOP
# added to mel energies, so that silence has a logarithm: 60 dB below a full-scale tone
FLOOR = 1e-6
MOST = 8  # maximum number of symbols in one encoder frame, so that the search ends
PIECES = "pieces.model"  # file of a sentencepiece model


class ConformerSizes(TypedDict):
    """Sizes of the model.

    `norm` is the norm of the convolution modules: `MaskedBatchNorm` or `FrameNorm`.
    """

    mels: Annotated[int, Field(ge=7, le=512)]
    channels: Count  # of the subsampling convolutions
    layers: Count
    dim: Count
    ffn: Count
    heads: Count
    kernel: Count  # of the depthwise convolution, in frames
    predictor: Count  # LSTM cells
    joiner: Count
    dropout: Annotated[NotNegative, Field(lt=1)]
    norm: Literal["frame", "batch"]
    ctc: NotNegative  # weight of an additional CTC loss of the encoder in training; 0: none


PRESETS = read_yaml(Path(__file__).with_suffix(".yaml"))


def check_sizes(sizes: ConformerSizes) -> None:
    """Raise ConfigError for inconsistent sizes."""
    if sizes["dim"] % sizes["heads"]:
        raise ConfigError(
            f"task.sizes.dim={sizes['dim']}: expected a multiple of heads={sizes['heads']}"
        )
    if sizes["kernel"] % 2 == 0:
        raise ConfigError(f"task.sizes.kernel={sizes['kernel']}: expected an odd number")


# ---- front end -------------------------------------------------------------------------------------------------------
def frames_of(samples, rate: int):
    """Number of feature frames within the audio, for an int or a tensor."""
    return (samples - round(WINDOW * rate)) // round(HOP * rate) + 1


def subsampled_length(frames):
    """Number of encoder frames: two unpadded convolutions of width 3, stride 2."""
    return ((frames - 1) // 2 - 1) // 2


class LogMel(nn.Module):
    """Log-mel features: (B, N) int16 audio -> (B, frames, mels).

    Each mel has mean 0 and standard deviation 1 over the real frames of an utterance. The computation is in float32,
    the precision of the window. Frames lie within the utterance, because padding by reflection would depend on the
    batch.
    """

    def __init__(self, rate: int, mels: int):
        super().__init__()
        self.rate = rate
        window = round(WINDOW * rate)
        # at most 16 Hz apart, which the narrow low-frequency filters need
        bins = 2 ** math.ceil(math.log2(rate / 16))
        self.around = ((bins - window) // 2, bins - window - (bins - window) // 2)
        with torch.device("cpu"):  # torchaudio reads filter values, which the meta device lacks
            self.spectrum = MelSpectrogram(
                rate, bins, window, round(HOP * rate), n_mels=mels, center=False
            )

    def forward(self, audio: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        with no_autocast(audio):
            audio = audio.to(self.spectrum.spectrogram.window.dtype) / 2**15
            x = torch.log(self.spectrum(F.pad(audio, self.around)) + FLOOR).mT
            frames = frames_of(samples, self.rate)
            keep = length_mask(frames, x.shape[1])[:, :, None]
            count = frames[:, None, None]
            centred = (x - (x * keep).sum(1, keepdim=True) / count) * keep
            return centred / (centred.square().sum(1, keepdim=True) / count + 1e-5).sqrt(), frames


def apply_spec_augment(x: Tensor, bands: Tensor, spans: Tensor) -> Tensor:
    """SpecAugment: set bands of mels and spans of frames of (B, frames, mels) to 0.

    0 is the mean. bands, spans (B, n, 2) hold the first index and the one after the last. The data loader samples them,
    so that an utterance has the same masks in any batch, on any process and after a resume.
    """
    for places, dim in ((spans, 1), (bands, 2)):
        index = torch.arange(x.shape[dim], device=x.device)
        inside = ((index >= places[..., :1]) & (index < places[..., 1:])).any(
            1
        )  # (B, frames or mels)
        x = x.masked_fill(inside.unsqueeze(3 - dim), 0)
    return x


# ---- encoder ---------------------------------------------------------------------------------------------------------
class Subsampling(nn.Module):
    """Convolutional subsampling: (B, frames, mels) -> (B, T, D).

    The convolutions have no padding, so real frames depend on real frames only.
    """

    def __init__(self, mels: int, channels: int, dim: int, dropout: float):
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, 2)
        self.second = nn.Conv2d(channels, channels, 3, 2)
        self.out = nn.Linear(channels * subsampled_length(mels), dim)
        self.dropout = nn.Dropout(dropout)
        # torch's default would leave 1% of the variance of the features
        for part in (self.first, self.second, self.out):
            following = "linear" if part is self.out else "relu"
            nn.init.kaiming_normal_(part.weight, nonlinearity=following)
            nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x[:, None].to(self.out.weight.dtype)))))
        return self.dropout(self.out(x.transpose(1, 2).flatten(2)))


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm over the real frames only.

    The statistics are those of one micro-batch on one process, so results depend on how a step is split.
    """

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """x (B, D, T), keep (B, T) -> (B, D, T)."""
        x = x.transpose(1, 2)
        normed = super().forward(x[keep]).to(x.dtype)
        return torch.zeros_like(x).masked_scatter(keep[..., None], normed).transpose(1, 2)


class FrameNorm(nn.LayerNorm):
    """Layer norm over the channels of each frame, independent of the batch."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Layer(ConformerLayer):
    """torchaudio's Conformer layer; its convolution treats padded frames as zeros."""

    def __init__(self, sizes: ConformerSizes):
        super().__init__(
            sizes["dim"], sizes["ffn"], sizes["heads"], sizes["kernel"], sizes["dropout"]
        )
        norm = {"frame": FrameNorm, "batch": MaskedBatchNorm}[sizes["norm"]]
        self.conv_module.sequential[3] = norm(sizes["dim"])
        # linear attention forms no matrix to apply dropout to, so that all methods train alike
        self.self_attn.dropout = 0.0

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """x (T, B, D), keep (B, T) -> (T, B, D)."""
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
    """Audio (B, N) -> (B, T, D) and the number of real frames, at least one."""

    def __init__(self, rate: int, sizes: ConformerSizes):
        super().__init__()
        self.features = LogMel(rate, sizes["mels"])
        self.subsampling = Subsampling(
            sizes["mels"], sizes["channels"], sizes["dim"], sizes["dropout"]
        )
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["layers"]))

    def forward(
        self,
        audio: Tensor,
        samples: Tensor,
        bands: Tensor | None = None,
        spans: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, frames = self.features(audio, samples)
        if bands is not None:
            x = apply_spec_augment(x, bands, spans)
        x = self.subsampling(x).transpose(0, 1)
        lengths = subsampled_length(frames)
        keep = length_mask(lengths, len(x))
        for layer in self.layers:
            x = layer(x, keep)
        kind = self.subsampling.out.weight.dtype  # sharded layers return float32
        return x.transpose(0, 1).to(kind), lengths


# ---- transducer ------------------------------------------------------------------------------------------------------
class Predictor(nn.Module):
    """LSTM over the preceding symbols: (B, U) -> (B, U, cells).

    Blank is the start symbol.
    """

    def __init__(self, symbols: int, cells: int, dropout: float):
        super().__init__()
        self.symbol = nn.Embedding(symbols, cells)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(cells, cells, batch_first=True)

    def forward(self, symbols: Tensor, state=None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.lstm(self.dropout(self.symbol(symbols)), state)
        return self.dropout(out), state


class Joiner(nn.Module):
    """Logits of the next symbol from an encoder frame and the preceding symbols."""

    def __init__(self, dim: int, cells: int, width: int, symbols: int):
        super().__init__()
        self.heard = nn.Linear(dim, width)
        self.said = nn.Linear(cells, width)
        self.out = nn.Linear(width, symbols)

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """encoded (..., J), predicted (..., J) -> (..., V)."""
        return self.out(torch.tanh(encoded + predicted))


class Hypothesis(NamedTuple):
    """Recognised symbols, and the encoder frame of each."""

    symbols: list[int]
    frames: list[int]


class ConformerTransducer(nn.Module):
    """Speech recogniser of task=librispeech; `Mechanism.swap` sets its attention."""

    def __init__(self, symbols: int, rate: int, sizes: ConformerSizes):
        """Build the model; `symbols` is V, including blank."""
        super().__init__()
        check_sizes(sizes)
        self.blank = symbols - 1
        self.rate = rate
        self.encoder = Encoder(rate, sizes)
        self.predictor = Predictor(symbols, sizes["predictor"], sizes["dropout"])
        self.joiner = Joiner(sizes["dim"], sizes["predictor"], sizes["joiner"], symbols)
        self.weight = sizes["ctc"]
        self.ctc = nn.Linear(sizes["dim"], symbols) if sizes["ctc"] else None

    def forward(
        self,
        audio: Tensor,
        samples: Tensor,
        targets: Tensor | None = None,
        target_lengths: Tensor | None = None,
        bands: Tensor | None = None,
        spans: Tensor | None = None,
        search: Callable | None = None,
    ):
        """Return the losses (B,) in nats, None without targets.

        With `search` (`greedy`) the result is (losses, hypotheses).

        Args:
            audio: (B, N) int16.
            samples: lengths of the audio (B,).
            targets: symbols (B, U) int32.
            target_lengths: (B,).
            bands, spans: see `apply_spec_augment`.
        """
        encoded, lengths = self.encoder(audio, samples, bands, spans)
        losses = None
        if targets is not None:
            losses = self.losses(encoded, lengths, targets, target_lengths)
        return losses if search is None else (losses, search(self, encoded, lengths))

    def losses(
        self, encoded: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor
    ) -> Tensor:
        """RNN-T loss (B,): negative log probability of each transcript in nats.

        In training, with the weighted CTC loss (Graves et al., 2006). It is 0 for a transcript that is too long for its
        frames, which only the transducer loss supports.
        """
        said, _ = self.predictor(F.pad(targets, (1, 0), value=self.blank))
        heard = self.joiner.heard(encoded)
        said = self.joiner.said(said)
        logits = self.joiner(heard[:, :, None], said[:, None])  # (B, T, U + 1, V)
        lengths = lengths.int()
        target_lengths = target_lengths.int()
        losses = rnnt_loss(
            logits.float(), targets.int(), lengths, target_lengths, self.blank, reduction="none"
        )
        if not self.training or self.ctc is None:
            return losses
        logs = self.ctc(encoded).float().log_softmax(-1).transpose(0, 1)  # (T, B, V)
        targets = targets.long()
        ctc_losses = F.ctc_loss(
            logs, targets, lengths, target_lengths, self.blank, "none", zero_infinity=True
        )
        return losses + self.weight * ctc_losses


# ---- recognition -----------------------------------------------------------------------------------------------------
@outside_graphs
@torch.no_grad()
def greedy(model: ConformerTransducer, encoded: Tensor, lengths: Tensor) -> list[Hypothesis]:
    """Greedy search over all utterances at once.

    Each utterance has its own frame, which a blank advances.
    """
    joiner = model.joiner
    rows = torch.arange(len(encoded), device=encoded.device)
    heard = joiner.heard(encoded)
    said, state = model.predictor(torch.full_like(lengths, model.blank)[:, None])
    frame = torch.zeros_like(lengths)
    here = torch.zeros_like(lengths)
    steps = []
    while (active := frame < lengths).any():
        logits = joiner(
            heard[rows, frame.clamp(max=heard.shape[1] - 1)], joiner.said(said[:, 0])
        ).float()
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
    hypotheses = []
    for symbols, frames in torch.stack(steps).permute(2, 1, 0):
        recognised = symbols != model.blank
        hypotheses.append(Hypothesis(symbols[recognised].tolist(), frames[recognised].tolist()))
    return hypotheses


# ---- the folder of a run: names and plain values only; the attention is built from names of conf/ --------------------
class Recogniser(NamedTuple):
    """A recogniser without its weights."""

    symbols: Symbols
    rate: int
    sizes: ConformerSizes
    mechanism: Mechanism

    def build(self, tensors: Tensors | None = None) -> nn.Module:
        """Build the model with new weights, or with those of a run in eval mode.

        The tensors of a run include its random projections.
        """
        model = ConformerTransducer(len(self.symbols) + 1, self.rate, self.sizes)  # plus blank
        if not self.mechanism.is_exact:
            self.mechanism.swap(model)
        if tensors is not None:
            model.load_state_dict(tensors)
            model.eval()
        return model


def save_model(recogniser: Recogniser, tensors: Tensors, directory: Path) -> None:
    """Write `<directory>/model` atomically from the model's state. Raises OSError."""
    symbols = recogniser.symbols
    config = {
        "kind": TRANSDUCER,
        "rate": recogniser.rate,
        "sizes": dict(recogniser.sizes),
        "attention": recogniser.mechanism.to_saved(),
        "symbols": {"kind": symbols.kind, "entries": symbols.entries},
    }
    files = {PIECES: symbols.pieces} if symbols.kind == "pieces" else {}
    save_folder(directory, config, tensors, files)


def load(run: str | Path, option: str) -> tuple[Recogniser, Tensors]:
    """Load the recogniser and the weights of a run. Raises DataError naming `option`."""
    with open_folder(run, option, TRANSDUCER, "task=librispeech") as (folder, config, tensors):
        symbols = Symbols(config["symbols"]["kind"], tuple(config["symbols"]["entries"]))
        if symbols.kind == "pieces":
            symbols = Symbols.from_pieces((folder / PIECES).read_bytes())
        mechanism = Mechanism.from_saved(config["attention"], f"{option}={run}")
        rate = config["rate"]
        sizes = config["sizes"]
        check_options("sizes", ConformerSizes, sizes)
        check_shapes(
            lambda: ConformerTransducer(len(symbols) + 1, rate, sizes),
            sizes["layers"],
            tensors,
            f"{option}={run}",
        )
        return Recogniser(symbols, rate, sizes, mechanism), tensors
