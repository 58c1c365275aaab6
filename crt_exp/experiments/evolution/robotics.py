"""task=locomotion and task=arm_sweeping: policies with implicit attention.

Trained by evolution strategies (HRF 4.4, Appendix K).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import Field

from crt_exp.experiments.evolution import Player, Strategy, evolve
from crt_exp.experiments.evolution.environments import Environment, SteppingStones, SweepingArms
from crt_exp.experiments.models.implicit_policy import ImplicitPolicy
from crt_exp.experiments.tasks.base import Measurement, Record, task_class
from crt_exp.mechanism import Mechanism
from crt_exp.validation import Count, Positive

PARTICLES = 256  # maximum: the time grows with the cube, and a stroke takes 2 s with 200 particles, minutes with 800
Looks = Literal["attention", "average", "random"]


class Policy(TypedDict):
    """Options of `ImplicitPolicy` apart from the sizes of its environment."""

    patch: Count
    d: Annotated[int, Field(ge=2)]
    heads: Count
    top: Count


@dataclass(eq=False)
class Robotics(Measurement):
    """A task that trains a policy by evolution strategies.

    The state of a run is stored in `directory`, which the runner sets.

    Args:
        looks: "attention", or a control: "average" of all patches, or "random" actions.
        policy: Sizes of ImplicitPolicy.
        strategy: Options of the evolution strategy.
        workers: Number of processes, without effect on results.
        size: Pixels of a side of the image.

    Attributes:
        world: Class of the environment.
        world_options: Names of the options that the environment takes.
    """

    metric = "return"
    lower_is_better = False
    name: ClassVar[str]

    world: ClassVar[type[Environment]]
    world_options: ClassVar[tuple[str, ...]]
    looks: Looks
    policy: Policy
    strategy: Strategy
    workers: Count
    size: Count

    def __post_init__(self):
        world = self.world(**self.options)  # raises errors before anything is written
        self.model = ImplicitPolicy(
            world.channels,
            world.size,
            world.states,
            world.actions,
            **self.policy,
            attends=self.looks != "average",
        )

    @property
    def options(self) -> dict[str, Any]:
        """Options of the environment."""
        return {name: getattr(self, name) for name in self.world_options}

    @property
    def uses(self) -> frozenset[str]:
        return super().uses if self.looks == "attention" else frozenset()

    @classmethod
    def measures_whole(cls, mechanism: Mechanism) -> bool:
        return True  # any attention can rank patches

    def records(self, mechanism: Mechanism, seed: int, done: list[Record] = ()) -> Iterator[Record]:
        policy = None if self.looks == "random" else self.model
        player = Player(self.world, tuple(self.options.items()), policy, mechanism)
        return evolve(self.strategy, self.workers, player, seed, len(done), self.directory)

    def summary(self, records: list[Record]) -> str:
        last = records[-1]
        return (
            f"{self.name}: return {last['return']:.3f} ± {last['std']:.3f} over {len(last['returns'])} rollouts "
            f"(test, {last['rollouts']} rollouts of training)"
        )


@task_class
class Locomotion(Robotics):
    """task=locomotion: gymnasium's Ant on stepping stones; returns in metres."""

    name = "locomotion"
    world = SteppingStones

    world_options = ("size", "seconds")

    seconds: Positive


@task_class
class ArmSweeping(Robotics):
    """task=arm_sweeping: two arms sweep particles into a bowl; returns are shares in [0, 1]."""

    name = "arm_sweeping"
    world = SweepingArms

    world_options = ("size", "particles")

    particles: Annotated[int, Field(ge=2, le=PARTICLES)]
