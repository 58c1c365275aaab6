"""The check of the composed configuration: every key of every group, without a process for each."""

import inspect
import math
from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict

import pytest
from hydra import compose, initialize_config_dir
from pydantic import Field

from crt_exp.config import CONF, ConfigError, choices, imported
from crt_exp.options import Count, Positive, Several, check, checked
from crt_exp.runner import command_line
from crt_exp.runner.configuration import GROUPS, check_composed, check_plain, plain
from crt_exp.runner.help import lines_of, words_of
from crt_exp.samplers import hadamard, iid, orthogonal


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
    return {choice: plain(cfg) for choice, cfg in compositions.items()}


@pytest.mark.parametrize("choice", EVERY)
def test_every_choice_passes(choice, configurations):
    check_plain(configurations[choice])


@pytest.mark.parametrize("choice", EVERY)
def test_every_key_has_its_words(choice, compositions, configurations):
    """Those that stand beside it in its file."""
    words = words_of(compositions[choice].hydra.runtime.choices)
    lines = lines_of(configurations[choice], words)
    names = [line.split("=")[0] for line in lines if not line.startswith(" ") and "=" in line.split()[0]]
    assert not {key for key in names if key not in words and key.rpartition(".")[0] not in words}


class Strange:
    """What no key takes."""

    def __repr__(self):
        return "strange"


def keys(node, path=()):
    """All paths to values below a node, the nodes within it too."""
    for key, value in node.items():
        if key[0] != "_":
            yield (*path, key)
            if isinstance(value, dict):
                yield from keys(value, (*path, key))


def replaced(node, path, value):
    return node | {path[0]: replaced(node[path[0]], path[1:], value) if path[1:] else value}


@pytest.mark.parametrize("choice", EVERY)
def test_every_key_of_every_group_refuses_what_it_does_not_take(choice, configurations):
    """The message is one line, and names the key, what it got, and what it takes."""
    whole = configurations[choice]
    group = choice.partition("=")[0]
    for path in keys({group: whole[group]}):
        # attention.kernel stands for phi.f; the task itself checks its sizes, by transformers' annotations
        if path in ((group,), ("attention", "kernel")) or path[:2] == ("task", "sizes") and path[2:]:
            continue
        name = ".".join(path)
        for value, shown in ((Strange(), "strange"), ([Strange()], "strange"), (math.nan, "nan")):
            with pytest.raises(ConfigError) as found:
                check_plain(replaced(whole, path, value))
            text = str(found.value)
            assert text.startswith(name) and shown in text and "expected " in text and "\n" not in text, text
        with pytest.raises(ConfigError, match=rf"^unknown key '{name}x'"):
            check_plain(replaced(whole, (*path[:-1], path[-1] + "x"), 1))


BAD = [
    ("seed=1.5", "seed=1.5: expected an integer >= 0 and <= 4294967295"),
    ("seed=1e3", "seed=1000.0: expected"),
    ("seed='7'", 'seed="7": expected'),
    ("seed=-1", "seed=-1"),
    ("seed=100000000000000000000", "seed=100000000000000000000"),
    ("seed=null", "seed=null"),
    ("~seed", "seed: missing, expected an integer"),
    ("resume=true", "resume=true: expected never or auto"),
    ("~task", "task is missing"),
    ("~features", "features is missing: a run needs one, features=... (known: angular"),
    ("~task.repeats", "task.repeats: missing, expected an integer >= 1"),
    ("~features.m", "features.m: missing"),
    ("+x=1", "unknown key 'x'"),
    ("+features.kernel=gaussian", "unknown key 'features.kernel'"),  # the task's to say
    ("+sampler.m=3", "unknown key 'sampler.m'"),
    ("task.repeats=true", "task.repeats = true: it takes a whole number"),
    ("task.repeats=[1]", "task.repeats = [1]: it takes a whole number of at least 1"),
    ("task.sigmas=[abc]", "task.sigmas[0] = abc: it takes a number above 0"),
    ("task.sigmas=[0.1,null]", "task.sigmas[1] = null"),
    ("task.split=[0.5,0.5]", "task.split = [0.5, 0.5]: it takes a list of 3 entries, each a number above 0"),
    ("task.dataset=123", "task.dataset = 123: it takes a string (write '\"123\"'"),
    ("task.scaling=log", "task.scaling = log: it takes standard, minmax or none"),
    ("features.A=abc", "features.A = abc: it takes a number below 0.125, or null"),
    ("features=gerf features.A=abc", "features.A = abc: it takes a number, complex ones written as 0.1+0.2j, or null"),
    ("features=gerf features.s=2", "features.s = 2: it takes auto, 1 or -1"),
    ("sampler=givens sampler.rotations=-1", "sampler.rotations = -1"),
    ("sampler.lengths=3", "sampler.lengths = 3: it takes chi or sqrt_d"),
    ("logger.project=[1]", "logger.project = [1]: it takes a string"),
    ("logger.mode=abc", "logger.mode = abc: it takes online, offline or disabled, or null"),
    ("trainer.betas=[a,b]", "trainer.betas[0] = a: it takes a number of at least 0 and below 1"),
    ("trainer.betas=[0.9]", "trainer.betas = [0.9]: it takes a list of 2 entries"),
    ("trainer.batch=null", "trainer.batch = null"),
    ("trainer.lr=inf", "trainer.lr = inf: it takes a number above 0"),
    ("trainer.cpu=1", "trainer.cpu = 1: it takes true or false"),
    ("task=mlm task.hub=null", "task.hub = null: it takes keys with values"),
    ("task=mlm +task.hub.foo=1", "unknown key 'task.hub.foo'"),
    ("task=mlm task.text=[1]", "task.text=[1]: expected a string, a list"),
    ("task=variance task.pairs=1", "task.pairs=1: expected an integer >= 2"),
    ("task=projections task.ms=5",
     "task.ms=5: expected a list of length >= 1 (each an integer >= 1)"),
    ("task=speed task.what=huge", "task.what=huge: expected attention, large, small, vit, vit_ti or one_head"),
    ("attention=relu attention.phi.f=abc", "attention.phi.f=abc: expected relu, elu+1"),
    ("attention=favorpp attention.redraw_every=0.5", "attention.redraw_every=0.5"),
    ("attention=favorpp +attention.heads=2", "unknown key 'attention.heads'"),
    ("seed=${nowhere}", "seed: Interpolation key 'nowhere' not found"),
    ("task.data_dir=${oc.env:NOT_SET_ANYWHERE}", "task.data_dir: Environment variable 'NOT_SET_ANYWHERE' not found"),
    ("features.m=???", "features.m = ???: it must be given"),
]


@pytest.mark.parametrize("overrides, message", BAD, ids=[o for o, _ in BAD])
def test_bad_configuration(overrides, message):
    with pytest.raises(ConfigError) as found:
        check_composed(composed(*overrides.split()))
    assert message in str(found.value)


# ---- what may be built -----------------------------------------------------------------------------------------------

EVIL = {"_target_": "os.system", "command": "false"}


def test_the_targets_of_conf_are_ours(configurations):
    for choice in EVERY:
        group = choice.partition("=")[0]
        node = configurations[choice][group]
        for part in filter(lambda n: isinstance(n, dict) and "_target_" in n, (node, *node.values())):
            assert part["_target_"].startswith("crt_exp.") and inspect.getmodule(imported(part["_target_"])), part


def test_a_group_takes_code_of_its_kind_alone(configurations):
    whole = configurations["task=mlm"]
    for group in GROUPS:
        for other in (EVIL, {"_target_": "crt_exp.runner.run.write_atomic"},
                      {"_target_": "crt_exp.runner.configuration.re.sub"}, {"_target_": 5}):
            with pytest.raises(ConfigError, match=rf"^{group}\._target_="):
                check_plain(whole | {group: other})
    with pytest.raises(ConfigError, match="nowhere.Task cannot be imported: No module named 'nowhere'"):
        check_plain(whole | {"task": {"_target_": "nowhere.Task"}})


@pytest.mark.parametrize("override", ["task._target_=os.system", "+task._partial_=true", "++task={_target_:os.system}",
                                      "+hydra.callbacks.x._target_=os.system",
                                      "task._target_=os.system,os.getcwd"])
def test_the_command_line_names_no_code(override, typed, tmp_path):
    code, _, err = typed("logger=none", override)
    assert code == 2 and "the command line cannot name code to run" in err and len(err.splitlines()) == 1, err
    assert not any(tmp_path.iterdir())


OWN = """
class Own:
    metric = "x"

    def __init__(self, n: int, rate: float = 0.5, names=()):
        self.n = n

    def records(self, mechanism, seed, done=()):
        from crt_exp.config import choices, known

        assert "own" in known("task") and "own" not in choices("task")
        yield {"split": "test", "x": self.n, "final": True}

    def summary(self, records):
        return f"x {self.n}"
"""


def test_a_task_of_ones_own_is_checked_too(typed, tmp_path, monkeypatch):
    """Its constructor is all it takes; without annotations the defaults say what a key takes."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "own.yaml").write_text("_target_: own.Own\nn: 3\nrate: 0.5\nnames: []\n")
    args = [f"--config-dir={tmp_path}/conf", "task=own", "logger=none", f"hydra.run.dir={tmp_path}/run"]
    for given, message in {"task.n=1.5": "task.n=1.5: expected an integer", "+task.m=5": "unknown key 'task.m'",
                           "task.rate=abc": "task.rate=abc: expected a number"}.items():
        code, _, err = typed(*args, given)
        assert code == 2 and message in err and "Traceback" not in err
    code, out, err = typed(*args)
    assert code == 0 and out.startswith("x 3"), err
    (tmp_path / "conf" / "task" / "own.yaml").write_text("_target_: os.system\ncommand: 'false'\n")
    code, _, err = typed(*args)
    assert code == 2 and "task._target_=posix.system: expected a class that measures" in err


# ---- the parts -------------------------------------------------------------------------------------------------------


class Sizes(TypedDict):
    width: Count
    names: str | Sequence[str] | None


@checked("thing")
class Thing:
    def __init__(self, kind: Literal["no", "yes"], rates: Several[Positive], sizes: Sizes,
                 share: Annotated[float, Field(ge=0, lt=1)] = 0):
        self.kind = kind


def test_checked_in_python_too():
    sizes = {"width": 2, "names": None}
    assert Thing("yes", [1, 0.5], sizes).kind == "yes"
    for args, message in [(("maybe", [1], sizes), r"thing.kind=maybe: expected no or yes"),
                          (("no", [], sizes), r"thing.rates=\[\]: expected a list of length >= 1"),
                          (("no", [1, True], sizes), r"thing.rates=.*: expected a list"),
                          (("no", [1], {"width": 2}),
                           "thing.sizes.names: missing, expected a string, a list"),
                          (("no", [1], sizes | {"width": 0}), "thing.sizes.width=0"),
                          (("no", [1], sizes, 1.0), "thing.share=1.0: expected a number >= 0 and < 1")]:
        with pytest.raises(ConfigError, match=f"^{message}"):
            Thing(*args)
    with pytest.raises(TypeError, match="required"):
        Thing("no")


def test_numbers_of_any_size_are_told():
    for value in (10.0**300, -10**30, "x" * 10_000):
        with pytest.raises(ConfigError) as found:
            check("key", value, Count)
        assert len(str(found.value)) < 400


@pytest.mark.parametrize("sampler", [iid, orthogonal, hadamard])
def test_projections_that_the_memory_cannot_hold(sampler):
    message = r"m = 1000000000000: projections of dimension 64 .*GiB, and .* GiB of memory are free"
    with pytest.raises(ValueError, match=message):
        sampler(10**12, 64, batch=(2,))


def test_out_of_memory_is_told(typed, tmp_path):
    code, _, err = typed("task=projections", "task.length=1000000000000", "task.samples=1", "logger=none")
    assert code == 2 and "out of memory: " in err and "GiB were asked for" in err and len(err.splitlines()) == 1
    assert not list((tmp_path / "outputs").rglob("*.*"))
