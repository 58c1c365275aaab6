"""Word-level language models with full or sampled softmax (HRF 4.2, I).

The text is the Penn Treebank, WikiText-2 or any other. An LSTM reads the text in columns and carries its state from
batch to batch. Evaluation reports the perplexity of every word of a split by the full softmax, and the unigram
perplexity.
Notation: B columns of a step, T words of each, V words of the vocabulary.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import torch
from pandas import DataFrame
from torch import Tensor, nn

from crt_exp.experiments.data import corpora, full_tensor
from crt_exp.experiments.data.sources import Place, stand_in
from crt_exp.experiments.data.text import IGNORED
from crt_exp.experiments.drawing import new_figure, save_figure
from crt_exp.experiments.models import lstm
from crt_exp.experiments.tasks.base import (
    Batch,
    Metrics,
    Plan,
    Reader,
    Task,
    Tensors,
    exp,
    smoothed,
    task_class,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.sampled_softmax import (
    DenseFeatures,
    ExactSoftmax,
    LogUniform,
    Quadratic,
    SampledSoftmax,
    TreeFeatures,
    Uniform,
    Unigram,
)
from crt_exp.validation import Count, Files, NotNegative, Positive, Rate


class Sampling(TypedDict):
    """Options of a sampled softmax.

    Attributes:
        negatives: negative samples of each word.
        temperature: of the kernel exp(cos(h, e) / temperature) of random features.
        rebuild_every: steps between two builds of the tables of random features.
        tree: sample random features by a tree, else by one score for each class.
        alpha: weight of the squared logit of the quadratic sampler.
    """

    negatives: Count
    temperature: Positive
    rebuild_every: Count
    tree: bool
    alpha: NotNegative


class LengthPenalties(TypedDict):
    """Penalties on lengths other than 1 of queries and keys, HRF (105).

    Queries are the outputs of the LSTM, keys the embeddings.
    """

    queries: NotNegative
    keys: NotNegative


@task_class
class PTB(Task):
    """Word-level language model; see `conf/task/ptb.yaml` for the options.

    Raises:
        DataError: a text is missing, too short, or has words that the training text lacks.
        ConfigError: options contradict each other.
    """

    corpus: Annotated[str, Files(("ptb", "wikitext2"))]
    data_dir: str | None
    source: Place
    init: Annotated[str, Files(("scratch",))]
    width: Count
    layers: Count
    dropout: Rate
    bptt: Count
    softmax: Literal["full", "uniform", "log_uniform", "unigram", "exact", "quadratic", "features"]
    sampling: Sampling
    temperature: Positive
    lengths: LengthPenalties
    eval_columns: Count

    metric = "perplexity"
    lower_is_better = True
    reported = ("unigram_perplexity",)

    def __post_init__(self):
        self.carried: Tensors = {}
        self.queries: list[float] = []
        if self.corpus == "wordnet":
            self.stand_in = stand_in("Penn Treebank", "definitions of WordNet", "corpus=ptb", "ptb")
        self.text = corpora.word_corpus(self.corpus, self.data_dir, self.source)
        self.splits = self.text.parts
        V = len(self.text.words)
        negatives = self.sampling["negatives"]
        if self.softmax != "full" and negatives > V - 1:
            raise ConfigError(
                f"task.sampling.negatives={negatives}: expected at most {V - 1}; or set "
                "task.softmax=full"
            )

    @property
    def uses(self) -> frozenset[str]:
        """Mechanism fields in use: none unless the sampler uses random features."""
        return super().uses if self.softmax == "features" else frozenset()

    # ---- text

    def inputs(self) -> list[Path]:
        return corpora.word_files(self.corpus, self.data_dir, self.source)

    def epoch_steps(self, plan: Plan) -> int:
        return -(-(self.length("train") // plan.batch) // self.bptt)

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        """Yield tokens and labels (B, T); labels are -100 where there is no word.

        `place` is the index of the micro-batch in its process and selects the carried state. `first` is True at the
        start of the columns. Evaluation counts each word once, in the same columns for any number of processes. A
        limited evaluation reads consecutive batches from a random place on, because the state carries over batches.
        """
        training = split == "train"
        count = plan.batch if training else self.eval_columns
        columns = corpora.columns(self.splits[split], count, self.text.eos, whole=not training)
        steps = -(-columns.shape[2] // self.bptt)
        micro = plan.micro if training else 1
        start = plan.start if training else 0
        begin = 0
        if not training and plan.limit is not None and steps > plan.limit.batches:
            plan.limit.partial = True
            start = int(np.random.default_rng(0).integers(steps - plan.limit.batches + 1))
            begin = start
        first = count * plan.rank // plan.world
        last = count * (plan.rank + 1) // plan.world
        for step in range(start, steps):
            at = step * self.bptt
            parts = np.split(columns[:, first:last, at : at + self.bptt], micro, axis=1)
            for place, (tokens, labels) in enumerate(map(torch.tensor, parts)):
                if training or (labels != IGNORED).any():
                    yield {
                        "tokens": tokens,
                        "labels": labels,
                        "place": place,
                        "first": step == begin,
                    }

    # ---- model

    def build(self, mechanism: Mechanism) -> nn.Module:
        body = lstm.WordLSTM(len(self.text.words), self.width, self.layers, self.dropout)
        if self.init != "scratch":
            start = lstm.load(self.init, "task.init")
            ours = tuple(self.text.words), str(body), self.temperature
            if (start.words, str(start.body), start.temperature) != ours:
                raise ConfigError(
                    f"task.init={self.init}: other words or sizes, or another task.temperature"
                )
            body = start.body
        return lstm.LSTMLanguageModel(
            body,
            self.head(body.embedding, mechanism),
            self.temperature,
            self.lengths["queries"],
            self.lengths["keys"],
        )

    def head(self, embedding: nn.Embedding, mechanism: Mechanism) -> nn.Module | None:
        """Sampled softmax for training; None for the full softmax.

        Raises ConfigError if task.softmax=features has no random features.
        """
        if self.softmax == "full":
            return None
        if self.softmax == "features" and not mechanism.estimates:
            raise ConfigError(
                f"task.softmax=features: attention={mechanism.name} has no random features; set "
                "attention=favorpp, or task.softmax=quadratic or unigram"
            )
        V = len(self.text.words)
        options = self.sampling
        tables = TreeFeatures if options["tree"] else DenseFeatures
        make = {
            "uniform": lambda: Uniform(V),
            "log_uniform": lambda: LogUniform(V),
            "unigram": lambda: Unigram(torch.from_numpy(self.text.counts)),
            "exact": lambda: ExactSoftmax(embedding),
            "quadratic": lambda: Quadratic(embedding, options["alpha"]),
            "features": lambda: tables(
                mechanism, V, self.width, temperature=options["temperature"], seed=mechanism.seed
            ),
        }
        return SampledSoftmax(
            make[self.softmax](), embedding, options["negatives"], rebuild_every=1
        )

    # ---- training with carried state

    def check_shards(self) -> None:
        if self.softmax != "full":
            raise ConfigError(
                f"task.softmax={self.softmax}: not supported with trainer=fsdp; set task.softmax=full"
            )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        place = str(batch["place"])
        before = None if batch["first"] else self.carried[place].to(batch["tokens"].device)
        result = model(batch["tokens"], batch["labels"], before)
        self.carried[place] = result.state.detach()
        return result.loss

    def updated(self, model: nn.Module, step: int) -> None:
        """Rebuild the tables of random features every `rebuild_every` steps.

        Adam moves nearly every embedding in each step, so the tables are rebuilt instead of updated row by row.
        """
        if self.softmax == "features" and step % self.sampling["rebuild_every"] == 0:
            model.head.update()

    def state_dict(self) -> Tensors:
        return dict(self.carried)

    def load_state_dict(self, state: Tensors) -> None:
        self.carried = dict(state)

    # ---- metrics

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        """Full-softmax loss in nats, perplexity and accuracy over all words of a split."""
        unigram = torch.from_numpy(self.unigram)
        state = None
        lengths = []

        def measure(batch: Batch) -> dict[str, Any]:
            nonlocal state
            before = None if batch["first"] else state
            result = model(batch["tokens"], batch["labels"], before)
            state = result.state
            lengths.extend(result.lengths.tolist())
            labels = batch["labels"][batch["labels"] != IGNORED].cpu()
            return {
                "loss": result.loss,
                "accuracy": result.right.sum(),
                "unigram_loss": -unigram[labels].log().sum(),
                "count": len(labels),
            }

        means = reader.means(split, measure, "words")
        self.queries = reader.gather(lengths)
        return means | {
            "perplexity": exp(means["loss"]),
            "unigram_perplexity": exp(means["unigram_loss"]),
            "query_length": float(np.mean(self.queries)),
            "key_length": float(full_tensor(model.body.embedding.weight).norm(dim=-1).mean()),
        }

    @cached_property
    def unigram(self) -> np.ndarray:
        """Word frequencies of the training text with add-one smoothing, (V,)."""
        return smoothed(self.text.counts)

    # ---- results

    def export(self, model: nn.Module, tensors: Tensors, directory: Path) -> None:
        body = {
            name.removeprefix("body."): tensor
            for name, tensor in tensors.items()
            if name.startswith("body.")
        }
        lstm.save_model(model.body, self.text.words, self.temperature, body, directory)
        lengths = {
            "queries": np.array(self.queries),
            "keys": body["embedding.weight"].norm(dim=-1).cpu().numpy(),
        }
        draw_lengths(lengths, directory)


def draw_lengths(lengths: dict[str, np.ndarray], directory: Path) -> None:
    """Write lengths.csv and lengths.png with histograms (HRF Figures 7, 9).

    They show |h| of all evaluated words and |e| of all classes.
    """
    edges = np.linspace(0.0, 1.001 * max(map(np.max, lengths.values())), 61)
    counts = {name: np.histogram(part, edges)[0] for name, part in lengths.items()}
    table = DataFrame({"from": edges[:-1], "to": edges[1:], **counts})
    table.to_csv(directory / "lengths.csv", index=False)
    figure, axes = new_figure(1, 2, figsize=(7, 3), layout="constrained")
    for ax, (name, part) in zip(axes, counts.items()):
        ax.stairs(part, edges, fill=True)
        ax.set(title=f"lengths of {name}", xlabel="length", ylabel="count")
    save_figure(figure, directory / "lengths.png")
