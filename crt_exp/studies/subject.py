"""A pretrained model and the texts that it reads, for `fidelity`: what it makes of them with its own attention, and
what it makes of them with another one in its place.

Legend: L tokens of a text, H query heads, d their dimension, D the width of the model. One text is read at a time.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.advice.panel import Bench
from crt_exp.advice.tokens import HEADS, MASKED, NEXT, SHARE  # of bare encoders nothing is predicted
from crt_exp.attention.checks import repeat_heads
from crt_exp.data import text as data
from crt_exp.data.byte_pairs import running_blocks
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.models import encoders
from crt_exp.studies.captured import load_tokenizer, positions, relative_error
from crt_exp.swap.calibration import swapped_states
from crt_exp.swap.swap import unswap_attention
from crt_exp.tasks.objectives import following

KINDS = {MASKED: "AutoModelForMaskedLM", NEXT: "AutoModelForCausalLM", None: "AutoModel"}


@dataclass
class Call:
    """One call of an attention layer with exact attention: q, k, v unscaled, (1, H or Hkv, L, d), and its output."""

    path: str
    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    output: Tensor = None

    def sums(self) -> Tensor:
        """Mean |x + y|^2 of each head, (H,), over all pairs, float64."""
        root = self.scaling**0.5
        x, y = root * self.q.double(), root * repeat_heads(self.k, self.q.shape[1]).double()
        return Statistics.of(x, y).mean_sq_sum.flatten()


@dataclass
class Pass:
    """What a model makes of one text: hidden states behind each layer, and the mean loss of the predicted tokens, nats;
    None where it predicts nothing."""

    states: list[Tensor]         # (1, L, D) each
    loss: float | None

    @property
    def embedding(self) -> Tensor:
        """The mean of the last states over tokens, (D,) float64."""
        return self.states[-1][0].double().mean(0)


class Subject(Bench):
    """A Hugging Face model that was trained with exact attention, and `texts` pieces of `length` tokens of a text.

    model: a hub name, a folder or a run of task=mlm. text: files or folders, which the model was not trained on;
    calibration: others, to which causal layers with fitted parameters are fitted, as `calibrate_attention` does.
    Pieces are spread over the text, whose tokens are kept in `cache_dir`; the places of masks are those of `seed`, the
    same for every attention.

    Raises DataError where model, tokenizer or text cannot be had, ValueError for a model that was not trained with
    exact attention or reads no text, for texts of too few tokens, and where text and calibration share a file.
    """

    def __init__(self, model: str, text: str | Sequence[str], calibration: str | Sequence[str] | None,
                 tokenizer: str | None, length: int | None, texts: int, calibration_texts: int, seed: int,
                 cache_dir: str | Path | None = None):
        self.name, self.cache_dir = model, cache_dir
        loaded, self.predicts, self.tokenizer = opened(model, tokenizer)
        super().__init__(loaded, None, seed)
        self.most = min(positions(self.model), 2**20)
        self.length = length_of(self.model, length)
        check_apart(text, calibration)
        self.texts = self.pieces(text, texts, "task.texts")
        if calibration is not None:
            self.training = self.pieces(calibration, calibration_texts, "task.calibration_texts").split(1)
        self.calls: list[list[Call]] = []
        self.exact = [self.captured(i) for i in range(texts)]

    def __str__(self) -> str:
        return f"{self.name}, {len(self.texts)} texts of {self.length} tokens"

    @property
    def causal(self) -> bool:
        return self.predicts == NEXT

    def pieces(self, text: str | Sequence[str], count: int, option: str) -> Tensor:
        """(count, length) token ids."""
        blocks = rows_of(text, self.predicts, self.tokenizer, self.length, self.cache_dir)
        if len(blocks) < count:
            raise ValueError(f"{option} = {count}: {text} has {len(blocks)} pieces of {self.length} tokens; give more "
                             "text, fewer pieces or a smaller task.length")
        rows = np.linspace(0, len(blocks) - 1, count).round().astype(int)
        return blocks[rows]

    # ---- reading

    @torch.no_grad()
    def read(self, i: int) -> Pass:
        """The model as it now stands, on text i."""
        ids = self.texts[i:i + 1]
        out = self.run(ids)
        if self.predicts is None:
            return Pass(list(out.hidden_states[1:]), None)
        inputs, labels = (ids, following(ids)) if self.causal else self.masked(i)
        logits = out.logits if self.causal else self.model(input_ids=inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), ignore_index=data.IGNORED)
        return Pass(list(out.hidden_states[1:]), float(loss))

    def run(self, ids: Tensor) -> Any:
        call = {"use_cache": False} if self.causal else {}
        return self.model(input_ids=ids, output_hidden_states=True, **call)

    def masked(self, i: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of text i with the same masks at every call, (1, L) each."""
        draw = data.uniforms([data.generator_of(self.seed, i)], self.length)
        batch = data.Masking.of(self.tokenizer, SHARE)(self.texts[i:i + 1].numpy(), draw)
        return batch["input_ids"], batch["labels"]

    @torch.no_grad()
    def captured(self, i: int) -> Pass:
        """The exact model on text i; the calls of its attention layers are kept in `calls`."""
        exact, calls = self.read(i), []
        Mechanism.of("exact").swap(self.model, saved=False)
        with ExitStack() as stack:
            stack.callback(unswap_attention, self.model)
            for state in swapped_states(self.model):
                stack.callback(state.register_forward_hook(
                    lambda state, given, out: calls.append(Call(state.path, *given[:3], state.scaling, out))).remove)
            self.run(self.texts[i:i + 1])
        self.calls.append(calls)
        return exact

    # ---- other attention

    @torch.no_grad()
    def measured(self, mechanism: Mechanism) -> dict[str, np.ndarray]:
        """Directly after the swap, of each text: `attention` (texts, calls), the relative error of every layer's output
        for the exact model's own queries, keys and values; `hidden` (texts, layers), that of the hidden states behind
        every layer, all layers swapped; `cosine` (texts,) of the mean-pooled embeddings; `above` (texts,), the loss
        above that of the exact model in nats, where it predicts something."""
        with self.swapped(mechanism) as states:
            of_texts = [self.of_text(i, states) for i in range(len(self.texts))]
        return {key: np.array([each[key] for each in of_texts]) for key in of_texts[0]}

    def of_text(self, i: int, states: dict[str, nn.Module]) -> dict[str, Any]:
        exact, now = self.exact[i], self.read(i)
        errors = [float(relative_error(states[call.path].forward(call.q, call.k, call.v), call.output))
                  for call in self.calls[i]]
        hidden = [float(relative_error(a, b)) for a, b in zip(now.states, exact.states)]
        record = {"attention": errors, "hidden": hidden,
                 "cosine": float(F.cosine_similarity(now.embedding, exact.embedding, dim=0))}
        return record if exact.loss is None else record | {"above": now.loss - exact.loss}

    def fit(self, mechanism: Mechanism) -> None:
        if self.training is None:
            raise ValueError(f"attention {mechanism.name} of this model is fitted to training text: give "
                             "task.calibration=<file>, another than task.text")
        super().fit(mechanism)


def opened(name: str, tokenizer: str | None) -> tuple[nn.Module, str | None, Any]:
    """The model in eval mode, what it predicts, and its tokenizer or the one that is named."""
    model, predicts = load(name)
    made = load_tokenizer(name, tokenizer)
    data.check_vocabulary(made, model.config.vocab_size)
    return model, predicts, made


def length_of(model: nn.Module, length: int | None, least: int = 1) -> int:
    """Tokens of a text: as asked, or 512, or the model's positions. Raises ValueError for too many and too few."""
    most = min(positions(model), 2**20)
    length = min(512, most) if length is None else length
    if not least <= length <= most:
        raise ValueError(f"task.length = {length}: it takes {least} to {most} tokens; the model has {most} positions")
    return length


def rows_of(text: str | Sequence[str], predicts: str | None, tokenizer: Any, length: int,
            cache_dir: str | Path | None) -> Tensor:
    """(n, length) token ids of all the text, with [CLS] and [SEP] for encoders."""
    framed = predicts != NEXT and tokenizer.cls_token_id is not None
    rows = (data.local_blocks if framed else running_blocks)(text, tokenizer, length, cache_dir)
    return torch.from_numpy(rows.astype(np.int64))


def load(name: str) -> tuple[nn.Module, str | None]:
    """The model in eval mode, float32, and what it predicts."""
    origin = encoders.Origin(encoders.folder_of(name, "task.model"), "task.model", weights=True, noise=False)
    config = encoders.load_config(origin)
    changed = encoders.differing_keys(encoders.saved_attention(config), encoders.EXACT)
    if changed:
        raise ValueError(f"task.model = {name} was trained with another attention than exact ({', '.join(changed)}): "
                         "there is nothing that it should stay true to")
    kinds = [kind for architecture in config.architectures or () for end, kind in HEADS.items()
             if architecture.endswith(end)]
    predicts = kinds[0] if kinds else None
    model = encoders.load_model(KINDS[predicts], config, origin, Mechanism.of("exact")).eval()
    if model.main_input_name != "input_ids":
        raise ValueError(f"task.model = {name}: {type(model).__name__} reads {model.main_input_name}, not text")
    if config.is_encoder_decoder:
        raise ValueError(f"task.model = {name}: {type(model).__name__} has an encoder and a decoder: give an encoder "
                         "or a decoder alone")
    return model, predicts


def check_apart(text: str | Sequence[str], calibration: str | Sequence[str] | None) -> None:
    """Raises ValueError where the same contents are to be fitted to and judged on."""
    if calibration is None:
        return
    seen = {data.content(file): file for file in data.text_files(text)}
    both = [seen[digest] for digest in map(data.content, data.text_files(calibration)) if digest in seen]
    if both:
        raise ValueError(f"task.calibration holds {Path(both[0]).name}, which is task.text too: fit to training text, "
                         "and judge on text that was held out")
