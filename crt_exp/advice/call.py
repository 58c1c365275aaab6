"""`crt_exp.advise`: which attention a model in memory can have instead of its own."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.options import split_words
from crt_exp.advice.arms import EXACT, Arm, candidates
from crt_exp.advice.trial import Trial
from crt_exp.advice.verdict import TOLERANCE, Advice
from crt_exp.config import place
from crt_exp.mechanism import Mechanism
from crt_exp.advice.bench_pieces import HEADS, LENGTH, MASKED, NEXT, BatchBench, TextBench, predicts, trained_on
from crt_exp.swap.calibration import eval_mode
from crt_exp.swap.record import holders

LEAST = 32
LOADERS = {MASKED: "AutoModelForMaskedLM", NEXT: "AutoModelForCausalLM"}
SAMPLES = {"texts": 8, "images": 64, "pieces": 16}    # to judge on, where nothing is said


def advise(model: nn.Module | str, texts: str | Sequence[str] | Tensor | Sequence[Mapping[str, Any]], *,
           labels: Tensor | None = None, length: int | None = None, tokenizer: Any = None,
           attentions: Sequence[str | type | tuple[str | type, dict]] | None = None, samples: int | None = None,
           quick: bool = True, calibration: int = 4, rounds: int = 3, tolerance: float = TOLERANCE, seed: int = 0,
           progress: Callable[[str], None] | None = None) -> Advice:
    """Tries other attention in a pretrained model, and says what each costs and which to take.

    texts: for a language model of transformers strings, which `tokenizer` takes apart, or token ids, one tensor of any
    shape in the order of the text; for a model of images a tensor (n, C, H, W) as it takes them; for any other, speech
    too, a list of dictionaries of its arguments, one piece each. The model should not have been trained on them.
    labels: classes of the images, (n,); dictionaries hold their own. Without labels outputs are compared with those of
    the model as it is. length: tokens of a piece of text (those of the blocks of the model's run, of
    other models 512 or their positions).

    `calibration` pieces fit attention that has something to fit, `samples` others judge (8 texts, 64 images, 16 of
    other pieces): intervals are over these. attentions: strings such as "window block=32", classes of one's own, or
    (name, options); by default near-far attention, a window, FAVOR++ and uniform attention, the floor, with quick=False
    also the other presets of near-far attention and FAVOR#. rounds: of the times, medians. tolerance: nats above exact
    that are near enough. progress: takes a line at each step; by default they go to stderr.

    model: in memory, which is as it was afterwards; or the name or folder of a language model, whose tokenizer is then
    the one that lies there. Returns an `Advice`: print it, `.sentence`, `.code`, `.rows`, `.save(folder)`.
    Raises ValueError for models that these pieces do not fit, and for too few pieces.
    """
    say = progress or to_stderr
    if isinstance(model, str):
        model, tokenizer = _named(model, tokenizer)
    with eval_mode(model):
        if _are_texts(texts):
            if labels is not None:
                raise ValueError("labels are of images: a language model predicts the tokens of its texts")
            bench = _of_texts(model, texts, length, tokenizer, samples, calibration, seed)
        else:
            if length is not None:
                raise ValueError(f"length = {length} is of texts: images and other pieces are as long as they are")
            bench = _of_batches(model, texts, labels, samples, calibration, seed)
        trial = Trial(bench, arms_of(attentions, quick), rounds, tolerance)
        for _ in trial.measured(say):
            pass
        return trial.advice()


def _named(name: str, tokenizer: Any) -> tuple[nn.Module, Any]:
    """A language model of a folder, of the hub or among the fetched ones, with its tokenizer where none is given."""
    from crt_exp.models import encoders

    origin = encoders.Origin(encoders.folder_of(name, "model"), "model", weights=True, noise=False)
    config = encoders.load_config(origin)
    kinds = [LOADERS[kind] for end, kind in HEADS.items() for made in config.architectures or () if made.endswith(end)]
    if not kinds:
        raise ValueError(f"model = {name} is a {', '.join(config.architectures or ['model without a head'])}: by its "
                         f"name advise takes a model of transformers {' or '.join(HEADS)}")
    model = encoders.load_model(kinds[0], config, origin, Mechanism.of("exact")).eval()
    return model, tokenizer or encoders.load_tokenizer(origin)


def _are_texts(data: Any) -> bool:
    if isinstance(data, Tensor):
        return not data.is_floating_point()
    return isinstance(data, str) or all(isinstance(each, str) for each in data)


def _of_texts(model: nn.Module, texts: Any, length: int | None, tokenizer: Any, samples: int | None,
              calibration: int, seed: int) -> TextBench:
    ids = texts if isinstance(texts, Tensor) else tokens_of(texts, tokenizer)
    most = int(getattr(model.config, "max_position_embeddings", None) or 2**20) if hasattr(model, "config") else 2**20
    length = min(max(trained_on(model) or LENGTH, LEAST), most) if length is None else length
    if not LEAST <= length <= most:
        raise ValueError(f"length = {length}: it takes {LEAST} to {most} tokens, the positions that this model has")
    judged, training = split(cut(ids, length), samples or SAMPLES["texts"], calibration)
    return of_rows(model, judged, training, tokenizer, seed)


def of_rows(model: nn.Module, rows: Tensor, training: Tensor, tokenizer: Any, seed: int) -> TextBench:
    """Raises ValueError for models that predict neither masked nor next tokens."""
    known = next(iter(holders(model)), None)
    if not hasattr(getattr(known, "config", None), "vocab_size"):
        raise ValueError(f"{type(model).__name__}: for texts advise takes a language model of transformers that "
                         "predicts masked or next tokens; models of images and speech take images, or batches")
    predicted, mask = predicts(model), getattr(tokenizer, "mask_token_id", None)
    if predicted is None:
        raise ValueError(f"{type(known).__name__} predicts no tokens, so it has no loss to compare: load it by "
                         "AutoModelForCausalLM or AutoModelForMaskedLM; task=fidelity compares the hidden states of "
                         "bare encoders")
    if predicted == MASKED and mask is None:
        raise ValueError(f"{type(model).__name__} predicts masked tokens, and its tokenizer has no mask token: give "
                         "tokenizer=... that has one")
    return TextBench(model, rows, training, mask=mask, special=getattr(tokenizer, "all_special_ids", ()), seed=seed)


def _of_batches(model: nn.Module, pieces: Any, labels: Tensor | None, samples: int | None, calibration: int,
                seed: int) -> BatchBench:
    noun, pieces = ("images", pieces.split(1)) if isinstance(pieces, Tensor) else ("pieces", list(pieces))
    if labels is not None and (noun != "images" or len(labels) != len(pieces)):
        raise ValueError(f"labels are classes of a tensor of images, one each: got {len(labels)} labels for "
                         f"{len(pieces)} {noun}")
    if odd := [each for each in pieces if not isinstance(each, Tensor | Mapping)]:
        raise ValueError(f"a piece is a dictionary of the model's arguments, got {type(odd[0]).__name__}")
    judged, training = spread(len(pieces), samples or SAMPLES[noun], calibration, noun)
    return BatchBench(model, [pieces[i] for i in judged], [pieces[i] for i in training], noun=noun, seed=seed,
                      labels=None if labels is None else [labels[i:i + 1] for i in judged])


def tokens_of(texts: str | Iterable[str], tokenizer: Any) -> Tensor:
    if tokenizer is None:
        raise ValueError("texts are strings: give tokenizer=AutoTokenizer.from_pretrained(...), or token ids as a "
                         "tensor")
    listed = [texts] if isinstance(texts, str) else list(texts)
    return torch.tensor([i for text in listed for i in tokenizer(text, add_special_tokens=False)["input_ids"]])


def cut(ids: Tensor, length: int) -> Tensor:
    """(n, length); what does not fill the last row is left out."""
    ids = ids.flatten().long()
    return ids[:len(ids) // length * length].view(-1, length)


def split(rows: Tensor, samples: int, calibration: int) -> tuple[Tensor, Tensor]:
    """(samples, length) to judge on and (calibration, length) behind them, spread over the rows. Raises ValueError for
    too few."""
    judged, training = spread(len(rows), samples, calibration, f"pieces of {rows.shape[1]} tokens",
                              "more text, or a smaller length")
    return rows[judged], rows[training]


def spread(count: int, samples: int, calibration: int, noun: str, more: str = "more") -> tuple[list[int], list[int]]:
    """Places, of `count`, of those to judge on and of those to fit to behind them. Raises ValueError for too few."""
    if samples < 2 or calibration < 1:
        raise ValueError(f"samples = {samples}, calibration = {calibration}: an interval needs at least 2 samples, and "
                         "attention that is fitted 1 piece")
    if count < samples + calibration:
        raise ValueError(f"there are {count} {noun}, and {samples} to judge on and {calibration} to fit to take "
                         f"{samples + calibration}: give {more}")
    chosen = torch.linspace(0, count - 1, samples + calibration).round().long().tolist()
    return chosen[:samples], chosen[samples:]


def arms_of(attentions: Sequence[str | type | tuple[str | type, dict]] | None, quick: bool = True) -> list[Arm]:
    """Exact attention first. Raises ConfigError for names and options that conf/attention does not have."""
    if attentions is None:
        return candidates(quick)
    arms = [arm_of(each) for each in attentions]
    for arm in arms:
        arm.mechanism()
    if all(arm.name == EXACT for arm in arms):
        raise ValueError(f"attentions = {list(attentions)}: nothing to try beside {EXACT}; name others of "
                         "conf/attention, or leave it out")
    return [Arm(EXACT), *(arm for arm in arms if arm.name != EXACT)]


def arm_of(given: str | type | tuple[str | type, dict]) -> Arm:
    """A class is named by where it lies."""
    if isinstance(given, str):
        return Arm(*split_words(given))
    name, options = (given, {}) if isinstance(given, type) else given
    return Arm(place(name), options)


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
