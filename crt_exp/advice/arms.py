"""The attention that is tried: the model's own, near-far attention, a window, random features, and the floor."""

from dataclasses import dataclass, field
from typing import Any

from crt_exp.options import join_words
from crt_exp.mechanism import Mechanism

EXACT, FLOOR, NEAR_FAR = "exact", "uniform", "nearfar"


@dataclass(frozen=True)
class Arm:
    """A name and its options as `Mechanism.parse` takes them; `exact` is the model's own attention, unchanged."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What `Mechanism.parse` reads."""
        return join_words(self.name, self.options)

    def mechanism(self, seed: int = 0) -> Mechanism | None:
        """None for the model's own attention. Raises ConfigError for what conf/ does not have."""
        return None if self.name == EXACT else Mechanism.parse(self.label, seed=seed)

    def call(self) -> str:
        """The line of Python that applies it."""
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f'swap_attention(model, "{self.name}"{options})'


def candidates(quick: bool) -> list[Arm]:
    """The attention tried by default: first the model's own, last uniform attention, the control."""
    if quick:
        return [Arm(name) for name in (EXACT, NEAR_FAR, "window", "favorpp", FLOOR)]
    presets = ("cheap", "default", "quality")
    return [Arm(EXACT), *(Arm(NEAR_FAR, {"preset": preset}) for preset in presets), Arm("window"), Arm("favorsharp"),
            Arm("favorpp"), Arm(FLOOR)]
