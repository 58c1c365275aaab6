"""An Ant on stepping stones: its body is that of gymnasium, its gait is fixed, and a policy says where the gait leads.

The ground ahead is a row of stones with gaps between and on both sides, shifted to the left or right of one another. A
foot in a gap makes the Ant fall, so that the stones must be seen. The paper has a quadruped whose high level chooses
where feet go and whose low level is a controller (HRF K.1): here the high level chooses how far each diagonal pair of
legs strides, which is a speed and a direction, and the low level is a trot of position servos.

Frame: x is forward, y to the left, z up; metres, seconds, radians.
"""

from pathlib import Path

import numpy as np

from crt_exp.config import unknown
from crt_exp.environments.base import Observation, need

BODIES = ("Ant-v5", "Ant-v4")
STONES = 8
DEPTH = 0.6                         # of gaps
FIRST = 0.75                        # half the length of the first stone, on which the Ant stands
WIDTH = 1.25                        # half the width of stones
LENGTHS, GAPS, SHIFTS, UNEVEN = (0.9, 1.2), (0.05, 0.15), (0.5, 0.7), 0.02
TURNS = 0.2                         # how often a shift is to the other side than the one before
PERIOD, SERVO, STEP = 0.7, 0.05, 0.0125  # of a step of both pairs; between orders; of physics
STAND, LIFT, STRIDE, SHORT = 1.0, 0.35, 0.45, 0.0
TURN, HEADING = 0.15, 1.0           # most that hips turn to keep the heading, and for how much of a wrong one
LEGS = np.array([1, -1, -1, 1])     # sign of the ankle's bend of legs 1 to 4, at 45, 135, 225 and 315 degrees
FORWARD = np.array([1, 1, -1, -1])  # sign by which a hip takes the foot back
AIM, AHEAD = -4.0, 1.5              # of the controller that learning begins with: away from what is looked at
FALLEN = 0.27                       # height of the torso above the stones; standing it is 0.55
UNIT = 0.15                         # of heights in the picture
NEAR, FAR, SIDE = 0.2, 1.8, 1.0     # of the picture: ahead from where to where, and how far to each side


class SteppingStones:
    """environment: "Ant-v5" of gymnasium. size: of the picture, pixels. seconds: of a rollout, which ends before where
    the Ant falls. The return is the way it came forward, in metres.

    Picture (1, size, size): the height of the ground in the Ant's heading, rows from near to far, columns from left to
    right; about 0 is a stone, -4 a gap. Action: the strides of the pair of legs 1 and 3 and of the pair 2 and 4, -1 for
    SHORT and 1 for STRIDE: equal strides lead ahead, unequal ones to a side.
    """

    channels, states, actions = 1, 4, 2
    lead, watch = np.array([[[0, 0], [AIM, -AIM], [AHEAD, AHEAD]]]), None

    def __init__(self, environment: str = "Ant-v5", size: int = 16, seconds: float = 12.0):
        need("locomotion", "gymnasium", "mujoco")
        if environment not in BODIES:
            raise unknown("environment", environment, list(BODIES))
        self.size, self.decisions = size, round(seconds / (PERIOD / 2))
        self.model, self.data = body()
        self.boxes = [self.model.geom(f"stone_{i}").id for i in range(STONES)]
        joints = [f"{part}_{leg}" for leg in (1, 2, 3, 4) for part in ("hip", "ankle")]
        order = [self.model.joint(self.model.actuator_trnid[i, 0]).name for i in range(self.model.nu)]
        self.servos = np.array([order.index(name) for name in joints]).reshape(4, 2)
        self.places = np.array([self.model.joint(name).qposadr[0] for name in joints]).reshape(4, 2)

    def reset(self, seed: int) -> Observation:
        import mujoco

        self.time, self.stones = 0, course(np.random.default_rng(seed))
        mujoco.mj_resetData(self.model, self.data)
        for i, (x, y, z, half) in enumerate(self.stones):
            self.data.mocap_pos[i] = x, y, z - DEPTH / 2
            self.model.geom_size[self.boxes[i]] = size = half, WIDTH, DEPTH / 2
            self.model.geom_rbound[self.boxes[i]] = np.linalg.norm(size)
        self.data.qpos[:7] = 0, 0, 0.6, 1, 0, 0, 0
        self.data.qpos[self.places[:, 1]] = LEGS * STAND
        mujoco.mj_forward(self.model, self.data)
        return self.seen()

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool]:
        """One half of the gait: one pair of legs stands and pushes, the other swings."""
        import mujoco

        before, strides = self.data.qpos[0], SHORT + (STRIDE - SHORT) * (np.asarray(action, float) + 1) / 2
        for k in range(ticks := round(PERIOD / 2 / SERVO)):
            self.order(strides, (k + 1) / ticks)
            mujoco.mj_step(self.model, self.data, nstep=round(SERVO / STEP))
            if self.watch:
                self.watch(self)
        self.time += 1
        fallen = not self.data.qpos[2] > FALLEN
        return self.seen(), float(self.data.qpos[0] - before), fallen or self.time == self.decisions

    def order(self, strides: np.ndarray, phase: float) -> None:
        """Sets the servos at a phase, 0 to 1, of the half of the gait."""
        pushes = np.arange(4) % 2 == self.time % 2
        turn = np.clip(HEADING * self.yaw, -TURN, TURN)
        swing = (FORWARD * strides[[0, 1, 0, 1]] + turn) * (2 * phase - 1)
        self.data.ctrl[self.servos[:, 0]] = np.where(pushes, swing, -swing)
        self.data.ctrl[self.servos[:, 1]] = LEGS * np.where(pushes, STAND, STAND - LIFT * np.sin(np.pi * phase))

    def view(self):
        x, y = self.data.qpos[:2]
        return (x - 1.5, x + 2.5), (y - 2, y + 2)

    @property
    def yaw(self) -> float:
        w, x, y, z = self.data.qpos[3:7]
        return float(np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)))

    def seen(self) -> Observation:
        x, y, z = self.data.qpos[:3]
        state = np.array([np.sin(self.yaw), self.data.qvel[1], 2.0 * (self.time % 2) - 1, 4 * (z - 0.55)])
        return Observation(heights(self.stones, x, y, self.yaw, self.size)[None], state)


def course(rng: np.random.Generator) -> np.ndarray:
    """Centre x, y, height of the top and half the length of each stone, (STONES, 4)."""
    halves = np.r_[FIRST, rng.uniform(*LENGTHS, STONES - 1) / 2]
    gaps = np.r_[0.0, rng.uniform(*GAPS, STONES - 1)]
    ends = np.cumsum(2 * halves + gaps) - FIRST
    sense = rng.choice([-1, 1]) * np.cumprod(np.where(rng.random(STONES - 1) < TURNS, -1, 1))
    sides = np.r_[0.0, np.cumsum(sense * rng.uniform(*SHIFTS, STONES - 1))]
    return np.stack([ends - halves, sides, np.r_[0.0, rng.uniform(-UNEVEN, UNEVEN, STONES - 1)], halves], 1)


def heights(stones: np.ndarray, x: float, y: float, yaw: float, size: int) -> np.ndarray:
    """The picture (size, size), in steps of 0.15 m: about 0 is a stone, -4 a gap."""
    share = (np.arange(size) + 0.5) / size                                 # of the side, to the centre of a pixel
    ahead, left = NEAR + (FAR - NEAR) * share[:, None], SIDE * (1 - 2 * share)
    at_x = x + np.cos(yaw) * ahead - np.sin(yaw) * left
    at_y = y + np.sin(yaw) * ahead + np.cos(yaw) * left
    image = np.full((size, size), -DEPTH / UNIT)
    for centre, side, top, half in stones:
        image[(abs(at_x - centre) <= half) & (abs(at_y - side) <= WIDTH)] = top / UNIT
    return image


def body():
    """gymnasium's Ant with servos in place of motors, lighter rotors and a smaller time step, and stones for its floor.
    """
    import gymnasium
    import mujoco

    spec = mujoco.MjSpec.from_file(str(Path(gymnasium.__file__).parent / "envs/mujoco/assets/ant.xml"))
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.timestep = STEP
    for joint in spec.joints:
        if joint.name != "root":
            joint.armature, joint.damping = 0.02, np.full((3, 1), 0.5)
    for motor in spec.actuators:
        motor.set_to_position(kp=60, kv=2)
        motor.gear, motor.ctrlrange = [1, 0, 0, 0, 0, 0], [-1.6, 1.6]
    spec.delete(spec.geom("floor"))
    for i in range(STONES):
        stone = spec.worldbody.add_body(name=f"stone_{i}", mocap=True)  # what does not move itself, and can be moved
        stone.add_geom(name=f"stone_{i}", type=mujoco.mjtGeom.mjGEOM_BOX, size=[FIRST, WIDTH, DEPTH / 2], conaffinity=1,
                       friction=[1, 0.5, 0.5])
    model = spec.compile()
    return model, mujoco.MjData(model)
