"""A rollout as an animation: the world from above, and the image with the patches that the policy keeps.

Everything is drawn by matplotlib from the positions of bodies: no display and no GL is needed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.drawing import new_figure
from crt_exp.probes.rollouts import Player, prepared
from crt_exp.whole_files import whole

EVERY, PER_SECOND = 2, 10           # orders to the servos for each frame; frames of a second
INK, KEPT = "0.25", "tab:red"


def film(player: Player, theta: Tensor, seed: int, path: Path, most: int = 120) -> Path:
    """Writes a GIF of the rollout of a seed by the policy theta (N,), of at most so many frames."""
    (world,), layer = prepared(player, 1)
    figure, axes = new_figure(1, 2, figsize=(6.4, 3.2), layout="constrained")
    import matplotlib.pyplot as plt
    from matplotlib.animation import PillowWriter

    writer, orders = PillowWriter(fps=PER_SECOND), []

    def watch(seen: Any) -> None:
        orders.append(seen)
        if len(orders) % EVERY == 0 and len(orders) // EVERY <= most:
            draw_world(axes[0], world)
            writer.grab_frame()

    with whole(path, ".gif") as part, writer.saving(figure, str(part), dpi=70):
        seen, ended, total = world.reset(seed), False, 0.0
        world.watch = watch
        while not ended:
            images, states = (torch.from_numpy(np.asarray(each))[None].float() for each in seen)
            draw_image(axes[1], seen.image[0], player.policy.kept(layer, theta[None], images)[0].amax(0), player, total)
            seen, reward, ended = world.step(player.policy.act(layer, theta[None], images, states)[0].numpy())
            total += reward
    world.watch = None
    plt.close(figure)
    return path


def draw_image(axes: Any, image: np.ndarray, kept: Tensor, player: Player, total: float) -> None:
    """The image, near rows below, and the kept patches as frames."""
    axes.clear()
    axes.imshow(image, cmap="Greys" if image.max() > 1 else "Greys_r", origin="lower")
    side, patch = player.policy.size // player.policy.patch, player.policy.patch
    for place in kept.view(side, side).nonzero().tolist():
        corner = [patch * place[1] - 0.5, patch * place[0] - 0.5]
        axes.add_patch(rectangle(corner, patch, patch))
    axes.set(xticks=[], yticks=[], title=f"what it attends to; return {total:.2f}")


def rectangle(corner: list[float], width: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, fill=False, edgecolor=KEPT, linewidth=2)


def draw_world(axes: Any, world: Any) -> None:
    """All bodies from above: capsules as lines, boxes as polygons, discs and balls as circles."""
    import mujoco
    from matplotlib.patches import Circle, Polygon

    axes.clear()
    model, data, kinds = world.model, world.data, mujoco.mjtGeom
    for i in range(model.ngeom):
        at, turn, size = data.geom_xpos[i], data.geom_xmat[i].reshape(3, 3), model.geom_size[i]
        if model.geom_type[i] == kinds.mjGEOM_CAPSULE:
            ends = np.stack([at - size[1] * turn[:, 2], at + size[1] * turn[:, 2]])
            axes.plot(ends[:, 0], ends[:, 1], color=INK, linewidth=4, solid_capstyle="round")
        elif model.geom_type[i] == kinds.mjGEOM_BOX:
            corners = size[:2] * [[1, 1], [1, -1], [-1, -1], [-1, 1]]
            stone = model.body_mocapid[model.geom_bodyid[i]] >= 0
            axes.add_patch(Polygon((at + np.c_[corners, np.zeros(4)] @ turn.T)[:, :2], color="0.8" if stone else INK,
                                   zorder=0 if stone else 3))
        else:
            axes.add_patch(Circle(at[:2], size[0], color=KEPT if i > 0 and size[0] < 0.1 else INK, zorder=4))
    x, y = world.view()
    axes.set(xlim=x, ylim=y, xticks=[], yticks=[], aspect="equal", title="from above")
    for circle in getattr(world, "circles", list)():
        axes.add_patch(Circle(*circle, fill=False, color="tab:green", linewidth=2))
