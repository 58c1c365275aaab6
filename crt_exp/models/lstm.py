"""A language model of words: torch's LSTM between embeddings, its input and, tied, the classes that it predicts.

The logit of a word is the inner product of the output and the word's embedding over a temperature, without a bias: the
softmax kernel of queries (outputs) and keys (embeddings), which random features estimate (HRF, appendix I).

Legend: B columns of a text, T words of each in a batch, n of those that count, V words, D width.
"""

from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.data.text import IGNORED
from crt_exp.models.folder import check_shapes, read_kept, write_kept
from crt_exp.options import Count, check_options

KIND = "word_lstm"
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


class Found(NamedTuple):
    """What a model says of a batch. loss: in training the mean with the cost of lengths; else summed over n words.

    state (2, layers, B, D). right and lengths (n,): which words are guessed, |h|; None in training.
    """

    loss: Tensor
    state: Tensor
    right: Tensor | None = None
    lengths: Tensor | None = None


class LSTMLanguageModel(nn.Module):
    """A WordLSTM with what turns outputs into a loss: the full softmax, or in training `head`.

    head(outputs (n, D), labels (n,)) -> the mean loss, of outputs that are divided by the temperature; it holds the
    embeddings themselves where it needs them. beta, gamma: cost of the mean squared distance of lengths from 1, of
    queries (outputs) and of keys (embeddings), HRF (105), which keeps the kernel within reach of features.
    """

    def __init__(self, body: WordLSTM, head: nn.Module | None = None, temperature: float = 1.0, beta: float = 0.0,
                 gamma: float = 0.0):
        super().__init__()
        self.body, self.head, self.temperature, self.beta, self.gamma = body, head, temperature, beta, gamma

    def forward(self, tokens: Tensor, labels: Tensor, state: Tensor | None = None) -> Found:
        """tokens, labels (B, T), labels -100 where nothing is to be predicted."""
        outputs, after = self.body(tokens, state)
        chosen = labels != IGNORED
        outputs, labels, weight = outputs[chosen].float(), labels[chosen], self.body.embedding.weight
        if self.training and self.head is not None:
            loss = self.head(outputs / self.temperature, labels)
        else:
            logits = outputs / self.temperature @ weight.float().T  # split weights may be bfloat16
            loss = F.cross_entropy(logits, labels, reduction="mean" if self.training else "none")
        if not self.training:
            return Found(loss.double().sum(), after, logits.argmax(-1) == labels, outputs.norm(dim=-1))
        costs = ((self.beta, outputs), (self.gamma, weight))
        cost = sum(factor * (x.float().norm(dim=-1) - 1).square().mean() for factor, x in costs if factor)
        return Found(loss + cost, after)


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
    write_kept(directory, config, tensors)


def load(run: str | Path, option: str) -> KeptLSTM:
    """What a run of task=ptb kept. Raises DataError, naming `option`, for what is none."""
    with read_kept(run, option, KIND, "task=ptb") as (_, config, tensors):
        sizes = {"words": len(config["words"]), **config["sizes"]}
        check_options("", WordLSTM, sizes)
        check_shapes(lambda: WordLSTM(**sizes), sizes["layers"], tensors, f"{option}={run}")
        body = WordLSTM(**sizes)
        body.load_state_dict(tensors)
        return KeptLSTM(body.eval(), tuple(config["words"]), config["temperature"])
