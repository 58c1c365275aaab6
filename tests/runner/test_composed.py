"""The check of the composed configuration, by the source of classes and by the classes themselves."""

import subprocess
import sys
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from crt_exp.options import annotations_in_source, describe, parameters
from crt_exp.config import CONF, ConfigError, choices, import_object
from crt_exp.runner import command_line
from crt_exp.runner.configuration import GROUPS, check_composed, check_plain, plain_config
from crt_exp.runner.command_line import comments, lines_of


def composed(*overrides):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF.resolve())):
        return compose("config", overrides=list(overrides))


# task, features, ... each with each of its choices
EVERY = [f"{group}={name}" for group in GROUPS for name in choices(group)]


@pytest.fixture(scope="module")
def compositions():
    return {choice: command_line.compose([choice]) for choice in EVERY}


@pytest.fixture(scope="module")
def configurations(compositions):
    return {choice: plain_config(cfg) for choice, cfg in compositions.items()}


def targets(whole, choice):
    """The group of a choice, and the nodes that a `_target_` is built of."""
    group = choice.partition("=")[0]
    return group, [n for n in (whole[group], *whole[group].values()) if isinstance(n, dict) and "_target_" in n]


@pytest.mark.parametrize("choice", EVERY)
def test_every_choice_passes(choice, configurations):
    check_plain(configurations[choice])
    group, nodes = targets(configurations[choice], choice)
    assert nodes and all(node["_target_"].startswith("crt_exp.") for node in nodes)


@pytest.mark.parametrize("choice", EVERY)
def test_every_key_has_its_comment(choice, compositions, configurations):
    """That beside it in its file."""
    words = comments(compositions[choice])
    lines = lines_of(configurations[choice], words, "")
    names = [line.split("=")[0] for line in lines if not line.startswith(" ") and "=" in line.split()[0]]
    assert not {key for key in names if key not in words and key.rpartition(".")[0] not in words}


def test_the_source_states_what_the_class_states(configurations):
    """For most options; some annotations need an import."""
    known = read = 0
    for target in {node["_target_"] for choice in EVERY for node in targets(configurations[choice], choice)[1]}:
        source, real = annotations_in_source(target), parameters(import_object(target))
        assert source.keys() - {"self"} == real.keys(), target
        found = {key: describe(hint) for key, hint in source.items() if hint is not Any and key != "self"}
        assert found == {key: describe(real[key].hint) for key in found}, target
        known, read = known + len(real), read + len(found)
    assert read > 0.8 * known > 240


def test_classes_elsewhere_are_left_to_the_other_check():
    for target in ("mine.tasks.Task", "crt_exp.nowhere.Task", "crt_exp.tasks.uci.Nothing", "json.JSONDecoder"):
        assert annotations_in_source(target) == {}


WRONG = {"task=mlm task.block=abc": "task.block=abc: expected an integer >= 3",
         "task=glue +task.epochs=1": "unknown key 'task.epochs'; did you mean task.parts?",
         "task=uci trainer.optimizer=adamww": "trainer.optimizer=adamww: expected adamw or adam; did you mean adamw?",
         "task=uci +task.repeat=1": "unknown key 'task.repeat'; did you mean task.repeats?",
         "-m seed=0 task.repeats=1,0": "task.repeats=0: expected an integer >= 1",
         "-m attention=exact,favorpp features.m=4,8":
         "attention=exact: does not use features.m=4; remove it"}
REFUSED = """
import sys
from crt_exp.config import ConfigError
from crt_exp.runner.command_line import check_command_line
for words in sys.argv[1:]:
    try:
        check_command_line(words.split())
    except ConfigError as error:
        print(error)
print("torch" in sys.modules)
"""


def test_mistakes_are_refused_before_torch_is_imported(tmp_path):
    done = subprocess.run([sys.executable, "-c", REFUSED, *WRONG], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [*WRONG.values(), "False"], done.stderr


BAD = [
    ("seed=1.5", "seed=1.5: expected an integer >= 0 and <= 4294967295"),
    ("seed=null", "seed=null"),
    ("~seed", "seed: missing, expected an integer"),
    ("resume=true", "resume=true: expected never or auto"),
    ("~task", "task: missing"),
    ("~features", "features: missing, expected features=... (known: angular"),
    ("~task.repeats", "task.repeats: missing, expected an integer >= 1"),
    ("+x=1", "unknown key 'x'"),
    ("+features.kernel=gaussian", "unknown key 'features.kernel'"),  # the task's to say
    ("+sampler.m=3", "unknown key 'sampler.m'"),
    ("task.sigmas=[0.1,null]", "task.sigmas=[0.1,null]"),
    ("task.split=[0.5,0.5]", "expected a list of 3 entries"),
    ("task.dataset=123", "task.dataset=123: expected a string"),
    ("features=gerf features.s=2", "features.s=2: expected auto, 1 or -1"),
    ("logger.mode=abc", "logger.mode=abc: expected online, offline or disabled"),
    ("trainer.lr=inf", "trainer.lr=inf: expected a number > 0"),
    ("trainer.cpu=1", "trainer.cpu=1: expected true or false"),
    ("task=mlm task.hub=null", "task.hub=null: expected keys with values"),
    ("task=mlm +task.hub.foo=1", "unknown key 'task.hub.foo'"),
    ("task=projections task.ms=5", "task.ms=5: expected a list of length >= 1"),
    ("attention=relu attention.phi.f=abc", "attention.phi.f=abc: expected"),
    ("attention=favorpp +attention.heads=2", "unknown key 'attention.heads'"),
    ("seed=${nowhere}", "seed: Interpolation key 'nowhere' not found"),
    ("features.m=???", "features.m=???: missing"),
]


@pytest.mark.parametrize("overrides, message", BAD, ids=[o for o, _ in BAD])
def test_bad_configuration(overrides, message):
    with pytest.raises(ConfigError) as found:
        check_composed(composed(*overrides.split()))
    assert message in str(found.value)


# ---- what may be built -----------------------------------------------------------------------------------------------

EVIL = {"_target_": "os.system", "command": "false"}


def test_a_group_takes_code_of_its_kind_alone(configurations):
    whole = configurations["task=mlm"]
    for group in GROUPS:
        for other in (EVIL, {"_target_": "crt_exp.runner.run.write_atomic"},
                      {"_target_": "crt_exp.runner.configuration.re.sub"}, {"_target_": 5}):
            with pytest.raises(ConfigError, match=rf"^{group}\._target_="):
                check_plain(whole | {group: other})
    with pytest.raises(ConfigError, match="nowhere.Task cannot be imported: No module named 'nowhere'"):
        check_plain(whole | {"task": {"_target_": "nowhere.Task"}})


def test_hydra_refuses_what_runs_commands():
    """The second line of defence, where a file of the user's own names it."""
    with pytest.raises(InstantiationException, match="blocklist"):
        instantiate(EVIL)


OWN = """
class Own:
    metric = "x"

    def __init__(self, n: int, names: list = ()):
        self.n = n

    def records(self, mechanism, seed, done=()):
        from crt_exp.config import choices, known_names

        assert "own" in known_names("task") and "own" not in choices("task")
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
    args = [f"--config-dir={tmp_path}/conf", "task=own", "logger=none", f"hydra.run.dir={tmp_path}/run"]
    for given, message in {"task.n=1.5": "task.n=1.5: expected an integer", "+task.m=5": "unknown key 'task.m'",
                           "+task.names=5": "task.names=5: expected a list"}.items():
        code, _, err = typed(*args, given)
        assert code == 2 and message in err and "Traceback" not in err
    code, out, err = typed(*args)
    assert code == 0 and out.startswith("x 3"), err
    (tmp_path / "conf" / "task" / "own.yaml").write_text("_target_: os.system\ncommand: 'false'\n")
    code, _, err = typed(*args)
    assert code == 2 and "task._target_=posix.system: expected a class that measures" in err


def test_out_of_memory_is_told(typed, tmp_path):
    code, _, err = typed("task=projections", "task.length=1000000000000", "task.samples=1", "logger=none")
    assert code == 2 and "out of memory: " in err and "allocate memory" in err and len(err.splitlines()) == 1
    assert not list((tmp_path / "outputs").rglob("*.*"))
