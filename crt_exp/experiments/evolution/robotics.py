"""task=locomotion and task=sweep: policies with implicit attention.

Trained by evolution strategies (HRF 4.4, Appendix K).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from crt_exp.atomic_write import atomic_path
from crt_exp.experiments.drawing import new_figure
from crt_exp.experiments.evolution import Player, Search, evolve, prepared, restored
from crt_exp.experiments.evolution.environments import SteppingStones, Sweeping
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
        film: Save an animation of the first test rollout.
    """

    metric, lower_is_better = "return", False
    name: str

    def __init__(
        self,
        world: type,
        options: Mapping[str, Any],
        looks: str,
        policy: Policy,
        strategy: Strategy,
        workers: int,
        film: bool,
    ):
        self.filmed = film
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
            looks="average" if looks == "average" else "attention",
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

    def save_results(self, records: list[dict], directory: Path) -> None:
        """With `film`, write film.gif of the first test rollout to the run directory."""
        if self.filmed and self.looks != "random":
            theta = restored(directory, len(records)).theta
            film(self.played, theta, records[-1]["seeds"][0], directory / "film.gif")

    def records(
        self, mechanism: Mechanism, seed: int, done: list[dict] = ()
    ) -> Iterator[dict[str, Any]]:
        self.played = self.player(mechanism)
        return evolve(self.plan, self.played, seed, len(done), self.directory)

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        dropped, dropped_in_training = 0, 0
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
        environment: str,
        size: Count,
        seconds: Positive,
        looks: Looks,
        policy: Policy,
        strategy: Strategy,
        workers: Count,
        film: bool = False,
    ):
        options = {"environment": environment, "size": size, "seconds": seconds}
        super().__init__(SteppingStones, options, looks, policy, strategy, workers, film)


@checked("task")
class Sweep(Robotics):
    """task=sweep: two arms sweep particles into a bowl; returns are shares in [0, 1]."""

    name = "sweep"

    def __init__(
        self,
        particles: Annotated[int, Field(ge=2, le=PARTICLES)],
        strokes: Count,
        size: Count,
        looks: Looks,
        policy: Policy,
        strategy: Strategy,
        workers: Count,
        film: bool = False,
    ):
        options = {"particles": particles, "strokes": strokes, "size": size}
        super().__init__(Sweeping, options, looks, policy, strategy, workers, film)


# ---- animation of a rollout: the world from above, and the image with the selected patches


EVERY = 2  # servo commands per frame
PER_SECOND = 10  # frames
MOST = 120  # maximum number of frames
INK, SELECTED = "0.25", "tab:red"


def film(player: Player, theta: Tensor, seed: int, path: Path) -> None:
    """Write a GIF of the rollout of a seed by the policy theta (N,).

    The GIF has at most MOST frames.
    """
    (world,), layer = prepared(player, 1)
    figure, axes = new_figure(1, 2, figsize=(6.4, 3.2), layout="constrained")
    import matplotlib.pyplot as plt
    from matplotlib.animation import PillowWriter

    writer = PillowWriter(fps=PER_SECOND)
    commands = 0

    def draw_command(_: Any) -> None:
        nonlocal commands
        commands += 1
        if commands % EVERY == 0 and commands // EVERY <= MOST:
            draw_world(axes[0], world)
            writer.grab_frame()

    policy = player.policy
    with atomic_path(path, ".gif") as part, writer.saving(figure, str(part), dpi=70):
        observation = world.reset(seed)
        ended = False
        total = 0.0
        world.watch = draw_command
        while not ended:
            image, state = (torch.from_numpy(np.asarray(t))[None].float() for t in observation)
            selected = policy.selected_patches(layer, theta[None], image)[0].amax(0)
            draw_image(axes[1], observation.image[0], selected, player, total)
            action = policy.act(layer, theta[None], image, state)[0].numpy()
            observation, reward, ended = world.step(action)
            total += reward
    world.watch = None
    plt.close(figure)


def draw_image(
    axes: Any, image: np.ndarray, selected: Tensor, player: Player, total: float
) -> None:
    """Draw the image, near rows at the bottom, with frames around selected patches."""
    from matplotlib.patches import Rectangle

    axes.clear()
    cmap = "Greys" if image.max() > 1 else "Greys_r"
    axes.imshow(image, cmap=cmap, origin="lower")
    patch = player.policy.patch
    side = player.policy.size // patch
    for row, column in selected.view(side, side).nonzero().tolist():
        corner = [patch * column - 0.5, patch * row - 0.5]
        axes.add_patch(Rectangle(corner, patch, patch, fill=False, edgecolor=SELECTED, linewidth=2))
    axes.set(xticks=[], yticks=[], title=f"what it attends to; return {total:.2f}")


def draw_world(axes: Any, world: Any) -> None:
    """Draw bodies from above: capsules as lines, boxes as polygons, others as circles."""
    import mujoco
    from matplotlib.patches import Circle, Polygon

    axes.clear()
    model, data = world.model, world.data
    for i in range(model.ngeom):
        position = data.geom_xpos[i]
        rotation = data.geom_xmat[i].reshape(3, 3)
        kind = model.geom_type[i]
        size = model.geom_size[i]
        if kind == mujoco.mjtGeom.mjGEOM_CAPSULE:
            half = size[1] * rotation[:, 2]
            ends = np.stack([position - half, position + half])
            axes.plot(ends[:, 0], ends[:, 1], color=INK, linewidth=4, solid_capstyle="round")
        elif kind == mujoco.mjtGeom.mjGEOM_BOX:
            corners = size[:2] * [[1, 1], [1, -1], [-1, -1], [-1, 1]]
            outline = (position + np.c_[corners, np.zeros(4)] @ rotation.T)[:, :2]
            is_stone = model.body_mocapid[model.geom_bodyid[i]] >= 0
            color, zorder = ("0.8", 0) if is_stone else (INK, 3)
            axes.add_patch(Polygon(outline, color=color, zorder=zorder))
        else:
            color = SELECTED if i > 0 and size[0] < 0.1 else INK
            axes.add_patch(Circle(position[:2], size[0], color=color, zorder=4))
    x, y = world.view()
    axes.set(xlim=x, ylim=y, xticks=[], yticks=[], aspect="equal", title="from above")
    for circle in world.circles():
        axes.add_patch(Circle(*circle, fill=False, color="tab:green", linewidth=2))
