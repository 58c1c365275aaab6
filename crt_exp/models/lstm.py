"""A language model of words: torch's LSTM between embeddings, its input and, tied, the classes that it predicts.

The logit of a word is the inner product of the output and the word's embedding over a temperature, without a bias: the
softmax kernel of queries (outputs) and keys (embeddings), which random features estimate (HRF, appendix I).

Legend: B columns of a text, T words of each in a batch, n of those that count, V words, D width.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.data import DataError
from crt_exp.data.text import IGNORED
from crt_exp.options import Count, check_options
from crt_exp.models.folder import (CONFIG, check_numbers, check_shapes, description_in, folder_of, save_tensors,
                                   whole_folder)

KIND, WEIGHTS = "word_lstm", "model.safetensors"
SPREAD = 0.1  # of the first embeddings, uniform: that of torch's own example of a word language model


class WordLSTM(nn.Module):
    """Reads words and goes on where it stopped: its state is an argument and a result."""

    def __init__(self, words: Count, width: Count, layers: Count, dropout: Annotated[float, Field(ge=0, lt=1)]):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(words, width), nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout if layers > 1 else 0.0, batch_first=True)
        nn.init.uniform_(self.embedding.weight, -SPREAD, SPREAD)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """tokens (B, T) -> outputs (B, T, D) and the state behind the last of them (2, layers, B, D).

        state: that behind the words before; None: there are none.
        """
        before = None if state is None else (state[0].contiguous(), state[1].contiguous())
        outputs, after = self.lstm(self.dropout(self.embedding(tokens)), before)
        return self.dropout(outputs), torch.stack(after)


class FullSoftmax(nn.Module):
    """Mean cross-entropy over all classes. weight (V, D): the embeddings of the classes."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """outputs (n, D), labels (n,) -> a scalar."""
        return F.cross_entropy(outputs @ self.weight.to(outputs.dtype).T, labels)  # split weights may be bfloat16


@dataclass(frozen=True)
class NormLengths:
    """How much a squared distance of a length from 1 costs, in the mean: of queries (outputs) and of keys (embeddings).

    HRF (105): queries * mean (|h| - 1)^2 + keys * mean (|e| - 1)^2, which keeps the kernel within reach of features.
    """

    queries: float = 0.0
    keys: float = 0.0

    def cost(self, outputs: Tensor, weight: Tensor) -> Tensor | float:
        costs = [(beta, vectors) for beta, vectors in ((self.queries, outputs), (self.keys, weight)) if beta]
        return sum(beta * (vectors.float().norm(dim=-1) - 1).square().mean() for beta, vectors in costs)


class Found(NamedTuple):
    """What a model says of a batch. loss: in training the mean with the cost of lengths; else summed over n words.

    state (2, layers, B, D). right and lengths (n,): which words are guessed, |h|; None in training.
    """

    loss: Tensor
    state: Tensor
    right: Tensor | None = None
    lengths: Tensor | None = None


class LSTMLanguageModel(nn.Module):
    """A WordLSTM with what turns outputs into a loss. `head` is for training alone: evaluation is by the full softmax.

    head(outputs (n, D), labels (n,)) -> the mean loss, of outputs that are divided by the temperature; it holds the
    embeddings themselves where it needs them.
    """

    def __init__(self, body: WordLSTM, head: nn.Module, temperature: float = 1.0, lengths: NormLengths = NormLengths()):
        super().__init__()
        self.body, self.head, self.temperature, self.lengths = body, head, temperature, lengths

    def forward(self, tokens: Tensor, labels: Tensor, state: Tensor | None = None) -> Found:
        """tokens, labels (B, T), labels -100 where nothing is to be predicted."""
        outputs, after = self.body(tokens, state)
        chosen = labels != IGNORED
        outputs, labels = outputs[chosen].float(), labels[chosen]
        if self.training:
            cost = self.lengths.cost(outputs, self.body.embedding.weight)
            return Found(self.head(outputs / self.temperature, labels) + cost, after)
        logits = outputs / self.temperature @ self.body.embedding.weight.float().T
        loss = F.cross_entropy(logits, labels, reduction="none").double().sum()
        return Found(loss, after, logits.argmax(-1) == labels, outputs.norm(dim=-1))


# ---- the folder of a run ---------------------------------------------------------------------------------------------


class KeptLSTM(NamedTuple):
    """What a run kept: the model in eval mode, its words and its temperature."""

    body: WordLSTM
    words: tuple[str, ...]
    temperature: float


def keep(body: WordLSTM, words: tuple[str, ...], temperature: float, tensors: dict[str, Tensor],
         directory: Path) -> None:
    """Writes `<directory>/model`, whole or not at all; `tensors` are the state of `body`. Raises OSError."""
    sizes = {"width": body.lstm.hidden_size, "layers": body.lstm.num_layers, "dropout": body.dropout.p}
    config = {"kind": KIND, "sizes": sizes, "temperature": temperature, "words": words}
    with whole_folder(directory) as folder:
        (folder / CONFIG).write_text(json.dumps(config, ensure_ascii=False) + "\n", encoding="utf-8")
        save_tensors(tensors, folder / WEIGHTS)


def load(run: str | Path, option: str) -> KeptLSTM:
    """What a run of task=ptb kept. Raises DataError, naming `option`, for what is none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = folder_of(run, option, "the directory of a run of task=ptb")
    try:
        config = description_in(folder, f"{option} = {run}")
        if config.get("kind") != KIND:
            raise DataError(f"{option} = {run} is a run of another task: {folder / CONFIG} describes no language model "
                            "of words. Give a run of task=ptb.")
        sizes, tensors = {"words": len(config["words"]), **config["sizes"]}, load_file(folder / WEIGHTS)
        check_options("", WordLSTM, sizes)
        check_shapes(lambda: WordLSTM(**sizes), sizes["layers"], tensors, f"{option} = {run}")
        body = WordLSTM(**sizes)
        body.load_state_dict(tensors)
        check_numbers(body.state_dict().items(), f"{option} = {run}")
        return KeptLSTM(body.eval(), tuple(config["words"]), config["temperature"])
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{option} = {run}: {folder} cannot be read: {type(error).__name__}: {error}") from None
