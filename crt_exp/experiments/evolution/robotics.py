"""task=locomotion and task=arm_sweeping: policies with implicit attention.

Trained by evolution strategies (HRF 4.4, Appendix K).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field

from crt_exp.experiments.evolution import Player, Search, evolve
from crt_exp.experiments.evolution.environments import SteppingStones, SweepingArms
from crt_exp.experiments.models.implicit_policy import ImplicitPolicy
from crt_exp.experiments.tasks.base import Measurement
from crt_exp.mechanism import Mechanism
from crt_exp.validation import Count, Positive, Whole, checked

PARTICLES = 256  # maximum: the time grows with the cube, and a stroke takes 2 s with 200 particles, minutes with 800
Looks = Literal["attention", "average", "random"]
Even = Annotated[int, Field(ge=2, multiple_of=2)]


class Policy(TypedDict):
    """Options of `ImplicitPolicy` apart from the sizes of its environment."""

    patch: Count
    d: Annotated[int, Field(ge=2)]
    heads: Count
    top: Count


class Strategy(TypedDict):
    """Options of `Search`."""

    generations: Whole
    population: Even
    rollouts: Count
    sigma: Positive
    lr: Positive
    evaluate_every: Count
    evaluated: Count
    tested: Count
    together: Count


class Robotics(Measurement):
    """A task that trains a policy by evolution strategies.

    The state of a run is stored in `directory`, which the runner sets.

    Args:
        world: Class of the environment, created with `options`.
        looks: "attention", or a control: "average" of all patches, or "random" actions.
        policy: Sizes of ImplicitPolicy.
        strategy: Options of Search.
        workers: Number of processes, without effect on results.
    """

    metric = "return"
    lower_is_better = False
    name: str

    def __init__(
        self,
        world: type,
        options: Mapping[str, Any],
        looks: str,
        policy: Policy,
        strategy: Strategy,
        workers: int,
    ):
        self.world = world
        self.options = tuple(options.items())
        self.looks = looks
        self.plan = Search(**strategy, workers=workers)
        environment = world(**options)  # raises errors before anything is written
        self.policy = ImplicitPolicy(
            environment.channels,
            environment.size,
            environment.states,
            environment.actions,
            **policy,
            attends=looks != "average",
        )

    @property
    def uses(self) -> frozenset[str]:
        return super().uses if self.looks == "attention" else frozenset()

    @classmethod
    def measures_whole(cls, mechanism: Mechanism) -> bool:
        return True  # any attention can rank patches

    def player(self, mechanism: Mechanism) -> Player:
        policy = None if self.looks == "random" else self.policy
        return Player(self.world, self.options, policy, mechanism)

    def records(
        self, mechanism: Mechanism, seed: int, done: list[dict] = ()
    ) -> Iterator[dict[str, Any]]:
        return evolve(self.plan, self.player(mechanism), seed, len(done), self.directory)

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        dropped = 0
        dropped_in_training = 0
        for record in records:
            if record["split"] == "train":  # counts are totals
                dropped_in_training = max(dropped_in_training, record["dropped"])
            else:
                dropped += record["dropped"]
        dropped += dropped_in_training
        note = f", {dropped} rollouts dropped" if dropped else ""
        return (
            f"{self.name}: return {last['return']:.3f} ± {last['std']:.3f} over {len(last['returns'])} rollouts "
            f"(test, {last['rollouts']} rollouts of training{note})"
        )


@checked("task")
class Locomotion(Robotics):
    """task=locomotion: gymnasium's Ant on stepping stones; returns in metres."""

    name = "locomotion"

    def __init__(
        self,
        size: Count,
        seconds: Positive,
        looks: Looks,
        policy: Policy,
        strategy: Strategy,
        workers: Count,
    ):
        options = {"size": size, "seconds": seconds}
        super().__init__(SteppingStones, options, looks, policy, strategy, workers)


@checked("task")
class ArmSweeping(Robotics):
    """task=arm_sweeping: two arms sweep particles into a bowl; returns are shares in [0, 1]."""

    name = "arm_sweeping"

    def __init__(
        self,
        particles: Annotated[int, Field(ge=2, le=PARTICLES)],
        size: Count,
        looks: Looks,
        policy: Policy,
        strategy: Strategy,
        workers: Count,
    ):
        options = {"particles": particles, "size": size}
        super().__init__(SweepingArms, options, looks, policy, strategy, workers)
