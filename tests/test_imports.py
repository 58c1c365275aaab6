"""Imports: the diagram in docs/contributing.md, and a library that needs torch, scikit-learn and few others."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter

import pytest
from helpers.pages import ROOT, project
from omegaconf import OmegaConf

from crt_exp.registry import CONF, read_yaml

PACKAGE = ROOT / "crt_exp"
PICTURE = (ROOT / "docs" / "contributing.md").read_text()
BOXES = {}
for title, parts in re.findall(r'^ +(\w+)\["<b>(.*?)</b>', PICTURE, re.M):
    BOXES |= dict.fromkeys(parts.split(", "), title)
ARROWS = re.findall(r"^ +(\w+) --> (\w+)$", PICTURE, re.M)
COMMANDS = (
    "crt_exp.data",
    "crt_exp.report",
    "crt_exp.infer",
    "crt_exp.experiments.infer",
    "crt_exp.experiments.compare",
)
PLAIN = ("samplers", "features", "attention", "nearfar")
FRONT = "crt_exp"  # its names are imported when first used, so it stands beside the subpackages


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imported(name):
    """The modules of the package that a module imports, also inside functions and for types alone."""
    actual = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            actual |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: write the full name of the module"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            actual |= {module if module in MODULES else node.module for module in names}
    return {module for module in actual if module in MODULES} - {name, FRONT}


def box(name):
    """The box of the picture that a module stands in."""
    if name in COMMANDS or name.endswith(".__main__"):
        return "commands"
    return BOXES[name.removeprefix("crt_exp.experiments.").removeprefix("crt_exp.").split(".")[0]]


@cache
def below(start):
    """The boxes that arrows lead to from one."""
    return frozenset().union(*({end} | below(end) for begin, end in ARROWS if begin == start))


def test_imports_are_the_arrows_of_the_picture():
    actual = []
    for name in MODULES:
        if name != FRONT:
            for other in sorted(imported(name)):
                actual.append((name, other))
    odd = []
    for name, other in actual:
        if box(other) not in below(box(name)) | {box(name)}:
            odd.append(
                f"{name} imports {other}: docs/contributing.md has no arrows from {box(name)} to {box(other)}"
            )
    assert not odd, "\n".join(odd)
    assert set(ARROWS) <= {(box(name), box(other)) for name, other in actual}
    assert len({*ARROWS}) == len(ARROWS)
    implied = []
    for begin, end in ARROWS:
        for other in below(begin):
            if other != end and end in below(other):
                implied.append((begin, end))
    assert not implied


def test_no_circle():
    TopologicalSorter(
        {name: imported(name) for name in MODULES}
    ).prepare()  # raises CycleError, which names the circle


def needed_by(part):
    """The modules that a part of the library imports, however indirectly, with its own."""
    needed = set()
    left = [name for name in MODULES if f"{name}.".startswith(f"{FRONT}.{part}.")]
    while left:
        name = left.pop()
        needed.add(name)
        left += imported(name) - needed
    return needed


@pytest.mark.parametrize("part", ["mechanism", "swap", "sampled_softmax", "estimators", *PLAIN])
def test_the_library_needs_no_experiments(part):
    needed = needed_by(part)
    assert needed
    assert not {name for name in needed if name.startswith(f"{FRONT}.experiments")}


@pytest.mark.parametrize("part", PLAIN)
def test_maps_and_layers_need_no_names(part):
    """Names and files become arguments in `Mechanism`, which stands above maps and layers."""
    assert not needed_by(part) & {f"{FRONT}.registry", f"{FRONT}.mechanism"}


# ---- the light install: pip install crt_exp

LIGHT = {"torch", "numpy", "scipy", "scikit-learn", "safetensors", "pyyaml", "pydantic"}
HIDDEN = (
    "hydra",
    "omegaconf",
    "transformers",
    "timm",
    "pandas",
    "matplotlib",
    "datasets",
    "accelerate",
    "wandb",
    "torchvision",
    "torchaudio",
    "tqdm",
    "psutil",
    "jiwer",
    "Bio",
    "soundfile",
    "sentencepiece",
    "peft",
    "huggingface_hub",
    "tokenizers",
    "PIL",
)
USES = """
import sys

class Hiding:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name}", name=name)

sys.meta_path.insert(0, Hiding)
import torch
from torch import nn

before = {*sys.modules}
import crt_exp
print({name.partition(".")[0] for name in {*sys.modules} - before} - {*sys.stdlib_module_names})

from crt_exp import Mechanism, RandomFeatures, calibrate_attention, describe_attention, swap_attention, unswap_attention
from crt_exp.registry import choices

for name in choices("attention"):
    Mechanism.of(name).layer(2, 4)
RandomFeatures("oprf", n_components=8).fit_transform(torch.randn(9, 4).numpy())
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
swap_attention(encoder, "nearfar")
calibrate_attention(encoder, [torch.randn(1, 9, 8)])
try:
    describe_attention(encoder)
except ImportError as error:
    print(error)
unswap_attention(encoder)
"""


def test_the_library_needs_the_light_install_alone_and_its_import_loads_nothing():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"HIDDEN = {HIDDEN}\n{USES}"],
        capture_output=True,
        text=True,
    )
    first, *rest = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert first == "{'crt_exp'}", done.stdout + done.stderr
    assert "pandas" in "".join(rest), done.stdout + done.stderr
    names = {
        requirement.partition(">")[0].partition("<")[0] for requirement in project()["dependencies"]
    }
    assert names == LIGHT


def test_files_are_read_as_omegaconf_reads_them():
    groups = ("attention", "features", "sampler")
    paths = [CONF / "config.yaml"]
    for group in groups:
        paths += sorted((CONF / group).rglob("*.yaml"))
    for path in paths:
        actual = read_yaml(path)
        expected = OmegaConf.to_container(OmegaConf.load(path))
        if path.name == "config.yaml":  # the library reads no Hydra section
            del actual["hydra"], expected["hydra"]
        assert actual == expected, path
