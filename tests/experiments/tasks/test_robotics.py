"""task=locomotion and task=arm_sweeping: policies with implicit attention, evolution strategies, their worlds."""

import json
import sys

import numpy as np
import pytest
import torch
from helpers.covering import slow
from helpers.refusals import check_refused
from helpers.seeds import seeded
from torch.testing import assert_close

from crt_exp.experiments.evolution import (
    Player,
    centered_ranks,
    directions,
    environments,
    evolve,
    gradient,
    members,
    play,
    play_all,
    restored,
    seeds_of,
)
from crt_exp.experiments.models.implicit_policy import ImplicitPolicy, column_sums, tokens
from crt_exp.experiments.runner.checkpoint import CheckpointError
from crt_exp.mechanism import Mechanism

for package in ("gymnasium", "mujoco"):
    pytest.importorskip(
        package, reason=f"{package} is not installed: pip install 'crt_exp[robotics]'"
    )

from crt_exp.experiments.evolution.environments import (  # noqa: E402
    BOWL,
    RADIUS,
    SteppingStones,
    SweepingArms,
    course,
    heights,
)

PLAN = dict(
    generations=3,
    population=4,
    rollouts=2,
    sigma=0.3,
    lr=0.1,
    evaluate_every=2,
    evaluated=2,
    tested=3,
    together=2,
)
POLICY = ImplicitPolicy(1, 4, 1, 2, patch=2, d=4, heads=1, top=1)


class Field:
    """A world for tests: a bright pixel in a corner, and the reward is how near the action comes to it."""

    channels = 1
    size = 4
    states = 1
    actions = 2
    lead = np.array([[[6.0, 0], [0, 6], [0, 0]]])

    def reset(self, seed):
        self.time = 0
        self.goal = np.random.default_rng(seed).choice([-1, 1], 2)
        return self.seen()

    def seen(self):
        image = np.zeros((1, 4, 4))
        image[0, (3 * (self.goal[0] > 0)), 3 * (self.goal[1] > 0)] = 4
        return environments.Observation(image, np.zeros(1))

    def step(self, action):
        self.time += 1
        return self.seen(), -float(np.abs(action - self.goal).sum()), self.time == 2


def player(policy=POLICY, world=Field, attention="exact"):
    return Player(world, (), policy, Mechanism.of(attention))


# ---- the policy


@pytest.mark.parametrize(
    "name, m",
    [
        ("exact", None),
        ("favorp", 64),
        ("hrf_angular", 8),
        ("nearfar", None),
    ],
)
def test_patches_are_ranked_by_the_sums_of_columns(name, m):
    layer = Mechanism.of(name, m=m).layer(2, 4, scaling=1.0).eval()
    g = seeded()
    q, k = (
        torch.nn.functional.normalize(torch.randn(3, 2, 9, 4, generator=g), dim=-1)
        for _ in range(2)
    )
    with torch.no_grad():
        whole = layer(q, k, torch.eye(9).expand(3, 2, 9, 9))
    actual = column_sums(layer, q, k)
    expected = whole.sum(-2)
    assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_the_policy_reads_only_what_it_attends_to():
    policy = ImplicitPolicy(1, 8, 0, 2, patch=2, d=4, top=3)
    images = torch.rand(5, 1, 8, 8)
    theta = policy.initial(seeded(), torch.ones(1, 3, 2)).repeat(5, 1)
    assert theta.shape[1] == policy.parameters
    assert policy.parameters == 2 * 4 * 4 + 4 * 2
    for name in ("exact", "uniform"):
        layer = policy.layer(Mechanism.of(name))
        kept = policy.selected_patches(layer, theta, images)
        assert (kept.sum(-1) == 3).all()
        parts = []
        for i in range(5):
            parts.append(tokens(images, 2)[i, kept[i, 0] > 0, :-1].mean(0))
        seen = torch.stack(parts)
        seen[:, 0] /= 4  # a mean, where tokens hold the sum
        controller = theta[:, -8:].unflatten(1, (4, 2))
        expected = torch.tanh(
            torch.cat([seen, torch.ones(5, 1)], 1).unsqueeze(1) @ controller
        ).squeeze(1)
        actual = policy.act(layer, theta, images, torch.zeros(5, 0))
        assert_close(actual, expected)
    assert kept[:, 0, :3].all()  # of equal ranks the first: uniform attention looks at one place
    average = ImplicitPolicy(1, 8, 0, 2, attends=False)
    assert average.parameters == 8
    assert average.selected_patches(None, theta, images).all()


# ---- the strategy


def test_pairs_are_antithetic_and_directions_orthogonal():
    theta = torch.randn(40)
    eps = directions(3, 1, 8, 40)
    both = members(theta, eps, 0.5).view(8, 2, 40)
    actual = both.mean(1)
    expected = theta.expand(8, 40)
    assert_close(actual, expected)
    actual = both[:, 0] - theta
    assert_close(actual, 0.5 * eps)
    gram = eps @ eps.T
    difference = (gram - gram.diagonal().diag()).abs().max()
    assert difference < 1e-4
    expected = directions(3, 1, 8, 40)
    assert torch.equal(eps, expected)
    expected = directions(3, 2, 8, 40)
    assert not torch.equal(eps, expected)


def test_ranks_take_the_place_of_returns():
    actual = centered_ranks([1.0, 100.0, -5.0, 7.0]).tolist()
    expected = [-1 / 6, 0.5, -0.5, 1 / 6]
    assert actual == pytest.approx(expected)
    actual = centered_ranks([2.0, 2.0]).tolist()
    assert actual == [0, 0]
    eps = torch.eye(2, 3)
    actual = gradient(torch.tensor([0.5, -0.5, -0.5, 0.5]), eps, 0.1).tolist()
    assert actual == pytest.approx([2.5, -2.5, 0])


@pytest.mark.slow
def test_it_learns_where_to_look():
    """What it attends to is where the goal is: without attention it cannot know."""
    plan = PLAN | {"generations": 20, "population": 16, "rollouts": 4, "sigma": 0.5}
    plan |= {"evaluate_every": 100, "evaluated": 1, "tested": 16, "together": 16}
    returns = []
    for attends in (True, False):
        policy = ImplicitPolicy(1, 4, 1, 2, 2, 4, 1, 1, attends)
        *_, last = evolve(plan, 1, player(policy), 0, 0, None)
        returns.append(last["return"])
    assert returns[0] > returns[1] + 1


def test_seeds_are_recorded_and_never_shared_by_splits(tmp_path):
    records = list(evolve(PLAN, 1, player(), 5, 0, tmp_path))
    actual = [r["split"] for r in records]
    assert actual == ["train", "train", "validation", "train", "test"]
    seeds = []
    for r in records:
        for seed in r["seeds"]:
            seeds.append(seed)
    assert len(seeds) == len({*seeds}) == 3 * 2 + 2 + 3
    actual = records[0]["seeds"]
    expected = seeds_of("train", 5, 0, 2)
    assert actual == expected
    actual = [len(r["returns"]) for r in records]
    assert actual == [4, 4, 2, 4, 3]
    assert records[-1]["final"]
    actual = play(player(), torch.zeros(1, POLICY.parameters), records[-1]["seeds"][:1])
    assert actual != [0]


@pytest.mark.parametrize("stop", [1, 3])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, stop):
    whole = list(evolve(PLAN, 1, player(), 0, 0, tmp_path / "whole"))
    run = evolve(PLAN, 1, player(), 0, 0, tmp_path / "cut")
    first = [next(run) for _ in range(stop)]
    run.close()
    actual = first + list(evolve(PLAN, 1, player(), 0, stop, tmp_path / "cut"))
    assert actual == whole
    states = [restored(tmp_path / name, 5) for name in ("whole", "cut")]
    assert torch.equal(states[0].theta, states[1].theta)
    assert torch.equal(states[0].moments, states[1].moments)


def test_a_damaged_state_is_set_aside(tmp_path, capsys):
    whole = list(evolve(PLAN, 1, player(), 0, 0, tmp_path))
    (tmp_path / "checkpoints/step-3/evolution.safetensors").write_bytes(b"")
    actual = list(evolve(PLAN, 1, player(), 0, 3, tmp_path))
    assert actual == whole[3:]
    assert "checkpoints/step-3: damaged" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="restore the file"):
        next(evolve(PLAN, 1, player(), 0, 2, tmp_path))  # a state without its records


@pytest.mark.slow
def test_two_processes_are_one():
    thetas = torch.randn(8, POLICY.parameters, generator=seeded())
    returns = [play_all(player(), thetas, [1, 2, 3], 2, workers) for workers in (1, 2)]
    assert returns[0] == returns[1]
    assert np.shape(returns[0]) == (8, 3)


def test_a_return_that_is_not_finite_ends_the_run():
    with pytest.raises(ValueError, match="a return is not finite"):
        list(evolve(PLAN, 1, player(world=NotFinite), 0, 0, None))


class NotFinite(Field):
    def step(self, action):
        return self.seen(), float("inf"), True


# ---- the worlds


@pytest.mark.parametrize("world", [SteppingStones, SweepingArms])
def test_a_rollout_depends_on_its_seed_alone(world):
    one = world()
    other = world()
    other.reset(8)
    other.step(np.ones(world.actions))
    for run in (one, other):
        run.seen_first = run.reset(7)
        run.played = [run.step(np.full(world.actions, 0.3)) for _ in range(3)]
    assert np.array_equal(one.seen_first.image, other.seen_first.image)
    for (a, reward, _), (b, other_reward, _) in zip(one.played, other.played):
        assert np.array_equal(a.image, b.image)
        assert np.array_equal(a.state, b.state)
        assert reward == other_reward
    assert a.image.shape == (world.channels, 16, 16)
    assert a.state.shape == (world.states,)
    assert np.isfinite(a.image).all()
    assert not np.array_equal(one.reset(9).image, one.seen_first.image)


def test_the_ant_walks_where_it_is_led():
    """Equal strides lead ahead, the second pair's alone to the left, and a step into the void ends the rollout."""
    world = SteppingStones()
    ways = {}
    cases = [
        ("ahead", (1, 1)),
        ("left", (-1, 1)),
        ("right", (1, -1)),
    ]
    for name, action in cases:
        world.reset(0)
        ended = [world.step(np.array(action, float))[2] for _ in range(4)]
        ways[name] = world.data.qpos[:2].copy()
        assert not any(ended)
        assert abs(world.yaw) < 0.3
    assert ways["ahead"][0] > 0.35
    assert abs(ways["ahead"][1]) < 0.15
    assert ways["left"][1] > 0.2
    assert ways["right"][1] < -0.2
    world.reset(0)
    count = next(i for i in range(100) if world.step(np.array([-1.0, 1.0]))[2])
    assert count < world.decisions - 1
    assert world.data.qpos[2] < 0.3


def test_the_height_map_is_that_of_the_stones():
    stones = course(np.random.default_rng(0))
    image = heights(stones, 0, 0, 0, 16)
    assert (image[:5] == 0).all()
    assert image.min() == -4
    side = np.sign(stones[1, 1])  # that the second stone lies to, where left is 1
    off = heights(stones, stones[1, 0] - 1, 0, 0, 16)[6:10]
    first = off[:, 0]
    last = off[:, 15]
    if side < 0:
        first, last = last, first
    assert (last == -4).all()
    assert (first > -1).all()
    ends = stones[:, 0] + stones[:, 3]
    assert (stones[1:, 0] - stones[1:, 3] - ends[:-1] >= 0.05 - 1e-9).all()
    actual = heights(stones, 2, 1, 0.3, 16).shape
    assert np.array_equal(actual, (16, 16))


def test_arms_sweep_a_heap_into_the_bowl():
    world = SweepingArms()
    seen = world.reset(3)
    assert seen.image[0].sum() > 6
    assert world.within == 0
    way = world.places.mean(0) - BOWL
    begin = world.places.mean(0) + 0.15 * way / np.linalg.norm(way) + [[-0.07, 0], [0.07, 0]]
    from crt_exp.experiments.evolution.environments import CENTRE, RANGE

    _, reward, _ = world.step(((begin - CENTRE) / RANGE).flatten())
    assert world.within > 0.3
    assert reward == pytest.approx(world.within / 3)
    actual = (np.linalg.norm(world.places - BOWL, axis=1) <= RADIUS).mean()
    assert actual == world.within


# ---- the command line

SMALL = [
    "logger=none",
    "task.strategy.generations=2",
    "task.strategy.population=4",
    "task.strategy.evaluated=1",
    "task.strategy.evaluate_every=2",
    "task.strategy.tested=2",
    "task.strategy.together=2",
]
LITTLE = {
    "locomotion": [*SMALL, "task.seconds=1.5"],
    "arm_sweeping": [*SMALL, "task.particles=4"],
}


@pytest.mark.parametrize("task", ["arm_sweeping", slow("locomotion")])
def test_a_run_and_its_continuation(typed, tmp_path, task):
    run = [
        f"task={task}",
        "attention=hrf_angular",
        "features.m=8",
        *LITTLE[task],
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    code, out, err = typed(*run)
    assert code == 0, err
    assert f"{task}: return" in out, err
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    actual = [r["split"] for r in records]
    assert actual == ["train", "train", "validation", "test"]
    assert records[-1]["final"]
    (tmp_path / "run/metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[:3]))
    config = tmp_path / "run/config.yaml"
    config.write_text(config.read_text().replace("ArmSweeping", "Sweep"))
    names = [word.replace("arm_sweeping", "sweep") for word in run]  # as in earlier versions
    code, out, err = typed(*names, "resume=auto")
    again = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert code == 0, err
    assert again["returns"] == records[-1]["returns"], err


@pytest.mark.parametrize(
    "options, words",
    [
        (["task=arm_sweeping", "task.policy.patch=5"], ["task.patch=5", "16 pixels"]),
        (
            ["task=arm_sweeping", "task.looks=average", "attention=exact"],
            ["does not use attention=exact"],
        ),
    ],
)
def test_what_is_refused(typed, tmp_path, options, words):
    check_refused(
        typed(*options, "logger=none", f"hydra.run.dir={tmp_path / 'run'}"), words, tmp_path / "run"
    )


def test_without_the_extra_one_line_names_it(typed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    check_refused(
        typed("task=locomotion", "logger=none", f"hydra.run.dir={tmp_path / 'run'}"),
        ["gymnasium", "pip install 'gymnasium'"],
        tmp_path / "run",
    )
