"""A language model and rows of tokens: its losses, times and memory with its own attention and with others.

Legend: L tokens of a row, "above" a loss above that of the model's own attention, nats a token. Rows for judging and
rows for fitting are different tokens. Repeated rows say their first half twice: what a causal model loses on the second
half is what it can no longer look up.
"""

import ctypes
import gc
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.advice.arms import Arm
from crt_exp.attention.linear import LinearAttention
from crt_exp.swap.measured import Watcher
from crt_exp.swap.record import holders
from crt_exp.swap.swap import fill_statistics, learns, swapped_states, unswap_attention

MASKED, NEXT = "masked", "next"
HEADS = {"ForMaskedLM": MASKED, "ForPreTraining": MASKED, "ForCausalLM": NEXT, "LMHeadModel": NEXT}
SHARE = 0.15        # of the tokens is masked
UNSURE = 16         # tokens of the second half after which a model can know where it stands
REPEATED = 4        # rows, of those that judge
SHORTEST = 128      # of the lengths that are timed


class Panel:
    """A model of transformers in eval mode, `rows` (n, L) to judge on and `training` (k, L) to fit to.

    mask: the id of the mask token, of masked models. special: ids that are never masked. Raises ValueError for models
    that are swapped already, and that predict neither masked nor next tokens.
    """

    def __init__(self, model: nn.Module, rows: Tensor, training: Tensor, *, mask: int | None = None,
                 special: Sequence[int] = (), seed: int = 0):
        self.model, self.predicts = model.eval(), predicts(model)
        if self.predicts == MASKED and mask is None:
            raise ValueError(f"{type(model).__name__} predicts masked tokens, and its tokenizer has no mask token: "
                             "give tokenizer=... that has one")
        self.rows, self.training, self.seed = rows, training, seed
        self.mask, self.special = mask, torch.tensor(list(special), dtype=torch.long)
        self.device = next(model.parameters()).device
        self.twice = torch.cat([rows[:REPEATED, :rows.shape[1] // 2]] * 2, 1)

    @property
    def causal(self) -> bool:
        return self.predicts == NEXT

    @property
    def recalls(self) -> bool:
        """Whether repeated rows can be judged."""
        return self.causal and self.rows.shape[1] >= 4 * UNSURE

    # ---- other attention

    @contextmanager
    def swapped(self, arm: Arm) -> Iterator[None]:
        """Within it the model has this attention, fitted to the training rows where it has something to fit."""
        mechanism = arm.mechanism(self.seed)
        if mechanism is None:
            yield
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what the swap leaves and fits is in the advice
            mechanism.swap(self.model, saved=False)
            try:
                if learns(self.model):
                    fill_statistics(self.model, list(self.training.split(1)))
                yield
            finally:
                unswap_attention(self.model)

    # ---- losses

    def losses(self, arm: Arm) -> dict[str, list[float]]:
        """Of each row: `loss`, nats a predicted token, and where rows can be repeated `again`, of the second half."""
        with self.swapped(arm), torch.no_grad():
            result = {"loss": [self._loss(i) for i in range(len(self.rows))]}
            if self.recalls:
                half = self.twice.shape[1] // 2
                result["again"] = [self._next(row[None], half + UNSURE - 1) for row in self.twice]
        return result

    def _loss(self, i: int) -> float:
        return self._next(self.rows[i:i + 1], 0) if self.causal else self._masked(i)

    def _next(self, row: Tensor, start: int) -> float:
        logits = self.run(row).logits[0, start:-1].float()
        return float(F.cross_entropy(logits, row[0, start + 1:].to(self.device)))

    def _masked(self, i: int) -> float:
        row, hidden = self.rows[i], self._places(i)
        logits = self.run(torch.where(hidden, self.mask, row)[None]).logits[0]
        return float(F.cross_entropy(logits[hidden.to(self.device)].float(), row[hidden].to(self.device)))

    def _places(self, i: int) -> Tensor:
        """Which tokens of row i are masked, the same for all attention."""
        draw = torch.rand(self.rows.shape[1], generator=torch.Generator().manual_seed(1000 * self.seed + i))
        draw[torch.isin(self.rows[i], self.special)] = 1.0
        return draw <= max(SHARE, float(draw.min()))

    def run(self, ids: Tensor) -> Any:
        call = {"use_cache": False} if self.causal else {}
        return self.model(input_ids=ids.to(self.device), **call)

    # ---- layers

    @torch.no_grad()
    def layers(self, arm: Arm) -> list[dict[str, Any]]:
        """Relative error of each layer's output on training rows, and that of uniform attention; of attention that can
        be measured so."""
        with self.swapped(arm):
            states = [state for state in swapped_states(self.model) if isinstance(state, LinearAttention)]
            hooks = [state.register_forward_hook(Watcher(state), with_kwargs=True) for state in states]
            for row in self.training[:2].split(1) if states else ():
                self.run(row)
            for hook in hooks:
                hook.remove()
            return [{"path": state.path, "error": state.measured.relative_error,
                     "uniform": state.measured.relative_uniform} for state in states]

    # ---- costs

    def lengths(self) -> list[int]:
        """Powers of two below the length of the rows, and that."""
        L = self.rows.shape[1]
        return [*(2**k for k in range(SHORTEST.bit_length() - 1, L.bit_length()) if 2**k < L), L]

    def cost(self, arms: Sequence[Arm], length: int, rounds: int, whole: bool) -> dict[str, dict[str, float]]:
        """Medians over rounds, all attention in turn in each: {"ms": label -> milliseconds of a pass without gradient}.

        whole: also `step`, of a pass and its gradient, and `mib` at the peak of a pass without the logits, beyond what
        the process held before; that is left out where the system does not say it.
        """
        spent: dict[str, dict[str, list[float]]] = {key: {arm.label: [] for arm in arms} for key in ("ms", "step")}
        ids, memory = self.rows[:1, :length], {}
        for turn in range(rounds):
            for arm in arms:
                with self.swapped(arm):
                    if not turn:
                        self._pass(ids)  # buffers and libraries
                    spent["ms"][arm.label].append(self._timed(self._pass, ids))
                    if whole:
                        spent["step"][arm.label].append(self._timed(self._step, ids))
                        if not turn:
                            memory[arm.label] = self._memory(ids)
        medians = {key: {label: statistics.median(each) for label, each in times.items()}
                   for key, times in spent.items() if whole or key == "ms"}
        return medians | ({"mib": memory} if whole and None not in memory.values() else {})

    @torch.no_grad()
    def _pass(self, ids: Tensor) -> None:
        self.run(ids)

    def _step(self, ids: Tensor) -> None:
        """A pass and its gradient; those that the parameters had come back."""
        held = [(p, p.grad, p.requires_grad) for p in self.model.parameters()]
        try:
            for p, _, _ in held:
                p.grad = None
                p.requires_grad_(p.is_floating_point())
            self.run(ids).logits.float().square().mean().backward()
        finally:
            for p, grad, wanted in held:
                p.grad = None
                p.requires_grad_(wanted)
                p.grad = grad

    def _timed(self, call, ids: Tensor) -> float:
        self._wait()
        start = time.perf_counter()
        call(ids)
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def _memory(self, ids: Tensor) -> float | None:
        body, call = self.model.base_model, {"use_cache": False} if self.causal else {}
        with peak_of(self.device) as peak:
            body(input_ids=ids.to(self.device), **call)
        return peak.get("mib")


def predicts(model: nn.Module) -> str:
    """Which tokens a model predicts, by the name of its class."""
    parts = holders(model)
    if not parts or not hasattr(parts[0].config, "vocab_size"):
        raise ValueError(f"{type(model).__name__}: advise takes a language model of transformers that predicts masked "
                         "or next tokens; for models of images and speech compare runs of task=imagenet and "
                         "task=librispeech")
    name = type(parts[0]).__name__
    kinds = [kind for end, kind in HEADS.items() if name.endswith(end)]
    if not kinds:
        raise ValueError(f"{name} predicts no tokens, so it has no loss to compare: load it by AutoModelForCausalLM or "
                         "AutoModelForMaskedLM; task=fidelity compares the hidden states of bare encoders")
    if any("swapped" in part._modules for part in model.modules()):
        raise ValueError(f"this {name} is swapped already: call unswap_attention(model) first")
    return kinds[0]


@contextmanager
def peak_of(device: torch.device) -> Iterator[dict[str, float]]:
    """`mib`: the most memory within it beyond what was held before; nothing where the system does not say."""
    peak: dict[str, float] = {}
    gc.collect()
    before = _reset(device)
    yield peak
    if before is not None:
        peak["mib"] = (_peak(device) - before) / 2**20


def _reset(device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed goes back to the system, and does not hide a peak
        Path("/proc/self/clear_refs").write_text("5")
        return _peak(device)
    except (OSError, AttributeError, KeyError):
        return None


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024
