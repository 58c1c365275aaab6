"""task=locomotion and task=sweep: policies with implicit attention, by evolution strategies (HRF 4.4, Appendix K)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from crt_exp.environments.arms import Sweeping
from crt_exp.environments.stones import SteppingStones
from crt_exp.hints import Bound, Count, Positive, Whole, at_least, at_most
from crt_exp.mechanism import Mechanism
from crt_exp.models.implicit_policy import ImplicitPolicy
from crt_exp.schema import checked
from crt_exp.probes.evolution import Search, evolve, restored
from crt_exp.probes.film import film
from crt_exp.probes.rollouts import Player

PARTICLES = 256  # time grows with their cube, for all of a heap touch: a stroke of 200 takes 2 s, one of 800 minutes
Looks = Literal["attention", "average", "random"]
Even = Annotated[int, at_least(2), Bound("that is even", lambda value: value % 2 == 0)]


class Policy(TypedDict):
    """What `ImplicitPolicy` has besides the sizes of its environment."""

    patch: Count
    d: Annotated[int, at_least(2)]
    heads: Count
    top: Count


class Strategy(TypedDict):
    """What `Search` explains."""

    generations: Whole
    population: Even
    rollouts: Count
    sigma: Positive
    lr: Positive
    evaluate_every: Count
    evaluated: Count
    tested: Count
    together: Count


class Robotics:
    """A task whose policy learns from its returns. looks: "attention"; or the controls, "average" of all patches and
    "random" actions. policy and strategy: sizes of ImplicitPolicy and of Search. workers: processes; the results do not
    depend on them. The state of a run lies in `directory`, which the runner gives.
    """

    metric, lower_is_better = "return", False
    measures_whole = staticmethod(lambda mechanism: True)  # any attention ranks patches
    directory: Path | None = None
    name: str

    def __init__(self, world: type, options: Mapping[str, Any], looks: str, policy: Policy, strategy: Strategy,
                 workers: int, film: bool):
        self.filmed = film
        self.world, self.options, self.looks = world, tuple(options.items()), looks
        self.plan = Search(**strategy, workers=workers)
        made = world(**options)  # whatever is wrong with it is said before anything is written
        sizes = (made.channels, made.size, made.states, made.actions)
        self.policy = ImplicitPolicy(*sizes, **policy, looks="average" if looks == "average" else "attention")

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"attention", "features", "sampler", "m"} if self.looks == "attention" else ())

    def player(self, mechanism: Mechanism) -> Player:
        return Player(self.world, self.options, None if self.looks == "random" else self.policy, mechanism)

    def keep(self, records: list[dict], directory: Path) -> None:
        """With `film` leaves film.gif in the run directory: the first rollout of the test."""
        if self.filmed and self.looks != "random":
            theta = restored(directory, len(records)).theta
            film(self.played, theta, records[-1]["seeds"][0], directory / "film.gif")

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        self.played = self.player(mechanism)
        return evolve(self.plan, self.played, seed, len(done), self.directory)

    def summary(self, records: list[dict]) -> str:
        last, dropped = records[-1], sum(r["dropped"] for r in records if r["split"] != "train")
        dropped += max((r["dropped"] for r in records if r["split"] == "train"), default=0)
        lost = f", {dropped} rollouts dropped" if dropped else ""
        return (f"{self.name}: return {last['return']:.3f} ± {last['std']:.3f} over {len(last['returns'])} rollouts "
                f"(test, {last['rollouts']} rollouts of training{lost})")


@checked("task")
class Locomotion(Robotics):
    """task=locomotion: gymnasium's Ant on stepping stones; returns in metres. See environments/stones.py."""

    name = "locomotion"

    def __init__(self, environment: str, size: Count, seconds: Positive, looks: Looks, policy: Policy,
                 strategy: Strategy, workers: Count, film: bool = False):
        options = {"environment": environment, "size": size, "seconds": seconds}
        super().__init__(SteppingStones, options, looks, policy, strategy, workers, film)


@checked("task")
class Sweep(Robotics):
    """task=sweep: two arms sweep particles into a bowl; returns as a share of them. See environments/arms.py."""

    name = "sweep"

    def __init__(self, particles: Annotated[int, at_least(2), at_most(PARTICLES)], strokes: Count, size: Count,
                 looks: Looks, policy: Policy, strategy: Strategy, workers: Count, film: bool = False):
        options = {"particles": particles, "strokes": strokes, "size": size}
        super().__init__(Sweeping, options, looks, policy, strategy, workers, film)
