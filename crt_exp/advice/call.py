"""`crt_exp.advise`: which attention a model in memory can have instead of its own."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.options import join_words
from crt_exp.advice.bench import Bench, Swap, quiet
from crt_exp.advice.bench_pieces import MASKED, BatchBench, TextBench, predicts
from crt_exp.advice.language import LEAST, length_of, load, load_tokenizer
from crt_exp.advice.verdict import CONTROL_NAME, EXACT, TOLERANCE, Advice, rows_of
from crt_exp.config import place
from crt_exp.mechanism import Mechanism
from crt_exp.swap.calibration import eval_mode
from crt_exp.swap.saved import holders

Named = str | type | tuple[str | type, dict[str, Any]]
SAMPLES = {"texts": 8, "images": 64, "pieces": 16}  # by default
QUICK = ("nearfar", "window", "favorpp", CONTROL_NAME)
THOROUGH = ("nearfar preset=cheap", "nearfar", "nearfar preset=quality", "window", "favorsharp", "favorpp",
            CONTROL_NAME)


def advise(model: nn.Module | str, texts: str | Sequence[str] | Tensor | Sequence[Mapping[str, Any]], *,
           labels: Tensor | None = None, length: int | None = None, tokenizer: Any = None,
           attentions: Sequence[Named] | None = None, samples: int | None = None, quick: bool = True,
           calibration: int = 4, rounds: int = 3, tolerance: float = TOLERANCE, seed: int = 0,
           progress: Callable[[str], None] | None = None) -> Advice:
    """Try other attention in a pretrained model; return what each costs and which to take.

    Args:
        model: a model in memory, unchanged afterwards; or the name or folder of a language model.
        texts: for a language model of transformers strings (`tokenizer` splits them) or token ids, one tensor in the
            order of the text; for a model of images a tensor (n, C, H, W); for any other model a list of dictionaries
            of its arguments, one sample each. The model should not have been trained on them.
        labels: classes (n,) of the images. Without labels, outputs are compared with those of exact attention.
        length: tokens of a text; default: those of the blocks of the model's run, else 512 or the model's positions.
        attentions: strings such as "window block=32", classes, or (name, options). Default: near-far, window, FAVOR++
            and uniform attention, the control; with quick=False also the other presets of near-far and FAVOR#.
        samples: samples to judge on (default: 8 texts, 64 images, 16 others); intervals are over these.
        calibration: further samples, to which attention is fitted that has something to fit.
        rounds: of the times; medians count. tolerance: allowed loss increase, nats.
        progress: takes a line at each step; default: they go to stderr.

    Returns an `Advice`: print it, `.sentence`, `.code`, `.rows`, `.save(folder)`. Raises ValueError for models that the
    data do not fit, and for too few samples.
    """
    if isinstance(model, str):
        name, model = model, load(model)[0]
        tokenizer = tokenizer or load_tokenizer(name, None)
    with eval_mode(model):
        if _are_texts(texts):
            if labels is not None:
                raise ValueError("labels are for images: a language model predicts the tokens of its texts")
            bench = _text_bench(model, texts, length, tokenizer, samples, calibration, seed)
        else:
            if length is not None:
                raise ValueError(f"length={length} is for texts: leave it out")
            bench = _batch_bench(model, texts, labels, samples, calibration, seed)
        methods = mechanisms(attentions, quick, seed)
        records = list(measured(bench, methods, rounds, progress or to_stderr))
        return advice_of(bench, methods, records, tolerance)


def mechanisms(attentions: Sequence[Named] | None, quick: bool = True, seed: int = 0
               ) -> dict[str, Mechanism | None]:
    """Attention by its name, exact (None) first. Raises ConfigError for unknown names and options."""
    names = (QUICK if quick else THOROUGH) if attentions is None else [
        join_words(place(each[0]), each[1]) if isinstance(each, tuple) else place(each)
        for each in attentions]
    found = {EXACT: None, **{name: Mechanism.parse(name, seed=seed) for name in names if name != EXACT}}
    if len(found) == 1:
        raise ValueError(f"attentions={list(names)}: nothing to try but exact; name others of conf/attention")
    return found


@quiet()
def measured(bench: Bench, methods: Mapping[str, Swap | None], rounds: int, say: Callable[[str], None]
             ) -> Iterator[dict[str, Any]]:
    """A record for each attention with its losses and memory, then one for each length with the times of all."""
    longest = bench.timed()[bench.length]
    for label, attention in methods.items():
        losses = bench.losses(attention)
        say(f"advise: {label}: {sum(losses['loss']) / len(losses['loss']):.3f} nats")
        yield {"attention": label, **losses, "mib": bench.memory(attention, longest)}
    for length, piece in bench.timed().items():
        times = bench.times(methods, piece, rounds)
        say(f"advise: {length} tokens timed")
        yield {"length": length, "ms": times}


@quiet()
def advice_of(bench: Bench, methods: Mapping[str, Swap | None], records: Sequence[Mapping[str, Any]],
              tolerance: float) -> Advice:
    judged = {each["attention"]: each for each in records if "attention" in each}
    rows = rows_of(judged, {each["length"]: each["ms"] for each in records if "length" in each})
    for row in rows:
        row.mib, row.exact_to = judged[row.attention]["mib"], bench.exact_to(methods[row.attention])
        row.fitted = bench.is_fitted(methods[row.attention])
    own = {key: sum(judged[EXACT][key]) / len(judged[EXACT][key]) for key in ("loss", "repeated") if judged[EXACT][key]}
    advice = Advice(rows, bench.length, len(bench.judged), own["loss"], own.get("repeated"), tolerance, bench.noun)
    advice.notes = _notes(bench, methods, advice)
    return advice


def _notes(bench: Bench, methods: Mapping[str, Swap | None], advice: Advice) -> list[str]:
    notes = [f"{row.attention} computes exact attention at {advice.length} tokens." for row in advice.rows
             if row.exact_to >= advice.length]
    if advice.chosen is not None and (layers := bench.layer_errors(methods[advice.chosen.attention])):
        worst = max(layers, key=lambda layer: layer["error"])
        notes.append(f"Layer with the largest relative error: {worst['path']}, {worst['error']:.3g} (uniform attention "
                     f"{worst['uniform']:.3g}).")
        good = [i for i, layer in enumerate(layers) if layer["error"] <= layer["uniform"]]
        if len(good) < len(layers):
            notes.append(f"Other layers are further from exact than uniform attention: layers={good} leaves them out.")
    if bench.trained_on is not None and advice.length > bench.trained_on:
        notes.append(f"The run of this model trained on blocks of {bench.trained_on} tokens: it never saw later "
                     "positions.")
    if advice.repeated_loss is not None and not advice.uses_repetition:
        notes.append("The model's own attention gains little from repeated passages, so recall cannot be judged.")
    if not bench.labelled:
        notes.append("Without labels, nats are the Kullback-Leibler divergence from the model's own outputs.")
    return notes


# ---- samples

def _are_texts(data: Any) -> bool:
    if isinstance(data, Tensor):
        return not data.is_floating_point()
    return isinstance(data, str) or all(isinstance(each, str) for each in data)


def _text_bench(model: nn.Module, texts: Any, length: int | None, tokenizer: Any, samples: int | None,
                calibration: int, seed: int) -> TextBench:
    ids = (texts if isinstance(texts, Tensor) else tokens_of(texts, tokenizer)).flatten().long()
    length = length_of(model, length, LEAST)
    return text_bench(model, ids[:len(ids) // length * length].view(-1, length), samples, calibration, tokenizer, seed)


def text_bench(model: nn.Module, rows: Tensor, samples: int | None, calibration: int, tokenizer: Any, seed: int
               ) -> TextBench:
    """rows: (n, length) token ids. Raises ValueError for models that predict neither masked nor next tokens."""
    known = next(iter(holders(model)), None)
    predicted, mask = predicts(model), getattr(tokenizer, "mask_token_id", None)
    if not hasattr(getattr(known, "config", None), "vocab_size") or predicted is None:
        raise ValueError(f"{type(model).__name__} predicts no tokens: for texts advise takes a language model of "
                         "transformers, loaded by AutoModelForCausalLM or AutoModelForMaskedLM")
    if predicted == MASKED and mask is None:
        raise ValueError(f"{type(model).__name__} predicts masked tokens: give tokenizer=..., one with a mask token")
    judged, training = spread(len(rows), samples or SAMPLES["texts"], calibration, f"texts of {rows.shape[1]} tokens")
    return TextBench(model, rows[judged], rows[training], mask=mask, special=getattr(tokenizer, "all_special_ids", ()),
                     seed=seed)


def _batch_bench(model: nn.Module, pieces: Any, labels: Tensor | None, samples: int | None, calibration: int,
                 seed: int) -> BatchBench:
    noun, pieces = ("images", pieces.split(1)) if isinstance(pieces, Tensor) else ("pieces", list(pieces))
    if labels is not None and (noun != "images" or len(labels) != len(pieces)):
        raise ValueError(f"labels are classes of a tensor of images, one each: got {len(labels)} labels for "
                         f"{len(pieces)} {noun}")
    if odd := [each for each in pieces if not isinstance(each, Tensor | Mapping)]:
        raise ValueError(f"a sample is a dictionary of the model's arguments, got {type(odd[0]).__name__}")
    judged, training = spread(len(pieces), samples or SAMPLES[noun], calibration, noun)
    return BatchBench(model, [pieces[i] for i in judged], [pieces[i] for i in training], noun=noun, seed=seed,
                      labels=None if labels is None else [labels[i:i + 1] for i in judged])


def tokens_of(texts: str | Iterable[str], tokenizer: Any) -> Tensor:
    if tokenizer is None:
        raise ValueError("texts are strings: give tokenizer=AutoTokenizer.from_pretrained(...), or token ids")
    listed = [texts] if isinstance(texts, str) else list(texts)
    return torch.tensor([i for text in listed for i in tokenizer(text, add_special_tokens=False)["input_ids"]])


def spread(count: int, samples: int, calibration: int, noun: str) -> tuple[list[int], list[int]]:
    """Indices of evenly spread samples to judge on, and of those to fit to after them. Raises ValueError for too few.
    """
    if samples < 2 or calibration < 1:
        raise ValueError(f"samples={samples}, calibration={calibration}: expected samples >= 2 and calibration >= 1")
    if count < samples + calibration:
        raise ValueError(f"samples={samples}, calibration={calibration}: expected at most {count} together, the number "
                         f"of {noun}; give more")
    chosen = torch.linspace(0, count - 1, samples + calibration).round().long().tolist()
    return chosen[:samples], chosen[samples:]


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
