"""Optional packages that do not load: what does not need them works, what needs them says so in one line."""

import os
import subprocess
import sys

import pytest
from helpers.covering import slow
from helpers.refusals import check_error

import crt_exp.optional as optional

LIBRARY = """
import torch, transformers
from transformers import BertConfig, BertModel
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
model = BertModel(BertConfig(**sizes)).eval()
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "PACKAGE"]:
    del sys.modules[name]
sys.path.insert(0, "broken")
from crt_exp import KernelRegressionClassifier, RandomFeatures, advise, swap_attention
swap_attention(model, "favorpp", m=8)
model(torch.arange(9)[None])
RandomFeatures("oprf", n_components=8).fit_transform(torch.randn(9, 4).numpy())
KernelRegressionClassifier().fit(torch.randn(9, 4).numpy(), [0, 1, 2] * 3)
print("done")
from crt_exp.__main__ import main
sys.argv = ["crt_exp", "task=TASK", "logger=none"]
main()
"""
BERT = """task=mlm task.text=wordnet task.vocabulary_size=500 task.sizes.hidden_size=16 trainer.batch=2 trainer.steps=1
    task.sizes.num_hidden_layers=1 task.sizes.num_attention_heads=2 task.sizes.intermediate_size=16"""


def write_broken(folder, name):
    """A package that fails at its import as one that was built for another torch does."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise OSError("lib.so: undefined symbol: other_torch")')


def python(folder, *words):
    """Run Python in a folder whose packages come first."""
    path = os.pathsep.join([str(folder), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "name, task",
    [
        ("torchaudio", "librispeech"),
        slow("torchvision", "imagenet"),
    ],
)
def test_a_broken_package_leaves_the_library_alone_and_a_task_names_it(name, task, tmp_path):
    write_broken(tmp_path / "broken", name)
    script = LIBRARY.replace("PACKAGE", name).replace("TASK", task)
    done = python(tmp_path, "-c", script)
    assert done.stdout == "done\n", done.stderr
    actual = (done.returncode, done.stdout, done.stderr)
    check_error(actual, f"{name} ", "does not load with torch", "other_torch", "pip install")


@pytest.mark.parametrize(
    "words",
    ["task=uci task.dataset=wine features=oprf features.m=8", BERT],
)
@pytest.mark.slow
def test_a_broken_torchaudio_leaves_other_tasks_alone(words, tmp_path):
    write_broken(tmp_path, "torchaudio")
    done = python(tmp_path, "-m", "crt_exp", *words.split(), "logger=none")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name, torch, requirement",
    [
        ("torchaudio", "2.12.1+cpu", "torchaudio==2.11.0"),
        ("torchaudio", "2.15.0", "torchaudio>=2.11.1"),
        ("torchvision", "2.12.1", "torchvision==0.27.*"),
        ("torchvision", "2.15.0", "torchvision>=0.29"),
        ("timm", "2.15.0", "timm"),
    ],
)
def test_the_version_that_fits(name, torch, requirement, monkeypatch):
    monkeypatch.setattr(optional.metadata, "version", {"torch": torch, name: "0.1"}.__getitem__)
    error = ImportError(name=name)
    error.__cause__ = ModuleNotFoundError(name=name)
    assert optional.explain(error).endswith(f"pip install '{requirement}'")
