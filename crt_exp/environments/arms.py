"""Two planar arms that sweep particles into a bowl, written from simple bodies.

The paper has two arms, 12 coordinates, a camera image and red balls to be placed in green bowls (HRF K.2). Here each
arm has two links and a brush that can be lifted, particles are discs that slide on the table, and the image is the
table from above, computed from positions. A decision is one stroke of both arms: the brushes are lifted, go over the
places that the policy chose, come down, and drag what lies before them to the bowl. The low level, inverse kinematics
and servos, is fixed.

Frame: x to the right, y away from the arms, on the table; metres, seconds.
"""

import numpy as np

from crt_exp.environments.base import Observation, need

TABLE = 0.8                         # half of its side, and of what the image shows
BASES = np.array([[-0.45, -0.75], [0.45, -0.75]])
LINKS = 0.8                         # length of both links of an arm
BOWL, RADIUS = np.array([0.0, -0.25]), 0.25
ENDS = np.array([[-0.07, -0.25], [0.07, -0.25]])    # where strokes end
BRUSH, DISC = 0.09, 0.02            # half the width of a brush; radius of a particle
HEAP = 0.08                         # spread of the heap of particles
HEAPS = np.array([[-0.5, 0.5], [0.0, 0.55]])        # where it lies: least and most x, and y
CENTRE, RANGE = np.array([[-0.1, 0.35], [0.1, 0.35]]), np.array([0.6, 0.5])     # of the places that strokes begin at
LIFTED, OVER, DOWN, DRAG = 0.15, 0.3, 0.1, 0.45    # height of a lifted brush; how long the parts of a stroke take
STEP, SERVO = 0.0125, 0.05
MOST = 4                            # particles that a pixel shows


def where() -> np.ndarray:
    """The controller that learning begins with: strokes begin on both sides of where the head looks, (1, 3, 4)."""
    weights = np.zeros((3, 2, 2))
    weights[1, :, 0], weights[0, :, 1] = 2 * TABLE / RANGE
    weights[2] = (ENDS - ENDS.mean(0) - CENTRE) / RANGE
    return weights.reshape(1, 3, 4)


class Sweeping:
    """particles: in a heap on the table. strokes: of a rollout. size: of the image, pixels.
    The return is the share of particles within the bowl, the mean over the strokes.

    Image (1, size, size), rows from near to far, columns from left to right: how many particles lie in a pixel, at most
    MOST. The bowl stays where it is. Action: where the strokes of the left and the right arm begin, x and y of each.
    """

    channels, states, actions = 1, 1, 4
    lead, watch = where(), None

    def __init__(self, particles: int = 12, strokes: int = 3, size: int = 16):
        need("sweep", "mujoco")
        self.particles, self.strokes, self.size = particles, strokes, size
        self.model, self.data = table(particles)

    @property
    def places(self) -> np.ndarray:
        """Of the particles, (particles, 2)."""
        return self.home + self.data.qpos[6:].reshape(-1, 2)

    @property
    def within(self) -> float:
        """The share of particles within the bowl."""
        return float((np.linalg.norm(self.places - BOWL, axis=1) <= RADIUS).mean())

    def reset(self, seed: int) -> Observation:
        import mujoco

        mujoco.mj_resetData(self.model, self.data)
        self.stroke, self.home = 0, np.zeros((self.particles, 2))
        self.data.qpos[6:] = heap(np.random.default_rng(seed), self.particles).flatten()
        self.tips = ENDS.copy()
        self.order(self.tips, LIFTED)
        self.data.qpos[:6] = self.data.ctrl
        mujoco.mj_forward(self.model, self.data)
        return self.seen()

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool]:
        begin = CENTRE + RANGE * np.asarray(action, float).reshape(2, 2)
        self.move(begin, LIFTED, OVER)
        self.move(begin, 0.0, DOWN)
        self.move(ENDS, 0.0, DRAG)
        self.move(ENDS, LIFTED, DOWN)
        self.stroke += 1
        return self.seen(), self.within / self.strokes, self.stroke == self.strokes

    def move(self, tips: np.ndarray, height: float, seconds: float) -> None:
        """Takes the brushes along a straight line."""
        import mujoco

        start, ticks = self.tips, round(seconds / SERVO)
        for k in range(ticks):
            self.order(start + (tips - start) * (k + 1) / ticks, height)
            mujoco.mj_step(self.model, self.data, nstep=round(SERVO / STEP))
            if self.watch:
                self.watch(self)
        self.tips = tips

    def order(self, tips: np.ndarray, height: float) -> None:
        """Sets the servos: shoulder, elbow and brush of each arm."""
        for arm, (tip, base, outward) in enumerate(zip(tips, BASES, (1, -1))):
            shoulder, elbow = bent(tip - base, outward)
            self.data.ctrl[3 * arm:3 * arm + 3] = shoulder, elbow, height

    def view(self):
        return (-1.0, 1.0), (-1.0, 1.0)

    def circles(self) -> list[tuple]:
        """Centre and radius of what is no body."""
        return [(BOWL, RADIUS)]

    def seen(self) -> Observation:
        count = np.zeros((self.size, self.size))
        pixel = 2 * TABLE / self.size
        column, row = np.floor((self.places.T + TABLE) / pixel).astype(int)
        inside = (column >= 0) & (column < self.size) & (row >= 0) & (row < self.size)
        np.add.at(count, (row[inside], column[inside]), 1)
        return Observation(np.minimum(count, MOST)[None], np.array([self.within]))


def bent(reach: np.ndarray, outward: int) -> tuple[float, float]:
    """Angles of shoulder and elbow that bring the tip there, or as near as it gets; the elbow outward."""
    distance = np.clip(np.hypot(*reach), 0.05, 2 * LINKS - 0.01)
    inner = np.arccos(distance / 2 / LINKS)
    return float(np.arctan2(reach[1], reach[0]) + outward * inner), float(-2 * outward * inner)


def heap(rng: np.random.Generator, particles: int) -> np.ndarray:
    """Places of particles, (particles, 2)."""
    return rng.uniform(*HEAPS.T) + HEAP * rng.standard_normal((particles, 2))


def table(particles: int):
    """The model: joints of both arms first, then x and y of each particle; servos in the order of the arms' joints."""
    import mujoco

    slide, hinge = mujoco.mjtJoint.mjJNT_SLIDE, mujoco.mjtJoint.mjJNT_HINGE
    capsule, box, disc = (getattr(mujoco.mjtGeom, f"mjGEOM_{name}") for name in ("CAPSULE", "BOX", "CYLINDER"))
    spec = mujoco.MjSpec()
    spec.option.integrator, spec.option.timestep = mujoco.mjtIntegrator.mjINT_IMPLICITFAST, STEP
    spec.option.gravity = [0, 0, 0]                      # the table carries everything
    for arm, base in enumerate(BASES):
        parent = spec.worldbody.add_body(pos=[*base, 0.3])
        for joint in ("shoulder", "elbow"):
            parent.add_joint(name=f"{joint}_{arm}", type=hinge, axis=[0, 0, 1], damping=[0.5, 0, 0])
            parent.add_geom(type=capsule, fromto=[0, 0, 0, LINKS, 0, 0], size=[0.03, 0, 0], mass=0.5, contype=0,
                            conaffinity=0)
            parent = parent.add_body(pos=[LINKS, 0, 0])
        parent.add_joint(name=f"brush_{arm}", type=slide, axis=[0, 0, 1], damping=[1.0, 0, 0])
        parent.add_geom(type=box, size=[0.02, BRUSH, 0.04], pos=[0, 0, -0.27], mass=0.1, contype=2, conaffinity=1)
        for joint in ("shoulder", "elbow", "brush"):
            servo = spec.add_actuator(name=f"{joint}_{arm}", target=f"{joint}_{arm}",
                                      trntype=mujoco.mjtTrn.mjTRN_JOINT)
            servo.set_to_position(kp=60, kv=4)
    for i in range(particles):
        body = spec.worldbody.add_body(pos=[0, 0, 0.02])
        for axis, joint in (([1, 0, 0], "x"), ([0, 1, 0], "y")):
            body.add_joint(name=f"{joint}_{i}", type=slide, axis=axis, damping=[0.5, 0, 0])
        body.add_geom(type=disc, size=[DISC, 0.02, 0], mass=0.02, contype=1, conaffinity=3)
    model = spec.compile()
    return model, mujoco.MjData(model)
