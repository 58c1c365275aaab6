"""README.md and docs/: commands and keys exist; in the slow suite every block runs."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from omegaconf import OmegaConf
from pages import BLOCKS, PAGES, ROOT, Block, project

from crt_exp import Mechanism, infer, samplers
from crt_exp.attention import attention_reference
from crt_exp.config import CONF, ConfigError, choices
from crt_exp.data import __main__ as data_command, sources
from crt_exp.features import Statistics
from crt_exp.options import parameters
from crt_exp.report import __main__ as report_command, pages
from crt_exp.runner.command_line import check_command_line

LANGUAGES = {"python", "bash", "yaml", "make", "sbatch", "mermaid"}
# The blocks of add-your-own.md run in the tests of the recipes.
EXAMPLES = [block for block in BLOCKS if block.language == "python" and block.page.name != "add-your-own.md"
            and "HuggingFaceTB/" not in block.text]  # needs the hub


def names(blocks):
    return [f"{block.page.stem}-{number}" for number, block in enumerate(blocks)]


def test_every_block_says_its_language():
    """Only recipes have blocks that are files."""
    assert not [block for block in BLOCKS if block.language not in LANGUAGES]
    assert not [block for block in BLOCKS if block.title and block.page.name != "add-your-own.md"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* of . layers:UserWarning")
@pytest.mark.parametrize("block", EXAMPLES, ids=names(EXAMPLES))
def test_example(block, capsys):
    exec(block.text, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


# ---- the recipes -----------------------------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """A row of the table of docs/add-your-own.md: the files that it names, and the blocks of the section it links."""

    files: list[str]
    blocks: list[Block]


def table_of_recipes():
    page = ROOT / "docs" / "add-your-own.md"
    for kind, anchor, files in re.findall(r"^\| \[an? (\w+)[\w ]*\]\(#([\w-]+)\) \| (.*?) \|", page.read_text(), re.M):
        blocks = [b for b in BLOCKS if b.page == page and b.section.lower().replace(" ", "-") == anchor]
        yield kind, Recipe(re.findall(r"`(.*?)`", files), blocks)


RECIPES = dict(table_of_recipes())


def at_work_in(folder, monkeypatch):
    """What is imported from the folder is forgotten."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    before = {*sys.modules}
    yield folder
    for name in {*sys.modules} - before:
        if str(place_of(sys.modules[name])).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in."""
    yield from at_work_in(tmp_path, monkeypatch)


def place_of(module):
    """The file of a module, or the folder of a package without one."""
    return getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")


def write_files(blocks, folder):
    for block in blocks:
        if block.title:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    write_files(BLOCKS, folder)
    return folder


@pytest.fixture
def recipes(written, monkeypatch):
    """A folder with all files of the page, to read alone."""
    yield from at_work_in(written, monkeypatch)


@pytest.fixture
def recipe(folder, request):
    """A folder with the files of one recipe and no other."""
    write_files(RECIPES[request.param].blocks, folder)
    return folder


def run_in(folder, *words):
    """A command as a user types it there: `python` is ours, and it finds the package."""
    paths = {"PATH": [Path(sys.executable).parent, os.environ["PATH"]],
             "PYTHONPATH": [ROOT, os.environ.get("PYTHONPATH", "")]}
    env = os.environ | {name: os.pathsep.join(map(str, parts)) for name, parts in paths.items()}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def test_every_kind_has_its_recipe():
    assert set(RECIPES) == {"map", "sampler", "attention", "task", "page"}
    assert sorted(sum((recipe.files for recipe in RECIPES.values()), [])) == sorted(b.title for b in BLOCKS if b.title)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["map"], indirect=True)
def test_recipe_passes_its_own_tests(recipe):
    """In another process, because its test files have names of ours."""
    done = run_in(recipe, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_map_of_the_recipe_obeys_the_laws_of_all_maps(recipes, kernel):
    import test_features as laws
    from mine.maps import ShiftedRF

    phi = ShiftedRF(kernel)
    for d in (1, 4):
        laws.test_unbiased(phi, d, samplers.orthogonal)
    laws.test_variance_is_the_closed_form(phi, 1)
    laws.test_shapes_and_batches(phi)
    laws.test_dtypes_and_gradients(phi)


@pytest.mark.slow
def test_map_of_the_recipe_attends_like_its_features(recipes):
    from mine.maps import ShiftedRF

    layer = Mechanism.of(features=ShiftedRF(), m=64).layer(2, 8, causal=False)
    q, k, v = torch.randn(3, 1, 2, 50, 8)
    x, y = q * 8**-0.25, k * 8**-0.25
    noise, params = layer.noise, layer.phi.fit(Statistics.of(x, y))
    torch.testing.assert_close(layer(q, k, v), attention_reference(x, y, v, layer.phi, noise, params))


# ---- commands --------------------------------------------------------------------------------------------------------


def words_of(text):
    """The commands of a block, without comments; a backslash at the end of a line continues it."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for words in (tuple(shlex.split(line, comments=True)) for line in lines) if words]


def inline_commands(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    return [tuple(shlex.split(code)) for code in re.findall(r"`((?:make|python -m|torchrun|pip) [^`]+)`", prose)]


COMMANDS = sorted({words for block in BLOCKS if block.language == "bash" for words in words_of(block.text)}
                  | {words for page in PAGES for words in inline_commands(page)})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command_exists(words, recipes):
    match words:
        case ("make", target, *variables):
            check_make(target, dict(variable.split("=", 1) for variable in variables))
        case ("pip", "install", "-e", what):
            extra = re.fullmatch(r"\.(?:\[(\w+)\])?", what)[1]
            assert extra is None or extra in project()["optional-dependencies"]
        case ("pip", "wheel", "--no-deps", "."):
            pass
        case ("export", assignment):
            assert re.fullmatch(r"CRT_DATA=\w+", assignment)
        case ("pip", "install", "gguf"):  # what tests/tools/fetch_wheel_models.py asks for
            pass
        case ("pip", "install", what):  # what is not on the index: a wheel, and the extras of what is installed
            wheel = f"crt_exp-{project()['version']}-py3-none-any.whl"
            assert what == wheel or re.fullmatch(r"crt_exp\[(\w+)\]", what)[1] in project()["optional-dependencies"]
        case ("python", "-m", "crt_exp.data", *arguments):
            options = data_command.parser().parse_args(arguments)
            name = getattr(options, "name", None)
            assert not name or sources.select(name)
        case ("python", "-m", "crt_exp.infer", *arguments):
            keys = {word.lstrip("-").partition("=")[0] for word in arguments if "=" in word or word.startswith("--")}
            assert any(keys <= {*parameters(options)} for options, _ in infer.KINDS.values())
        case ("python", "-m", "crt_exp.report", name, *arguments):
            check_report(name, arguments)
        case ("python", "-m", "crt_exp", "--help"):
            assert "usage" in check_command_line(["--help"])
        case ("python", "-m", "crt_exp", *arguments) | ("torchrun", _, "-m", "crt_exp", *arguments):
            check_run(arguments)
        case ("python", "-m", module):
            importlib.invalidate_caches()
            assert find_spec(module)
        case _:
            pytest.fail(f"no test knows what {' '.join(words)} does")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sbatch"], ids=lambda _: "")
def test_what_a_batch_file_starts(block, tmp_path, monkeypatch):
    """With commands in place of Slurm's that say what they were asked."""
    for name, line in {"scontrol": "printf '%s\\n' node7 node8", "srun": "printf '%s\\n' \"$@\""}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[7-8]",
                        "SLURM_NNODES": "2", "SLURM_JOB_ID": "5"}
    done = subprocess.run(["bash", "-eu"], input=block.text, env=env, capture_output=True, text=True)
    words = done.stdout.splitlines()
    place = words.index("crt_exp")
    assert done.returncode == 0 and words[:place] == [
        "torchrun", "--nnodes=2", "--nproc_per_node=8", "--rdzv_backend=c10d", "--rdzv_id=5",
        "--rdzv_endpoint=node7:29500", "-m"], done.stderr
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    check_run(words[place + 1:])


parser_of_reports = cache(report_command.parser)  # it lists the titles of all pages


def check_report(name, arguments):
    given = parser_of_reports().parse_args([name, *arguments])
    assert name.endswith(".py") or pages.load(name).page.sweeps(given.size)


def check_make(target, variables):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:.*## ", makefile, re.M) or pages.load(target)
    for name, value in variables.items():
        assert re.search(rf"^{name} +\?=", makefile, re.M)
        assert name != "SIZE" or value in pages.SIZES


def test_recipes_of_make_are_valid_shell():
    """`bash -n` parses what each target of the Makefile would run."""
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    commands = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    done = subprocess.run(["bash", "-n"], input=commands, capture_output=True, text=True)
    assert "crt_exp.data fetch" in commands and done.returncode == 0, done.stderr


def check_run(arguments):
    """The command line and the configuration that it composes, unless it asks for the version.

    Without Hydra's plugins, which are an extra, those that need one say so.
    """
    if arguments == ["--version"]:
        return
    if any(argument.startswith("hydra/") for argument in arguments) and find_spec("hydra_plugins") is None:
        with pytest.raises(ConfigError, match=r"pip install 'crt_exp\[sweep\]'"):
            check_command_line(arguments)
    else:
        check_command_line(arguments)


TINY = {  # the same command in a second: overrides that are added to it
    "uci": ["task.repeats=1", "task.sigmas=[0.3]"],
    "variance": ["task.pairs=4", "task.sigmas=[1.0]"],
    "projections": ["task.length=16", "task.ms=[4]", "task.samples=1"],
    "head_errors": ["task.length=16", "task.ms=[4]", "task.samples=1"],
    "approximation": ["task.length=16", "task.ms=[4]", "task.samples=1", "task.pairs=2", "task.rows=4"],
    "speed": ["task.lengths=[32]", "task.rounds=1"],
    "pointwise": ["task.lengths=[1.0]", "task.angles=3", "task.groups=1", "task.draws=2"],
    "qmc": ["task.pairs=4", "task.groups=1", "task.draws=2"],
    "clusters": ["task.points=5", "task.ms=[2]", "task.pairs=4", "task.repeats=1"],
    "flops": ["task.angles=3", "task.groups=1", "task.draws=2"],
    "mlm": ["task.text=wordnet", "task.vocabulary_size=500", "task.block=32", "task.cache_dir=cache",
            "task.sizes.hidden_size=16", "task.sizes.intermediate_size=16", "trainer.steps=4"],
    "imagenet": ["trainer.steps=2"],
    "mae": ["trainer.steps=2"],
    "trembl": ["task.dataset=generated", "task.preset=tiny", "task.generated.sequences=200", "+task.sizes.d=16",
               "+task.sizes.d_ff=16", "task.validation_share=0.1", "task.test_share=0.1", "trainer.steps=2"],
    "lra": ["trainer.steps=2", "+task.rules.train=60", "+task.rules.validation=20", "+task.rules.test=20",
            "+task.sizes.d=16", "task.cache_dir=null"],
    "recall": ["trainer.steps=2", "task.evaluated=8"],
    "pixels": ["trainer.steps=2", "task.evaluated=10", "+task.sizes.d=16"],
    "books": ["trainer.steps=2", "+task.sizes.d=16", "task.cache_dir=null"],
    "ptb": ["trainer.steps=2", "task.width=16"],
    "first": ["trainer.epochs=1"],
    "spread": [],
}


def task_of(words):
    return next((word.partition("=")[2] for word in words if word.startswith("task=")), "uci")


def runs():
    """Single runs on one process that need no model, no data, and no file."""
    for words in COMMANDS:
        task = task_of(words)
        no_run = {"-m", "--cfg", "--help", "--version", "--config-dir=conf"} & set(words[3:])
        given = ("task.model=", "task.csv=", "task.data_dir=", "experiment=", "task.init=outputs/")
        needs = any(word.startswith(given) for word in words)
        needs |= task == "mlm" and "task.text=wordnet" not in words
        needs |= bool({"task.corpus=ptb", "task.dataset=cifar10", "task.scale=full"} & set(words))
        needs |= task == "books" and "task.text=wordnet" not in words
        if words[:3] == ("python", "-m", "crt_exp") and task in TINY and not no_run and not needs:
            yield pytest.param(words[3:], TINY[task], id=" ".join(words[3:]))


@pytest.mark.slow
@pytest.mark.parametrize("words, tiny", list(runs()))
def test_command_runs(words, tiny, typed, folder):
    code, out, err = typed(*words, *tiny, "logger=none", "hydra.run.dir=run")
    assert code == 0, err
    assert str(folder / "run") in out


def commands_of_recipes():
    for kind, recipe in RECIPES.items():
        for block in recipe.blocks:
            for words in words_of(block.text) if block.language == "bash" else ():
                yield pytest.param(kind, words, id=" ".join(words))


@pytest.mark.slow
@pytest.mark.parametrize("recipe, words", list(commands_of_recipes()), indirect=["recipe"])
def test_command_of_a_recipe_runs(recipe, words, typed):
    """With the files of its recipe and no other; a run is made short."""
    if words[:3] == ("python", "-m", "crt_exp"):
        code, _, err = typed(*words[3:], *TINY[task_of(words)])
        assert code == 0, err
        runs = 6 if "-m" in words[3:] else 1  # the sweep has two maps and three seeds
        assert len(list((recipe / "outputs").rglob("metrics.jsonl"))) == runs
        return
    done = run_in(recipe, *words, *(TINY[task_of(words)] if words[0] == "torchrun" else []))
    assert done.returncode == 0, done.stderr
    if words[0] == "torchrun":
        assert len(list((recipe / "outputs").rglob("metrics.jsonl"))) == 1
    else:
        assert {path.suffix for path in (recipe / "outputs" / "report").iterdir()} == {".md", ".csv", ".png"}


GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())


def test_inline_keys_exist():
    """`task.causal=true`, `sampler=`, `trainer.keep`: the group, its choice, the key."""
    known = {*known_keys(), *GROUPS}
    pattern = re.compile(rf"`((?:{'|'.join(GROUPS)})[=.][^` ]*)`")
    spans = {span for page in PAGES for span in pattern.findall(page.read_text())}
    assert len(spans) > 20
    for span in spans:
        key, sign, value = span.partition("=")
        if key in GROUPS and re.fullmatch(r"\w+", value):
            assert value in choices(key), span
        assert key in known, span


def known_keys():
    for path in CONF.rglob("*.yaml"):
        text, node = path.read_text(), OmegaConf.to_container(OmegaConf.load(path))
        group = "" if path.parent == CONF or "@package _global_" in text else path.relative_to(CONF).parts[0]
        yield from flattened(group, node)


def flattened(prefix, node):
    for key, value in node.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        yield name
        if isinstance(value, dict):
            yield from flattened(name, value)
