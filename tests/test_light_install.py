"""`pip install crt_exp` brings torch, numpy, scipy, scikit-learn, safetensors and PyYAML: the library needs no more."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from crt_exp.config import CONF, read_yaml

LIGHT = {"torch", "numpy", "scipy", "scikit-learn", "safetensors", "pyyaml", "pydantic"}
BLOCKED = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {names} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
NAMES = ("hydra", "omegaconf", "transformers", "timm", "pandas", "matplotlib", "datasets", "accelerate",
         "wandb", "torchvision", "torchaudio", "tqdm", "psutil", "jiwer", "Bio", "soundfile", "sentencepiece",
         "peft", "huggingface_hub", "tokenizers", "PIL")
USES = """
import torch
import crt_exp
from torch import nn
from crt_exp import Mechanism, RandomFeatures, calibrate_attention, describe_attention, swap_attention, unswap_attention
from crt_exp.attention import attention
from crt_exp.config import choices
from crt_exp.features import OPRF, Statistics
from crt_exp.samplers import orthogonal
from crt_exp.sampled_softmax import SampledSoftmax

g = torch.Generator().manual_seed(0)
x, y, v = (torch.randn(1, 2, 9, 4, generator=g) for _ in range(3))
phi = OPRF(kernel="softmax")
attention(x, y, v, phi, orthogonal(8, 4, g, batch=(2,)), phi.fit(Statistics.of(x, y)))
for name in choices("attention"):
    Mechanism.of(name).layer(2, 4)
RandomFeatures("oprf", n_components=8).fit_transform(x[0, 0].numpy())
layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
swap_attention(encoder, "nearfar")
calibrate_attention(encoder, [torch.randn(1, 9, 8)])
encoder(torch.randn(1, 9, 8))
try:
    describe_attention(encoder)
except ImportError as error:
    assert "pandas" in str(error)
else:
    raise AssertionError
unswap_attention(encoder)
print("works")
"""


def run(code):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)


def test_the_library_needs_the_light_install_alone():
    done = run(BLOCKED.format(names=set(NAMES)) + USES)
    assert done.stdout == "works\n", done.stderr


def test_the_command_line_says_what_it_needs():
    code = "sys.argv[1:] = ['task=uci']\nfrom crt_exp.__main__ import main\nmain()"
    done = run(BLOCKED.format(names=set(NAMES)) + code)
    assert done.returncode == 2 and done.stderr.endswith("pip install 'crt_exp[run]'\n"), done.stderr


def test_the_import_costs_nothing_beyond_torch():
    code = ("import time, torch\nstart = time.perf_counter()\nimport crt_exp\nprint(time.perf_counter() - start)")
    assert min(float(run(code).stdout) for _ in range(2)) < 0.1


def test_what_the_project_asks_for():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    names = {requirement.partition(">")[0].partition("<")[0] for requirement in project["dependencies"]}
    assert names == LIGHT
    assert {"run", "dev", "test", "docs", "sweep", "robotics", "adapt"} <= project["optional-dependencies"].keys()


FILES = [CONF / "config.yaml", *(path for group in ("attention", "features", "sampler")
                                 for path in sorted((CONF / group).rglob("*.yaml")))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_files_are_read_as_omegaconf_reads_them(path):
    found, expected = read_yaml(path), OmegaConf.to_container(OmegaConf.load(path))
    if path.name == "config.yaml":  # of whose last part the library reads nothing
        del found["hydra"], expected["hydra"]
    assert found == expected


@pytest.mark.parametrize("text", ["a: 1\n  b: 2", "a: [1,\n 2", "a: !!python/name:os.system"])
def test_what_is_no_plain_yaml_is_refused(text, tmp_path):
    (tmp_path / "x.yaml").write_text(text + "\n")
    with pytest.raises(ValueError, match="x.yaml: (.|\n)*line"):
        read_yaml(tmp_path / "x.yaml")
