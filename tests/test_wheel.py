"""The wheel, built and installed outside the checkout: its commands, a swap and an estimator."""

import os
import subprocess
import sys
import sysconfig

import pytest
from helpers.pages import ROOT

LIBRARY = """
import crt_exp, torch
from torch import nn
from crt_exp import RandomFeatures, swap_attention

assert "site-packages" in crt_exp.__file__ and crt_exp.__file__.startswith(PREFIX)
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
swap_attention(encoder, "favorpp", m=8)
encoder(torch.randn(1, 9, 8))
RandomFeatures("oprf", n_components=8).fit_transform(torch.randn(9, 4).numpy())
"""
UCI = "task=uci task.dataset=digits features=oprf features.m=128 logger=none"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_works_outside_the_checkout(tmp_path):
    """Packages that the wheel needs are those of this environment, without its copy of crt_exp."""
    environment = {}
    for key, text in os.environ.items():
        if key != "PYTHONPATH":
            environment[key] = text

    def run(*words):
        words = [str(word) for word in words]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    new = tmp_path / "new"
    run(sys.executable, "-m", "venv", new)
    run(new / "bin/pip", "install", "-q", "--no-deps", "--no-index", wheel)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = new / "lib" / version / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    assert "task=glue" in run(new / "bin/crt_exp", "--help")
    assert "digits: accuracy" in run(new / "bin/crt_exp", *UCI.split())
    run(new / "bin/python", "-W", "ignore", "-c", LIBRARY.replace("PREFIX", repr(str(new))))
    assert "uci/abalone" in run(new / "bin/python", "-m", "crt_exp.experiments.data", "list")
