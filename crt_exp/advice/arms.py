"""The attention that is tried: the model's own, near-far attention, a window, random features, and the floor."""

from dataclasses import dataclass, field
from typing import Any

from crt_exp.mechanism import Mechanism

EXACT, FLOOR = "exact", "uniform"


@dataclass(frozen=True)
class Arm:
    """A name of conf/attention with options of its file; `exact` is the model's own attention, unchanged."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    def mechanism(self, seed: int = 0) -> Mechanism | None:
        """None for the model's own attention. Raises ConfigError for what conf/ does not have."""
        return None if self.name == EXACT else Mechanism.of(self.name, seed=seed, **self.options)

    def call(self) -> str:
        """The line of Python that applies it."""
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f'swap_attention(model, "{self.name}"{options})'


def candidates(causal: bool) -> list[Arm]:
    """What is tried where the caller does not say: the first is the model's own attention, the last the floor."""
    presets = ("cheap", "default", "quality", *(["bounded"] if causal else []))
    return [Arm(EXACT), *(Arm("nearfar", {"preset": preset}) for preset in presets), Arm("window"), Arm("favorsharp"),
            Arm("favorpp"), Arm(FLOOR)]
