"""The command line: composed configurations, and metrics of tiny runs.

Runs are of every task, of a sweep, stopped and resumed, and in two processes.
"""

import atexit
import io
import json
import re
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import yaml
from helpers.small_bert import write_glue, write_model, write_text
from helpers.small_images import write_images
from helpers.small_speech import write_digits
from helpers.stopping import stopped_and_continued
from helpers.torchrun import torchrun
from omegaconf import OmegaConf
from safetensors.torch import load_file

from crt_exp.experiments.evolution import environments
from crt_exp.experiments.runner.command_line import compose
from crt_exp.experiments.tasks.trembl import TrEMBL
from crt_exp.registry import CONF, choices
from crt_exp.train import main

UNTOLD = re.compile(
    "time|second|memory|mib|_ms|ms$|speed|faster|date|version|path|commit|^ratio$|^best$|recommend"
    "|^inference$|^training$"
)  # of task=speed, ms
SEQUENCES = "+task.sizes.heads=2 +task.sizes.layers=1 +task.sizes.d_ff=32 +task.sizes.d=16"
ENCODER = """task.sizes.hidden_size=32 task.sizes.num_hidden_layers=2 task.sizes.num_attention_heads=2 trainer.batch=8
    task.sizes.intermediate_size=48 task.block=16 trainer.epochs=1 task.text={text}"""
DECODER = f"task=mlm task.causal=true {ENCODER} task.vocabulary_size=300"
VIT = """task.sizes.patch=4 task.sizes.width=32 task.sizes.depth=2 task.sizes.heads=2 task.workers=0 trainer.batch=8
    trainer.epochs=2 task.data_dir={images} task.size=12"""
PROTEINS = f"""task=trembl trainer.batch=16 task.max_length=16 task.validation_share=0.1 task.test_share=0.1
    task.generated.sequences=150 task.generated.shortest=8 task.generated.longest=16 task.generated.nearest=2
    task.generated.farthest=4 {SEQUENCES}"""
PTB = """task=ptb trainer.batch=4 trainer.steps=6 task.width=16 task.bptt=7 task.sampling.negatives=5
    task.sampling.rebuild_every=3 task.eval_columns=4"""
ROBOT = """task.size=8 task.policy.patch=4 task.policy.top=2 task.strategy.generations=2 task.strategy.population=4
    task.strategy.evaluate_every=2 task.strategy.evaluated=2 task.strategy.tested=2 attention=hrf_angular
    features.m=8"""
FAVORPP = "attention=favorpp features.m=8"
# The command lines of each run; one may start from the directory of the one {before} it.
RUNS = {
    "uci": ["task=uci task.repeats=2 task.sigmas=[0.1,0.3] features.m=16"],
    "uci exact": ["task=uci task.repeats=1 task.sigmas=[0.3] attention=exact task.dataset=digits"],
    "uci matern": ["task=uci task.repeats=1 task.sigmas=[0.3] features=matern features.m=16"],
    "glue": [
        f"""task=glue task.dataset=sst2 task.data_dir={{glue}} task.model={{bert}} task.max_length=40
        trainer.batch=8 trainer.epochs=1 trainer.lr=5e-3 {FAVORPP}"""
    ],
    "mlm": [f"task=mlm {ENCODER} task.vocabulary_size=150 {FAVORPP}"],
    "mlm causal nearfar": [
        f"""{DECODER} attention=nearfar attention.block=4 attention.exact_until=4 attention.open=2
        attention.cells=2 attention.heavy=1"""
    ],
    "transfer": [
        f"{DECODER} attention=exact",
        """task=transfer task.causal=true task.text={text} task.block=16 trainer.batch=8 trainer.steps=4
                    task.init={before} attention=hedgehog features.m=8""",
    ],
    "adapted by LoRA": [
        f"{DECODER} attention=exact",
        f"{DECODER} task.init=uptrain task.model={{before}}/model {FAVORPP} trainer.adapt=lora",
    ],
    "librispeech": [
        f"""task=librispeech task.corpus=fsdd task.data_dir={{digits}} task.strings.train=24
        task.strings.validation=6 task.strings.test=9 task.batch_seconds=12 trainer.epochs=1 +task.sizes.layers=2
        +task.sizes.dim=16 +task.sizes.ffn=32 +task.sizes.heads=2 +task.sizes.kernel=5 +task.sizes.predictor=16
        +task.sizes.joiner=16 {FAVORPP}"""
    ],
    "imagenet": [f"task=imagenet {VIT} {FAVORPP} task.augment.mixup=0.8 task.drop_path=0.2"],
    "mae": [
        f"""task=mae {VIT} task.sizes.decoder_width=16 task.sizes.decoder_depth=1 task.sizes.decoder_heads=2
        attention=favorp features.m=8"""
    ],
    "trembl": [f"{PROTEINS} trainer.steps=6 {FAVORPP}"],
    "trembl masked": [f"{PROTEINS} trainer.steps=6 attention=relu task.direction=bidirectional"],
    "pixels": [f"task=pixels trainer.steps=4 task.evaluated=10 {SEQUENCES} {FAVORPP}"],
    "books": [
        f"""task=books task.text={{text}} trainer.steps=4 task.vocabulary_size=300 task.max_length=16
        trainer.batch=8 {SEQUENCES} {FAVORPP}"""
    ],
    "lra": [
        f"""task=lra +task.rules.train=60 +task.rules.validation=20 +task.rules.test=20 +task.rules.longest=24
        trainer.steps=6 trainer.batch=8 {SEQUENCES} {FAVORPP}"""
    ],
    "recall": [
        f"""task=recall task.symbols=8 task.rows=64 task.evaluated=8 trainer.batch=8 attention=window
        attention.block=4 attention.first=2 {SEQUENCES}"""
    ],
    "ptb": [PTB],
    "ptb sampled": [f"{PTB} task.softmax=features features=oprf features.m=16"],
    "locomotion": [f"task=locomotion {ROBOT} task.seconds=1.5"],
    "arm_sweeping": [f"task=arm_sweeping {ROBOT} task.particles=4"],
    "advise": [
        """task=advise task.model={bert} task.text={text} task.length=32 task.samples=2 task.calibration=1
        task.rounds=1 task.attentions=[exact,uniform,window,relu]"""
    ],
    "fidelity": [
        """task=fidelity task.model={bert} task.text={text} task.length=24 task.texts=3 task.draws=2
        attention=favorpp features.m=8"""
    ],
    "variance": ["task=variance task.pairs=20 task.sigmas=[0.3,0.9]"],
    "projections": ["task=projections task.length=32 task.ms=[8,16] task.samples=3"],
    "approximation": [
        """task=approximation task.length=64 task.ms=[16] task.samples=2 task.rows=8
        task.heads=2 task.d=16 attention=favorpp"""
    ],
    "pointwise": [
        "task=pointwise task.d=8 task.lengths=[1.0] task.angles=3 task.groups=2 task.draws=4"
    ],
    "qmc": ["task=qmc task.pairs=20 task.groups=2 task.draws=2 features.m=16"],
    "clusters": ["task=clusters task.d=8 task.points=20 task.ms=[20] task.pairs=20 task.repeats=2"],
    "flops": ["task=flops task.budgets=[1000] task.d=16 task.angles=3 task.groups=2 task.draws=4"],
    "speed": ["task=speed task.lengths=[16] task.rounds=1"],
}
TRAINING = {
    "glue",
    "mlm",
    "transfer",
    "librispeech",
    "imagenet",
    "mae",
    "trembl",
    "pixels",
    "books",
    "lra",
    "recall",
    "ptb",
}
CACHING = {"mlm", "transfer", "trembl", "books", "lra", "advise", "fidelity"}


def groups() -> list[str]:
    return [*RUNS, *OTHERS]


def cases(group: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if group in OTHERS:
            return OTHERS[group](folder)
        for number, stage in enumerate(RUNS[group]):
            before = folder / str(number - 1)
            _typed(stage, folder / str(number), before=before)
        return {"metrics": _last(folder / str(number))}


@cache
def _files() -> dict[str, Path]:
    """Text, a GLUE task, an encoder, images and spoken digits, written once in a process."""
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return {
        "text": write_text(root / "text.txt", 300),
        "glue": write_glue(root / "glue/SST-2", "sst2"),
        "bert": write_model(
            root / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        ),
        "images": write_images(root / "images"),
        "digits": write_digits(root / "digits"),
    }


def _arguments(line: str, directory: Path, **places: Path) -> list[str]:
    words = re.sub(r"\{(\w+)\}", lambda m: str((_files() | places)[m.group(1)]), line).split()
    task = next(word.split("=")[1] for word in words if word.startswith("task="))
    own = ["trainer.cpu=true"] * (task in TRAINING) + ["task.cache_dir=null"] * (task in CACHING)
    return [*words, "logger=none", f"hydra.run.dir={directory}", *own]


def _typed(line: str, directory: Path, **places: Path) -> str:
    code, out, _ = _started(*_arguments(line, directory, **places))
    assert code == 0, out
    return out


def _started(*args: str, directory=None) -> tuple[int, str, str]:
    """A command line in this process: its exit code and its output."""
    out = io.StringIO()
    code = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.delenv("CRT_DATA", raising=False)
        patch.setattr(sys, "argv", ["crt_exp", *args])
        patch.setattr(environments, "STROKES", 1)  # of task=arm_sweeping, for a short rollout
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), ""


def _last(directory: Path) -> dict:
    return _plain(json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1]))


def _plain(node):
    """Without what depends on the clock, the place or the wording; numbers have nine digits."""
    if isinstance(node, dict):
        return {
            key: _plain(value)
            for key, value in node.items()
            if not UNTOLD.search(key) and not (isinstance(value, str) and len(value) > 40)
        }
    if isinstance(node, list):
        return [_plain(each) for each in node]
    return float(f"{node:.9g}") if isinstance(node, float) else node


def _sweep(folder: Path) -> dict:
    out = _typed(
        f"""-m task=uci task.repeats=1 task.sigmas=[0.3] features=trig,oprf features.m=8,16
                 hydra.sweep.dir={folder}/sweep""",
        folder / "unused",
    )
    runs = sorted(path.parent for path in folder.rglob("metrics.jsonl"))
    rows = len(re.findall(r"^.*(?:trig|oprf)", out, re.M))
    return {"metrics": {path.name: _last(path) for path in runs}, "rows": rows}


def _resumed(folder: Path) -> dict:
    """The tensors that a stopped and resumed run keeps are those of an uninterrupted one, bit for bit."""
    line = f"{PROTEINS} {FAVORPP} trainer.steps=12 trainer.save_every=5 trainer.log_every=2"
    _typed(line, folder / "whole")
    with pytest.MonkeyPatch.context() as patch:
        stopped_and_continued(_started, patch, TrEMBL, 9, *_arguments(line, folder / "stopped"))
    one, two = (
        load_file(folder / name / "model/model.safetensors") for name in ("whole", "stopped")
    )
    return {
        "metrics": _last(folder / "stopped"),
        "equal": all(bool((one[key] == two[key]).all()) for key in one),
    }


def _processes(folder: Path) -> dict:
    done = torchrun(
        *_arguments(f"{PROTEINS} trainer.steps=6 {FAVORPP} task.dropout=0", folder / "run"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {"metrics": _last(folder / "run")}


OTHERS = {
    "a sweep and its table": _sweep,
    "stopped and resumed": _resumed,
    "two processes": _processes,
}

# ---- configurations: what differs from the one without arguments

BASE = "python -m crt_exp"


def configurations() -> list[str]:
    return [
        BASE,
        *sorted(p.name for p in CONF.iterdir() if p.is_dir() and p.name not in ("report", "hydra")),
    ]


def configuration(group: str) -> dict:
    """The composed configuration of every choice of a group."""
    base = _composed()
    if group == BASE:
        return base
    return {name: _changes(base, _composed(f"{group}={name}")) for name in choices(group)}


def _composed(*overrides: str) -> dict:
    """{"task.dataset": "wine", ...}, interpolations of paths and dates as they are written."""
    cfg = compose([*overrides])
    plain = yaml.safe_load(
        OmegaConf.to_yaml(OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]))
    )
    return dict(_flat(plain))


def _flat(node, path: str = ""):
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def _changes(base: dict, new: dict) -> dict:
    changed = {}
    for key, value in new.items():
        if key not in base or base[key] != value:
            changed[key] = value
    return changed | {key: "(absent)" for key in base if key not in new}
