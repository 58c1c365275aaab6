"""The check of the composed configuration."""

import subprocess
import sys
from importlib.metadata import version

import pytest
from helpers.refusals import check_error
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from crt_exp.experiments.runner import command_line
from crt_exp.experiments.runner.command_line import comments, lines_of
from crt_exp.experiments.runner.configuration import (
    GROUPS,
    check_plain,
    plain_config,
)
from crt_exp.registry import CONF, ConfigError, choices


def composed(*overrides):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF.resolve())):
        return compose("config", overrides=list(overrides))


# as many configurations as the largest group has choices: each takes one of every group
CHOICES = {group: choices(group) for group in GROUPS}
EVERY = [
    tuple(f"{group}={names[i % len(names)]}" for group, names in CHOICES.items())
    for i in range(max(map(len, CHOICES.values())))
]


def required(overrides: tuple[str, ...]) -> list[str]:
    """Overrides for the run or model that a task starts from, which has no default."""
    task = dict(override.split("=") for override in overrides)["task"]
    options = OmegaConf.load(CONF / "task" / f"{task}.yaml")
    return [f"task.{key}=RUN" for key in ("start", "model", "text") if options.get(key, "") is None]


@pytest.fixture(scope="module")
def configurations():
    """The configuration of each, and the nodes that a `_target_` is built of by group."""
    actual = {}
    for overrides in EVERY:
        cfg = command_line.compose([*overrides, *required(overrides)])
        whole = plain_config(cfg)
        nodes = {}
        for group in GROUPS:
            nodes[group] = [
                n
                for n in (whole[group], *whole[group].values())
                if isinstance(n, dict) and "_target_" in n
            ]
        actual[overrides] = cfg, whole, nodes
    return actual


@pytest.mark.parametrize("overrides", EVERY, ids=" ".join)
def test_every_choice_is_valid_and_every_key_has_its_comment(overrides, configurations):
    cfg, whole, nodes = configurations[overrides]
    check_plain(whole)
    for node in nodes.values():
        assert node
        assert node[0]["_target_"].startswith("crt_exp.")
    words = comments(cfg)
    names = []
    for line in lines_of(whole, words, ""):
        if not line.startswith(" ") and "=" in line.split()[0]:
            names.append(line.split("=")[0])
    assert not {key for key in names if key not in words and key.rpartition(".")[0] not in words}


LIGHT = """
import sys
from crt_exp import __main__
sys.argv = ["crt_exp", "--version"]
__main__.main()
print("hydra" in sys.modules)
sys.argv = ["crt_exp", "--help"]
__main__.main()
from crt_exp.registry import ConfigError
from crt_exp.experiments.runner.command_line import check_command_line
try:
    check_command_line(["task=glue", "task.epochs=1"])
except ConfigError as error:
    print(error)
print("torch" in sys.modules)
"""


def test_version_help_and_unknown_keys_do_without_the_import_of_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, cwd=tmp_path
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"crt_exp {version('crt_exp')}, torch {version('torch')}", "False"], (
        done.stderr
    )
    assert lines[-2:] == ["unknown key 'task.epochs'; did you mean trainer.epochs?", "False"]
    assert not done.stderr


BAD = [
    ("seed=1.5", "seed=1.5: expected an integer >= 0 and <= 4294967295"),
    ("resume=true", "resume=true: expected never or auto"),
    ("~task", "task: missing"),
    ("~features", "features: missing, expected features=... (known: angular"),
    ("+features.kernel=gaussian", "unknown key 'features.kernel'"),  # the task's to say
    ("+m=64", "unknown key 'm'; did you mean features.m?"),
    ("task=glue +task.epochs=1", "unknown key 'task.epochs'; did you mean task.csv?"),
    ("trainer.optimizer=ada", "expected adamw or adam; did you mean adamw or adam?"),
    ("trainer.lr=inf", "trainer.lr=inf: expected a number > 0"),
    ("attention=relu attention.phi.f=abc", "attention.phi.f=abc: expected"),
    ("seed=${nowhere}", "seed: Interpolation key 'nowhere' not found"),
    ("features.m=???", "features.m=???: missing"),
]


@pytest.mark.parametrize("overrides, message", BAD, ids=[o for o, _ in BAD])
def test_bad_configurations_are_refused(overrides, message):
    with pytest.raises(ConfigError) as actual:
        check_plain(plain_config(composed(*overrides.split())))
    assert message in str(actual.value)


# ---- what may be built -----------------------------------------------------------------------------------------------


def test_a_group_takes_code_of_its_kind_alone(configurations):
    whole = next(
        whole for overrides, (_, whole, _) in configurations.items() if "task=mlm" in overrides
    )
    for group in GROUPS:
        for other in (
            "os.system",
            "crt_exp.experiments.runner.run.write_atomic",
            "crt_exp.experiments.runner.configuration.re.sub",
            5,
        ):
            with pytest.raises(ConfigError, match=rf"^{group}\._target_="):
                check_plain(whole | {group: {"_target_": other}})
    with pytest.raises(
        ConfigError, match="nowhere.Task cannot be imported: No module named 'nowhere'"
    ):
        check_plain(whole | {"task": {"_target_": "nowhere.Task"}})


OWN = """
from crt_exp.experiments.tasks.base import Measurement


class Own(Measurement):
    metric = "x"

    def __init__(self, n: int):
        self.n = n

    def records(self, mechanism, seed, done=()):
        from crt_exp.registry import choices

        assert "own" in choices("task")
        yield {"split": "test", "x": self.n, "final": True}

    def summary(self, records):
        return f"x {self.n}"
"""


def test_a_task_of_ones_own_is_checked_too(typed, tmp_path, monkeypatch):
    """Its constructor is all it takes."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "own.yaml").write_text("_target_: own.Own\nn: 3\n")
    args = [
        f"--config-dir={tmp_path}/conf",
        "task=own",
        "logger=none",
        f"hydra.run.dir={tmp_path}/run",
    ]
    check_error(typed(*args, "task.n=1.5"), "task.n=1.5: expected an integer")
    code, out, err = typed(*args)
    assert code == 0, err
    assert out.startswith("x 3"), err
