"""`crt_exp.advise`: which attention a language model in memory can have instead of its own."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.advice.arms import EXACT, Arm, candidates
from crt_exp.advice.panel import Panel
from crt_exp.advice.verdict import TOLERANCE, Advice, rows_of
from crt_exp.swap.swap import eval_mode, learns

LENGTH, LEAST = 512, 32


def advise(model: nn.Module, texts: str | Sequence[str] | Tensor, *, length: int | None = None, tokenizer: Any = None,
           attentions: Sequence[str | tuple[str, dict]] | None = None, samples: int = 8, calibration: int = 4,
           rounds: int = 3, tolerance: float = TOLERANCE, seed: int = 0,
           progress: Callable[[str], None] | None = None) -> Advice:
    """Tries other attention in a language model of transformers, and says what each costs and which to take.

    texts: strings, which `tokenizer` takes apart, or token ids, one tensor of any shape in the order of the text; the
    model should not have been trained on them. length: tokens of a piece (512, or the model's positions). The last
    `calibration` pieces fit attention that has something to fit, `samples` pieces before them judge: intervals are over
    these. attentions: names of conf/attention or (name, options); by default near-far attention with its presets, a
    window, FAVOR#, FAVOR++ and uniform attention, the floor. rounds: of the times, medians. tolerance: nats above exact
    that are near enough. progress: takes a line at each step; by default they go to stderr.

    The model is as it was afterwards. Returns an `Advice`: print it, `.sentence`, `.code`, `.rows`, `.save(folder)`.
    Raises ValueError for other models, and for too little text.
    """
    say = progress or _to_stderr
    ids = texts if isinstance(texts, Tensor) else tokens_of(texts, tokenizer)
    most = int(getattr(model.config, "max_position_embeddings", None) or 2**20) if hasattr(model, "config") else 2**20
    length = min(LENGTH, most) if length is None else length
    if not LEAST <= length <= most:
        raise ValueError(f"length = {length}: it takes {LEAST} to {most} tokens, the positions that this model has")
    judged, training = split(cut(ids, length), samples, calibration)
    with eval_mode(model):
        panel = Panel(model, judged, training, mask=getattr(tokenizer, "mask_token_id", None), seed=seed,
                      special=getattr(tokenizer, "all_special_ids", ()))
        arms = arms_of(attentions, panel.causal)
        return concluded(panel, arms, *measured(panel, arms, rounds, say), tolerance)


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
    if samples < 2 or calibration < 1:
        raise ValueError(f"samples = {samples}, calibration = {calibration}: an interval needs at least 2 samples, and "
                         "attention that is fitted 1 piece")
    count, length = samples + calibration, rows.shape[1]
    if len(rows) < count:
        raise ValueError(f"the text has {len(rows)} pieces of {length} tokens, and {samples} to judge on and "
                         f"{calibration} to fit to take {count}: give more text, or a smaller length")
    chosen = torch.linspace(0, len(rows) - 1, count).round().long()
    return rows[chosen[:samples]], rows[chosen[samples:]]


def arms_of(attentions: Sequence[str | tuple[str, dict]] | None, causal: bool) -> list[Arm]:
    """Exact attention first. Raises ConfigError for names and options that conf/attention does not have."""
    if attentions is None:
        return candidates(causal)
    arms = [Arm(each) if isinstance(each, str) else Arm(*each) for each in attentions]
    for arm in arms:
        arm.mechanism()
    return [Arm(EXACT), *(arm for arm in arms if arm.name != EXACT)]


def measured(panel: Panel, arms: list[Arm], rounds: int, say: Callable[[str], None]) -> tuple[list[dict], dict]:
    """Losses of each arm, and costs by length; the first that a model cannot have is an error that names the layer."""
    start, losses, costs = time.perf_counter(), [], {}
    progress = lambda text: say(f"advise: {text} ({time.perf_counter() - start:.0f} s)")
    for arm in arms:
        losses.append(panel.losses(arm))
        progress(f"{arm.label}: {sum(losses[-1]['loss']) / len(panel.rows):.3f} nats")
    for length in panel.lengths():
        costs[length] = panel.cost(arms, length, rounds, length == panel.rows.shape[1])
        progress(f"timed at {length} tokens")
    return losses, costs


def concluded(panel: Panel, arms: list[Arm], losses: list[dict], costs: dict, tolerance: float) -> Advice:
    own = {key: sum(each) / len(each) for key, each in losses[0].items()}
    rows = rows_of(arms, losses, costs)
    advice = Advice(rows, panel.rows.shape[1], len(panel.rows), own["loss"], own.get("again"), tolerance,
                    {arm.label: wants_calibration(panel, arm) for arm in arms})
    if advice.chosen is not None:
        advice.notes = notes_of(panel, advice.chosen.arm)
    if advice.again is not None and not advice.uses_memory:
        advice.notes.append("The model's own attention gains little from repeated text, so recall says nothing here.")
    return advice


def wants_calibration(panel: Panel, arm: Arm) -> bool:
    with panel.swapped(arm):
        return learns(panel.model)


def notes_of(panel: Panel, arm: Arm) -> list[str]:
    """Which layers lose most, and which are further from exact attention than uniform attention is."""
    layers = panel.layers(arm)
    if not layers:
        return []
    worst = max(range(len(layers)), key=lambda i: layers[i]["error"])
    notes = [f"Of {len(layers)} layers number {worst} ({layers[worst]['path']}) loses most: |output - exact| / |exact| "
             f"is {layers[worst]['error']:.3g}, of uniform attention {layers[worst]['uniform']:.3g}."]
    lost = [i for i, layer in enumerate(layers) if layer["error"] > layer["uniform"]]
    if lost:
        kept = [i for i in range(len(layers)) if i not in lost]
        notes.append(f"Layers {lost} are further from exact attention than uniform attention is: layers={kept} leaves "
                     "them as they are.")
    return notes


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
