"""Word language model: an LSTM whose embeddings are also its output classes.

The logit of a word is the inner product of the output and the word's embedding, divided by a temperature, without bias.
exp(logit) is the softmax kernel of queries (outputs) and keys (embeddings), which random features estimate (HRF,
appendix I).

Notation: B text columns, T words of each in a batch, n words with a label, D width.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.experiments.data.text import IGNORED
from crt_exp.experiments.models.folder import Tensors, check_shapes, open_folder, save_folder
from crt_exp.validation import Count, Rate, check_options

KIND = "word_lstm"
SPREAD = (
    0.1  # uniform initialisation of the embeddings, as in PyTorch's word language model example
)


class WordLSTM(nn.Module):
    """LSTM over words; the state is an argument and a result."""

    def __init__(
        self,
        words: Count,
        width: Count,
        layers: Count,
        dropout: Rate,
    ):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.dropout = nn.Dropout(dropout)
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(width, width, layers, dropout=between, batch_first=True)
        nn.init.uniform_(self.embedding.weight, -SPREAD, SPREAD)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens (B, T) -> outputs (B, T, D) and the final state (2, layers, B, D).

        `state` is the state after the preceding words; None: a zero state.
        """
        before = None if state is None else (state[0].contiguous(), state[1].contiguous())
        outputs, after = self.lstm(self.dropout(self.embedding(tokens)), before)
        return self.dropout(outputs), torch.stack(after)


class BatchResult(NamedTuple):
    """Results of a model on a batch.

    Attributes:
        loss: in training the mean loss with the norm penalty, else the sum over n words, in nats.
        state: the final state (2, layers, B, D).
        right: which words are predicted correctly, (n,); None in training.
        lengths: norms of the outputs, (n,); None in training.
    """

    loss: Tensor
    state: Tensor
    right: Tensor | None = None
    lengths: Tensor | None = None


class LSTMLanguageModel(nn.Module):
    """A `WordLSTM` with a loss: the full softmax, or `head` in training.

    head(outputs (n, D), labels (n,)) returns the mean loss. The outputs are divided by the temperature. beta and gamma
    weight the mean squared distance of the norms of outputs and embeddings from 1, HRF (105). This penalty keeps the
    kernel within the range of random features.
    """

    def __init__(
        self,
        body: WordLSTM,
        head: nn.Module | None = None,
        temperature: float = 1.0,
        beta: float = 0.0,
        gamma: float = 0.0,
    ):
        super().__init__()
        self.body = body
        self.head = head
        self.temperature = temperature
        self.beta = beta
        self.gamma = gamma

    def forward(self, tokens: Tensor, labels: Tensor, state: Tensor | None = None) -> BatchResult:
        """Tokens, labels (B, T); label -100 excludes a position from the loss."""
        outputs, after = self.body(tokens, state)
        chosen = labels != IGNORED
        outputs = outputs[chosen].float()
        labels = labels[chosen]
        weight = self.body.embedding.weight
        if self.training and self.head is not None:
            loss = self.head(outputs / self.temperature, labels)
        else:
            # sharded weights may be bfloat16
            logits = outputs / self.temperature @ weight.float().T
            reduction = "mean" if self.training else "none"
            loss = F.cross_entropy(logits, labels, reduction=reduction)
        if not self.training:
            return BatchResult(
                loss.double().sum(), after, logits.argmax(-1) == labels, outputs.norm(dim=-1)
            )
        costs = ((self.beta, outputs), (self.gamma, weight))
        cost = sum(
            factor * (x.float().norm(dim=-1) - 1).square().mean() for factor, x in costs if factor
        )
        return BatchResult(loss + cost, after)


# ---- the folder of a run ---------------------------------------------------------------------------------------------


class SavedLSTM(NamedTuple):
    """A saved model in eval mode, with its words and temperature."""

    body: WordLSTM
    words: tuple[str, ...]
    temperature: float


def save_model(
    body: WordLSTM,
    words: tuple[str, ...],
    temperature: float,
    tensors: Tensors,
    directory: Path,
) -> None:
    """Write `<directory>/model` atomically from the state of `body`. Raises OSError."""
    sizes = {
        "width": body.lstm.hidden_size,
        "layers": body.lstm.num_layers,
        "dropout": body.dropout.p,
    }
    config = {"kind": KIND, "sizes": sizes, "temperature": temperature, "words": words}
    save_folder(directory, config, tensors)


def load(run: str | Path, option: str) -> SavedLSTM:
    """Load the model of a run of task=ptb. Raises DataError, naming `option`."""
    with open_folder(run, option, KIND, "task=ptb") as (_, config, tensors):
        sizes = {"words": len(config["words"]), **config["sizes"]}
        check_options("", WordLSTM, sizes)
        check_shapes(lambda: WordLSTM(**sizes), sizes["layers"], tensors, f"{option}={run}")
        body = WordLSTM(**sizes)
        body.load_state_dict(tensors)
        return SavedLSTM(body.eval(), tuple(config["words"]), config["temperature"])
