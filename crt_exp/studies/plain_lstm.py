"""A word language model in plain PyTorch, for comparison: nothing of this package but the place of the text is in it.

Written as word language models of PyTorch's examples are: a dictionary in the order of the text, columns, a detached
hidden state, nn.LSTM between an embedding and a decoder tied to it, cross-entropy, clipping, an optimiser.
"""

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

EVALUATED = 10  # columns of a text that is evaluated


@dataclass(frozen=True)
class Options:
    """All that a run depends on. warmup: steps of a rising rate, before it falls linearly to 0 or is constant."""

    width: int
    layers: int
    dropout: float
    bptt: int
    batch: int
    epochs: int
    lr: float
    betas: tuple[float, float]
    clip: float
    warmup: int
    linear: bool
    seed: int


class Dictionary:
    def __init__(self):
        self.ids: dict[str, int] = {}

    def read(self, path: Path) -> Tensor:
        ids = []
        for line in path.read_text(encoding="utf-8").splitlines():
            ids += [self.ids.setdefault(word, len(self.ids)) for word in [*line.split(), "<eos>"]]
        return torch.tensor(ids)


class Model(nn.Module):
    def __init__(self, words: int, options: Options):
        super().__init__()
        self.drop = nn.Dropout(options.dropout)
        self.encoder = nn.Embedding(words, options.width)
        self.rnn = nn.LSTM(options.width, options.width, options.layers, dropout=options.dropout)
        self.decoder = nn.Linear(options.width, words, bias=False)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, words: Tensor, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden


def columns(text: Tensor, count: int) -> Tensor:
    """(words of a column, count)."""
    return text[:len(text) // count * count].view(count, -1).t().contiguous()


def batches(source: Tensor, length: int):
    """Words and the words after them."""
    for start in range(0, len(source) - 1, length):
        size = min(length, len(source) - 1 - start)
        yield source[start:start + size], source[start + 1:start + 1 + size].flatten()


@torch.no_grad()
def perplexity(model: Model, source: Tensor, length: int) -> float:
    model.eval()
    total, hidden = 0.0, None
    for words, following in batches(source, length):
        output, hidden = model(words, hidden)
        total += len(words) * nn.functional.cross_entropy(output, following).item()
    return math.exp(total / (len(source) - 1))


def train_epoch(model: Model, optimizer, schedule, source: Tensor, options: Options) -> None:
    model.train()
    hidden = None
    for words, following in batches(source, options.bptt):
        hidden = None if hidden is None else tuple(part.detach() for part in hidden)
        optimizer.zero_grad()
        output, hidden = model(words, hidden)
        nn.functional.cross_entropy(output, following).backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        schedule.step()


def rate(options: Options, total: int):
    """The factor of each step."""
    def factor(step: int) -> float:
        if step < options.warmup:
            return (step + 1) / (options.warmup + 1)
        return max(0.0, (total - step) / (total - options.warmup)) if options.linear else 1.0
    return factor


def run(files: dict[str, Path], options: Options, home: Path) -> list[float]:
    """Perplexity on the validation text after each epoch; what is interrupted goes on after its last whole epoch."""
    torch.manual_seed(options.seed)
    dictionary = Dictionary()
    text = {split: dictionary.read(path) for split, path in files.items()}
    training, validation = columns(text["train"], options.batch), columns(text["validation"], EVALUATED)
    model = Model(len(dictionary.ids), options)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, betas=options.betas)
    total = options.epochs * -(-(len(training) - 1) // options.bptt)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate(options, total))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    curve = restored(home / "state.pt", parts, options)
    while len(curve) < options.epochs:
        train_epoch(model, optimizer, schedule, training, options)
        curve.append(perplexity(model, validation, options.bptt))
        save(home / "state.pt", parts, options, curve)
    return curve


def save(path: Path, parts: dict, options: Options, curve: list[float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save(state | {"options": asdict(options), "curve": curve, "rng": torch.get_rng_state()}, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def restored(path: Path, parts: dict, options: Options) -> list[float]:
    """What was measured so far; nothing where there is no state, or that of other options."""
    state = torch.load(path, weights_only=True) if path.exists() else {}
    if state.get("options") != asdict(options):
        return []
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["rng"])
    return state["curve"]
