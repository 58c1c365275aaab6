"""Environments: an Ant on stepping stones, two arms that sweep particles.

x and y are horizontal, z is up. Units: metres, seconds, radians.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

# time steps of the servo commands and of the physics
SERVO = 0.05
STEP = 0.0125


class Observation(NamedTuple):
    """image (C, H, W), the input of attention; state (S,), of the body itself."""

    image: np.ndarray
    state: np.ndarray


class Environment(Protocol):
    """An environment: equal seeds and actions give equal results.

    Results do not depend on earlier rollouts.
    """

    channels: int
    size: int  # H = W of the image
    states: int
    actions: int
    lead: np.ndarray  # (heads, 3, A), initial controller: see ImplicitPolicy.initial

    def reset(self, seed: int) -> Observation:
        """Begin a rollout."""

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool]:
        """Take an action (A,) in [-1, 1]; return observation, reward and end flag."""


# ---- an Ant on stepping stones ---------------------------------------------------------------------------------------
# The body is gymnasium's Ant with a fixed gait; the policy chooses the direction. The ground is a row of stones, with
# gaps between them and on both sides, shifted to the left or right. The Ant falls if it steps into a gap, so it needs
# to see the stones. The paper has a quadruped whose high level places the feet, and whose low level is a controller
# (HRF K.1). Here the high level chooses the stride of each diagonal pair of legs, which sets speed and direction, and
# the low level is a trot of position servos. x is forward, y to the left.
STONES = 8
DEPTH = 0.6  # depth of gaps
FIRST = 0.75  # half the length of the first stone, where the Ant starts
WIDTH = 1.25  # half the width of stones
LENGTHS = (0.9, 1.2)
GAPS = (0.05, 0.15)
SHIFTS = (0.5, 0.7)
UNEVEN = 0.02
TURNS = 0.2  # probability that the direction of the shift changes
PERIOD = 0.7  # period of the gait
STAND = 1.0
LIFT = 0.35
STRIDE = 0.45
SHORT = 0.0
# maximum correction of the heading by the hips, and its gain
TURN = 0.15
HEADING = 1.0
# sign of the ankle's bend of legs 1 to 4, at 45, 135, 225 and 315 degrees
LEGS = np.array([1, -1, -1, 1])
FORWARD = np.array([1, 1, -1, -1])  # sign of the hip angle that moves the foot back
# weights of the initial controller, which turns away from the attended patches
AIM = -4.0
AHEAD = 1.5
FALLEN = 0.27  # torso height below which the Ant has fallen; standing: 0.55
UNIT = 0.15  # unit of heights in the image
# area of the image: distance ahead from NEAR to FAR, SIDE to the left and right
NEAR = 0.2
FAR = 1.8
SIDE = 1.0


class SteppingStones:
    """gymnasium's Ant on stepping stones; the return is the distance in metres.

    Image (1, size, size): height of the ground ahead, in units of 0.15 m, rows from near to far, columns from left to
    right. Stones are about 0, gaps -4. Action: strides of the leg pairs (1, 3) and (2, 4), from SHORT at -1 to STRIDE
    at 1. Equal strides lead straight ahead.

    Args:
        size: Pixels of a side of the image.
        seconds: Maximum length of a rollout, which ends if the Ant falls.
    """

    channels = 1
    states = 4
    actions = 2
    lead = np.array([[[0, 0], [AIM, -AIM], [AHEAD, AHEAD]]])

    def __init__(self, size: int = 16, seconds: float = 12.0):
        self.size = size
        self.decisions = round(seconds / (PERIOD / 2))
        self.model, self.data = body()
        self.boxes = [self.model.geom(f"stone_{i}").id for i in range(STONES)]
        joints = np.arange(1, 9).reshape(4, 2)  # hip and ankle of each leg; joint 0 is the root
        self.places = self.model.jnt_qposadr[joints]
        joint_of_servo = self.model.actuator_trnid[:, 0]
        self.servos = np.argsort(joint_of_servo).reshape(4, 2)

    def reset(self, seed: int) -> Observation:
        import mujoco

        self.time = 0
        self.stones = course(np.random.default_rng(seed))
        mujoco.mj_resetData(self.model, self.data)
        for i, (x, y, top, half_length) in enumerate(self.stones):
            size = (half_length, WIDTH, DEPTH / 2)
            self.data.mocap_pos[i] = x, y, top - DEPTH / 2
            self.model.geom_size[self.boxes[i]] = size
            self.model.geom_rbound[self.boxes[i]] = np.linalg.norm(size)
        self.data.qpos[:7] = 0, 0, 0.6, 1, 0, 0, 0
        self.data.qpos[self.places[:, 1]] = LEGS * STAND
        mujoco.mj_forward(self.model, self.data)
        return self.seen()

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool]:
        """Take half a gait period: one pair of legs pushes, the other swings."""
        import mujoco

        before = self.data.qpos[0]
        strides = SHORT + (STRIDE - SHORT) * (np.asarray(action, float) + 1) / 2
        ticks = round(PERIOD / 2 / SERVO)
        for tick in range(ticks):
            self.order(strides, (tick + 1) / ticks)
            mujoco.mj_step(self.model, self.data, nstep=round(SERVO / STEP))
        self.time += 1
        fallen = not self.data.qpos[2] > FALLEN
        distance = float(self.data.qpos[0] - before)
        return self.seen(), distance, fallen or self.time == self.decisions

    def order(self, strides: np.ndarray, phase: float) -> None:
        """Set the servos at a phase, 0 to 1, of half a gait period."""
        pushes = np.arange(4) % 2 == self.time % 2
        turn = np.clip(HEADING * self.yaw, -TURN, TURN)
        swing = (FORWARD * strides[[0, 1, 0, 1]] + turn) * (2 * phase - 1)
        lifted = STAND - LIFT * np.sin(np.pi * phase)
        self.data.ctrl[self.servos[:, 0]] = np.where(pushes, swing, -swing)
        self.data.ctrl[self.servos[:, 1]] = LEGS * np.where(pushes, STAND, lifted)

    @property
    def yaw(self) -> float:
        w, x, y, z = self.data.qpos[3:7]
        return float(np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)))

    def seen(self) -> Observation:
        x, y, z = self.data.qpos[:3]
        side_speed = self.data.qvel[1]
        pair = 2.0 * (self.time % 2) - 1
        state = np.array([np.sin(self.yaw), side_speed, pair, 4 * (z - 0.55)])
        image = heights(self.stones, x, y, self.yaw, self.size)
        return Observation(image[None], state)


def course(rng: np.random.Generator) -> np.ndarray:
    """Return x, y, top height and half the length of each stone, (STONES, 4)."""
    further = STONES - 1  # stones after the first
    half_lengths = np.r_[FIRST, rng.uniform(*LENGTHS, further) / 2]
    gaps = np.r_[0.0, rng.uniform(*GAPS, further)]
    ends = np.cumsum(2 * half_lengths + gaps) - FIRST
    first_sense = rng.choice([-1, 1])
    sense = first_sense * np.cumprod(np.where(rng.random(further) < TURNS, -1, 1))
    sides = np.r_[0.0, np.cumsum(sense * rng.uniform(*SHIFTS, further))]
    tops = np.r_[0.0, rng.uniform(-UNEVEN, UNEVEN, further)]
    return np.stack([ends - half_lengths, sides, tops, half_lengths], 1)


def heights(stones: np.ndarray, x: float, y: float, yaw: float, size: int) -> np.ndarray:
    """Return the height map (size, size), in units of 0.15 m."""
    share = (np.arange(size) + 0.5) / size  # relative positions of pixel centres
    ahead = NEAR + (FAR - NEAR) * share[:, None]
    left = SIDE * (1 - 2 * share)
    at_x = x + np.cos(yaw) * ahead - np.sin(yaw) * left
    at_y = y + np.sin(yaw) * ahead + np.cos(yaw) * left
    image = np.full((size, size), -DEPTH / UNIT)
    for centre, side, top, half_length in stones:
        is_stone = (abs(at_x - centre) <= half_length) & (abs(at_y - side) <= WIDTH)
        image[is_stone] = top / UNIT
    return image


def body():
    """Build the model: gymnasium's Ant with position servos, and stones as floor.

    Rotors are lighter, and the time step is smaller, than in gymnasium.
    """
    import gymnasium
    import mujoco

    spec = mujoco.MjSpec.from_file(
        str(Path(gymnasium.__file__).parent / "envs/mujoco/assets/ant.xml")
    )
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.timestep = STEP
    for joint in spec.joints:
        if joint.name != "root":
            joint.armature = 0.02
            joint.damping = np.full((3, 1), 0.5)
    for motor in spec.actuators:
        motor.set_to_position(kp=60, kv=2)
        motor.gear = [1, 0, 0, 0, 0, 0]
        motor.ctrlrange = [-1.6, 1.6]
    spec.delete(spec.geom("floor"))
    for i in range(STONES):
        stone = spec.worldbody.add_body(
            name=f"stone_{i}", mocap=True
        )  # static bodies that reset() moves
        stone.add_geom(
            name=f"stone_{i}",
            type=mujoco.mjtGeom.mjGEOM_BOX,
            size=[FIRST, WIDTH, DEPTH / 2],
            conaffinity=1,
            friction=[1, 0.5, 0.5],
        )
    model = spec.compile()
    return model, mujoco.MjData(model)


# ---- two planar arms that sweep particles into a bowl ----------------------------------------------------------------
# The paper has two arms, 12 coordinates, a camera image and red balls to place in green bowls (HRF K.2). Here each arm
# has two links and a brush that can be lifted, particles are discs that slide on the table, and the image is computed
# from positions, as seen from above. An action is one stroke of both arms: the brushes are lifted, move over the places
# that the policy chose, come down, and drag particles to the bowl. The low level is fixed: inverse kinematics and
# servos. x is to the right, y away from the arms.
TABLE = 0.8  # half the side of the table and of the image
BASES = np.array([[-0.45, -0.75], [0.45, -0.75]])
LINKS = 0.8  # length of each link of an arm
BOWL = np.array([0.0, -0.25])
RADIUS = 0.25
ENDS = np.array([[-0.07, -0.25], [0.07, -0.25]])  # where strokes end
# half the width of a brush; radius of a particle
BRUSH = 0.09
DISC = 0.02
HEAP = 0.08  # standard deviation of positions in the heap
HEAPS = np.array([[-0.5, 0.5], [0.0, 0.55]])  # ranges of x and y of its centre
# starts of strokes
CENTRE = np.array([[-0.1, 0.35], [0.1, 0.35]])
RANGE = np.array([0.6, 0.5])
LIFTED = 0.15  # height of a lifted brush
# durations of the parts of a stroke
OVER = 0.3
DOWN = 0.1
DRAG = 0.45
STROKES = 3  # strokes of a rollout
MOST = 4  # maximum value of a pixel


def initial_controller() -> np.ndarray:
    """Return the initial controller (1, 3, 4): strokes start beside the attended spot."""
    weights = np.zeros((3, 2, 2))
    weights[1, :, 0], weights[0, :, 1] = 2 * TABLE / RANGE
    weights[2] = (ENDS - ENDS.mean(0) - CENTRE) / RANGE
    return weights.reshape(1, 3, 4)


class SweepingArms:
    """Two arms sweep particles into a bowl; the return is a share of the particles.

    The return is the share of particles within the bowl, averaged over strokes. Image (1, size, size): number of
    particles per pixel, at most MOST, rows from near to far, columns from left to right. The bowl does not move.
    Action: x and y of the start of a stroke, for the left and the right arm.

    Args:
        particles: Number of particles.
        size: Pixels of a side of the image.
    """

    channels = 1
    states = 1
    actions = 4
    lead = initial_controller()

    def __init__(self, particles: int = 12, size: int = 16):
        self.particles = particles
        self.size = size
        self.model, self.data = table(particles)

    @property
    def places(self) -> np.ndarray:
        """Positions of the particles, (particles, 2)."""
        return self.home + self.data.qpos[6:].reshape(-1, 2)

    @property
    def within(self) -> float:
        """Share of particles within the bowl."""
        return float((np.linalg.norm(self.places - BOWL, axis=1) <= RADIUS).mean())

    def reset(self, seed: int) -> Observation:
        import mujoco

        mujoco.mj_resetData(self.model, self.data)
        self.stroke = 0
        self.home = np.zeros((self.particles, 2))
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
        return self.seen(), self.within / STROKES, self.stroke == STROKES

    def move(self, tips: np.ndarray, height: float, seconds: float) -> None:
        """Move the brushes along a straight line."""
        import mujoco

        start = self.tips
        ticks = round(seconds / SERVO)
        for tick in range(ticks):
            self.order(start + (tips - start) * (tick + 1) / ticks, height)
            mujoco.mj_step(self.model, self.data, nstep=round(SERVO / STEP))
        self.tips = tips

    def order(self, tips: np.ndarray, height: float) -> None:
        """Set the servos: shoulder, elbow and brush of each arm."""
        for arm, (tip, base, outward) in enumerate(zip(tips, BASES, (1, -1))):
            shoulder, elbow = inverse_kinematics(tip - base, outward)
            self.data.ctrl[3 * arm : 3 * arm + 3] = shoulder, elbow, height

    def seen(self) -> Observation:
        count = np.zeros((self.size, self.size))
        pixel = 2 * TABLE / self.size
        column, row = np.floor((self.places.T + TABLE) / pixel).astype(int)
        inside = (column >= 0) & (column < self.size) & (row >= 0) & (row < self.size)
        np.add.at(count, (row[inside], column[inside]), 1)
        return Observation(np.minimum(count, MOST)[None], np.array([self.within]))


def inverse_kinematics(reach: np.ndarray, outward: int) -> tuple[float, float]:
    """Return shoulder and elbow angles for the tip position, with the elbow outward.

    The tip comes as close as possible to positions out of reach.
    """
    distance = np.clip(np.hypot(*reach), 0.05, 2 * LINKS - 0.01)
    inner = np.arccos(distance / 2 / LINKS)
    shoulder = np.arctan2(reach[1], reach[0]) + outward * inner
    elbow = -2 * outward * inner
    return float(shoulder), float(elbow)


def heap(rng: np.random.Generator, particles: int) -> np.ndarray:
    """Sample positions of particles, (particles, 2)."""
    return rng.uniform(*HEAPS.T) + HEAP * rng.standard_normal((particles, 2))


# in MuJoCo's own language; joints and servos of an arm: shoulder, elbow, brush
TABLE_MODEL = """
<mujoco>
  <option integrator="implicitfast" timestep="{step}" gravity="0 0 0"/>  <!-- the table carries all bodies -->
  <default>
    <joint axis="0 0 1" damping="0.5"/>
    <position kp="60" kv="4"/>
    <default class="link"><geom type="capsule" fromto="0 0 0 {link} 0 0" size="0.03" mass="0.5" contype="0"
      conaffinity="0"/></default>
    <default class="brush"><geom type="box" size="0.02 {brush} 0.04" mass="0.1" contype="2"/></default>
    <default class="disc"><geom type="cylinder" size="{disc} 0.02" mass="0.02" conaffinity="3"/></default>
  </default>
  <worldbody>{bodies}
  </worldbody>
  <actuator>{servos}
  </actuator>
</mujoco>"""
ARM_MODEL = """
    <body pos="{x} {y} 0.3">
      <joint name="shoulder_{arm}"/>
      <geom class="link"/>
      <body pos="{link} 0 0">
        <joint name="elbow_{arm}"/>
        <geom class="link"/>
        <body pos="{link} 0 0">
          <joint name="brush_{arm}" type="slide" damping="1"/>
          <geom class="brush" pos="0 0 -0.27"/>
        </body>
      </body>
    </body>"""
SERVOS_MODEL = """
    <position joint="shoulder_{arm}"/>
    <position joint="elbow_{arm}"/>
    <position joint="brush_{arm}"/>"""
PARTICLE_MODEL = """
    <body pos="0 0 0.02">
      <joint type="slide" axis="1 0 0"/>
      <joint type="slide" axis="0 1 0"/>
      <geom class="disc"/>
    </body>"""


def table(particles: int):
    """Build the model: two arms, and particles that slide in x and y.

    Coordinates: joints of both arms, then x and y of each particle. Servos are in the order of the joints.
    """
    import mujoco

    bodies = ""
    servos = ""
    for arm, (x, y) in enumerate(BASES):
        bodies += ARM_MODEL.format(arm=arm, x=x, y=y, link=LINKS)
        servos += SERVOS_MODEL.format(arm=arm)
    bodies += PARTICLE_MODEL * particles
    content = TABLE_MODEL.format(
        step=STEP, link=LINKS, brush=BRUSH, disc=DISC, bodies=bodies, servos=servos
    )
    model = mujoco.MjModel.from_xml_string(content)
    return model, mujoco.MjData(model)
