"""README.md and docs/: commands and keys exist; in the slow suite every block runs."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.covering import cover, slow
from helpers.pages import BLOCKS, PAGES, RECIPES, ROOT, project, write_recipes
from helpers.torchrun import ENVIRONMENT
from omegaconf import OmegaConf

from crt_exp import __main__ as entry
from crt_exp.experiments import infer
from crt_exp.experiments.data import __main__ as data_command
from crt_exp.experiments.data import sources
from crt_exp.experiments.report import __main__ as report_command
from crt_exp.experiments.report import pages
from crt_exp.experiments.runner.command_line import check_command_line
from crt_exp.registry import CONF, ConfigError, choices
from crt_exp.validation import parameters

GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
LANGUAGES = {"python", "bash", "yaml", "make", "sbatch", "mermaid"}
EXAMPLES = [
    block
    for block in BLOCKS
    if block.language == "python" and block not in RECIPES and "HuggingFaceTB/" not in block.text
]  # needs the hub


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* of . layers:UserWarning")
@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: f"{block.page.stem}: {block.section}")
def test_example_runs(block, capsys):
    exec(block.text, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with all files of docs/add-your-own.md; modules imported from it are forgotten."""
    monkeypatch.chdir(write_recipes(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def words_of(text):
    """The commands of a block, without comments; a backslash at the end of a line continues it."""
    lines = text.replace("\\\n", " ").splitlines()
    commands = []
    for line in lines:
        commands.append(tuple(shlex.split(line, comments=True)))
    return [words for words in commands if words]


def inline_commands(page):
    flags = re.S | re.M
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=flags)
    return [
        tuple(shlex.split(code))
        for code in re.findall(r"`((?:make|python -m|torchrun|pip) [^`]+)`", prose)
    ]


def commands_of_pages():
    """Every command of the pages: of shell blocks, behind srun and torchrun, and of the prose."""
    commands = set()
    for block in BLOCKS:
        if block.language == "bash":
            commands |= {*words_of(block.text)}
        if block.language == "sbatch":
            lines = block.text.replace(" &\n", "\n")
            jobs = [words for words in words_of(lines) if "crt_exp" in words]
            commands |= {("python", *words[words.index("-m") :]) for words in jobs}
    for page in PAGES:
        commands |= {*inline_commands(page)}
    return commands


def commands_of_recipes():
    commands = set()
    for block in RECIPES:
        if block.language == "bash" and re.match("An? ", block.section):
            commands |= {*words_of(block.text)}
    return commands


COMMANDS = sorted(commands_of_pages())
OF_RECIPES = commands_of_recipes()


def is_run(words):
    """Whether a command composes the configuration of a run, which takes half a second."""
    return "crt_exp" in words and all(
        name not in words for name in ("data", "infer", "report", "compare")
    )


def parts_of(words):
    """The choices and keys of the command of a run; those of a task with the task."""
    arguments = words[words.index("crt_exp") + 1 :]
    task = next((argument for argument in arguments if argument.startswith("task=")), "")
    parts = set()
    for argument in arguments:
        key = argument.partition("=")[0]
        if key in GROUPS:
            parts.add(argument)
        if key.startswith("task."):
            parts.add((key, task))
        parts.add(key)
    return parts


@pytest.mark.parametrize("every", [False, slow(True)])
def test_every_command_parses(every, folder):
    """In the fast suite, runs that together have every choice and key stand for all runs."""
    runs = [words for words in COMMANDS if is_run(words)]
    others = [words for words in COMMANDS if not is_run(words)]
    if not every:
        runs = cover(runs, parts_of)
    failures = []
    for words in others + runs:
        try:
            check(words)
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            failures.append(f"{' '.join(words)}: {type(error).__name__}: {error}")
    assert runs
    assert others
    assert not failures, "\n".join(failures)


def check(words):
    """Parse a command: its options and names exist, and the configuration of a run composes."""
    match words:
        case ("make", target, *variables):
            check_make(target, dict(variable.split("=", 1) for variable in variables))
        case ("pip", "wheel", "--no-deps", ".") | ("pip", "install", "gguf"):
            pass
        case ("pip", "install", *_, what):  # a wheel, the checkout, or extras of one of these
            actual = re.fullmatch(
                rf"crt_exp-{project()['version']}-py3-none-any.whl|(?:\.|crt_exp)(?:\[(\w+)\])?",
                what,
            )
            assert actual[1] is None or actual[1] in project()["optional-dependencies"]
        case ("export", assignment):
            assert re.fullmatch(r"CRT_DATA=\w+", assignment)
        case ("export", *assignments):
            assert [word.partition("=")[0] for word in assignments] == ["XDG_CACHE_HOME", "HF_HOME"]
        case ("python", "-m", "crt_exp", "data", *arguments):
            options = data_command.parser().parse_args(arguments)
            name = getattr(options, "name", None)
            assert not name or sources.select(name)
        case ("python", "-m", "crt_exp", "infer", *arguments):
            keys = {
                word.lstrip("-").partition("=")[0]
                for word in arguments
                if "=" in word or word.startswith("--")
            }
            assert any(keys <= {*parameters(options)} for options, _ in infer.KINDS.values())
        case ("python", "-m", "crt_exp", "compare", *runs):
            assert runs
            assert all("=" not in run for run in runs)
        case ("python", "-m", "crt_exp", "report", name, *arguments):
            given = parser_of_reports().parse_args([name, *arguments])
            assert name.endswith(".py") or pages.load(name).sweeps(given.size)
        case ("python", "-m", "crt_exp", *arguments) | ("torchrun", _, "-m", "crt_exp", *arguments):
            check_run(arguments)
        case ("python", "-m", module):
            importlib.invalidate_caches()
            assert find_spec(module)
        case _:
            pytest.fail("unknown command")


parser_of_reports = cache(report_command.parser)  # it lists the titles of all pages


def check_make(target, variables):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:.*## ", makefile, re.M) or pages.load(target)
    for name in variables:
        assert re.search(rf"^{name} +\?=", makefile, re.M)
    assert variables.get("SIZE", "small") in pages.SIZES


def check_run(arguments):
    """Without Hydra's plugins, which are an extra, commands that need one ask for the extra."""
    if (
        any(argument.startswith("hydra/") for argument in arguments)
        and find_spec("hydra_plugins") is None
    ):
        with pytest.raises(ConfigError, match=r"pip install 'crt_exp\[sweep\]'"):
            check_command_line(arguments)
    elif arguments != ["--version"]:
        check_command_line(arguments)


SUBSTITUTES = {
    "srun": 'exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> queue; fi',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "${{@/--nproc_per_node=8/--nproc_per_node=2}}"',
}  # commands of the Slurm script, for a machine without Slurm and GPUs


@pytest.mark.slow
def test_slurm_script_stops_before_its_limit_and_continues(tmp_path):
    """With two processes and a toy task. SIGUSR1 to the script: a checkpoint, and the job is queued again."""
    (block,) = [block for block in BLOCKS if block.language == "sbatch"]
    words = "experiment=performers_trembl attention=relu"
    assert words in block.text
    toy = f"--config-dir {ROOT}/tests/helpers/toy_conf task=toy task.pause=0.05 logger=none"
    (tmp_path / "job.sh").write_text(block.text.replace(words, toy))
    (tmp_path / "bin").mkdir()
    for name, line in SUBSTITUTES.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | ENVIRONMENT
    env |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_NNODES": "1"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost"}
    start = partial(subprocess.Popen, ["bash", "job.sh"], cwd=tmp_path, env=env, text=True)
    job = start(stderr=subprocess.PIPE)
    metrics = tmp_path / "outputs" / "trembl-relu" / "metrics.jsonl"
    while not metrics.exists():
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert "stopped by SIGUSR1" in job.communicate()[1]
    assert (tmp_path / "queue").read_text() == "requeue 7\n"
    assert '"final": true' not in metrics.read_text()
    assert start().wait() == 0
    assert '"final": true' in metrics.read_text()


def test_recipes_of_make_are_valid_shell():
    """`bash -n` parses what each target of the Makefile would run."""
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    commands = subprocess.run(
        ["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    done = subprocess.run(["bash", "-n"], input=commands, capture_output=True, text=True)
    assert "crt_exp data fetch" in commands, done.stderr
    assert done.returncode == 0, done.stderr


TINY = {  # overrides that make a run of docs/add-your-own.md take a second
    "uci": ["task.repeats=1", "task.sigmas=[0.3]"],
    "projections": ["task.length=16", "task.ms=[4]", "task.samples=1"],
    "mlm": [
        "task.text=wordnet",
        "task.vocabulary_size=500",
        "task.block=32",
        "task.cache_dir=null",
        "task.sizes.hidden_size=16",
        "task.sizes.intermediate_size=16",
        "trainer.steps=4",
    ],
    "first": ["trainer.epochs=1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("words", sorted(OF_RECIPES), ids=" ".join)
def test_command_of_a_recipe_runs(words, typed, folder):
    tiny = []
    for word in words:
        if word.startswith("task="):
            tiny = TINY.get(word[5:], [])
    if words[:3] == ("python", "-m", "crt_exp") and words[3] not in entry.COMMANDS:
        code, _, err = typed(*words[3:], *tiny)
        # the sweep has two maps and three seeds
        expected = 1
        if "-m" in words[3:]:
            expected = 6
        assert code == 0, err
        assert len(list((folder / "outputs").rglob("metrics.jsonl"))) == expected, err
    else:
        run_in(folder, *words, *tiny)


def run_in(folder, *words):
    """A command as a user types it there: `python` is that of the tests, and it finds the package."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_map_of_the_recipe_passes_its_own_tests(folder):
    """In another process, because its test files have names of ours."""
    assert " passed" in run_in(
        folder, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"
    )


LINES = {"mine/maps.py": 40, "mine/samplers.py": 15}  # as CONTRIBUTING.md states them


def test_map_and_sampler_have_the_stated_number_of_lines():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for block in RECIPES:
        limit = LINES.get(block.title)
        if limit is not None:
            assert f"in {limit} lines" in contributing
            assert len(block.text.splitlines()) <= limit


def test_recipes_of_contributing_exist():
    """Each link names a section of docs/add-your-own.md, whose files and commands the slow tests run."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    anchors = re.findall(r"add-your-own\.md#([a-z-]+)\)", contributing)
    sections = {block.section.lower().replace(" ", "-") for block in RECIPES if block.title}
    assert sorted(anchors) == sorted(sections)


def test_sampler_of_the_recipe_has_pairs_of_opposite_rows(folder):
    antithetic = importlib.import_module("mine.samplers").antithetic
    rows = antithetic(3, 4).rows()
    assert rows.shape == (3, 4)
    assert rows[0].equal(-rows[1])


def test_task_of_the_recipe_trains_and_evaluates(folder, typed):
    code, _, err = typed(
        "--config-dir=conf",
        "task=first",
        "task.rows=32",
        "attention=exact",
        "trainer.epochs=1",
        "logger=none",
    )
    assert code == 0, err


def test_page_of_the_recipe_lists_its_sweep(folder):
    page = importlib.import_module("mine.angles").page
    assert list(page.sweeps("small")) == ["angles"]


def test_blocks_have_a_language_and_files_a_row_in_the_table():
    assert not [
        block
        for block in BLOCKS
        if block.language not in LANGUAGES or block.title and block not in RECIPES
    ]
    rows = re.findall(
        r"^\| \[an? .*?\) \| (.*?) \|", (ROOT / "docs" / "add-your-own.md").read_text(), re.M
    )
    actual = sorted(re.findall(r"`(.*?)`", " ".join(rows)))
    expected = sorted(block.title for block in RECIPES if block.title)
    assert actual == expected


def test_inline_keys_exist():
    """`task.causal=true`, `sampler=`, `trainer.keep`: the group, its choice, the key."""
    known = {*known_keys(), *GROUPS}
    pattern = re.compile(rf"`((?:{'|'.join(GROUPS)})[=.][^` ]*)`")
    spans = set()
    for page in PAGES:
        for span in pattern.findall(page.read_text()):
            spans.add(span)
    assert len(spans) > 20
    for span in spans:
        key, sign, value = span.partition("=")
        if key in GROUPS and re.fullmatch(r"\w+", value):
            assert value in choices(key), span
        assert key in known, span


def known_keys():
    for path in CONF.rglob("*.yaml"):
        text = path.read_text()
        node = OmegaConf.to_container(OmegaConf.load(path))
        if path.parent == CONF or "@package _global_" in text:
            group = ""
        else:
            group = path.relative_to(CONF).parts[0]
        yield from flattened(group, node)


def flattened(prefix, node):
    for key, value in node.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        yield name
        if isinstance(value, dict):
            yield from flattened(name, value)
