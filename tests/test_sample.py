"""python -m crt_exp.sample: what is drawn has the chances of the parallel pass, and mistakes are told."""

import json

import hostile
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_language import NAMES, calibrated, kept, mechanism
from test_trembl import GENERATED, OPTIONS

from crt_exp import Mechanism, sample
from crt_exp.config import own_names
from crt_exp.models import language
from crt_exp.models.generation import TokenChoice, generate
from crt_exp.tasks.trembl import VOCABULARY, TrEMBL

PROMPT = torch.tensor([9, 1, 4])


# ---- drawing ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_symbols_are_drawn_by_the_chances_of_the_parallel_pass(name):
    """Each is what the same number draws from the logits of the whole sequence at its place."""
    model, choice = calibrated(name), TokenChoice(0.8, top_p=0.9)
    found = generate(model, PROMPT, 20, choice, [3, 4], never=[0])
    for seed, row in zip([3, 4], found):
        whole = model(torch.cat([PROMPT, torch.tensor(row)])[None])[0, 2:-1]
        whole[:, 0] = -torch.inf
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for _ in row])
        assert len(row) == 20 and 0 not in row and choice.draw(whole, uniform).tolist() == row


@torch.no_grad()
def test_frequencies_are_the_chances():
    model = calibrated("favorpp")
    logits = model(PROMPT[None])[:, -1]
    expected = (2 * logits[0]).softmax(-1)
    drawn = [row[0] for row in generate(model, PROMPT, 1, TokenChoice(0.5), range(4000))]
    counts = torch.bincount(torch.tensor(drawn), minlength=11) / 4000
    assert ((counts - expected).abs() < 5 * (expected / 4000).sqrt()).all()


def test_a_sequence_depends_on_its_seed_alone():
    model = calibrated("exact")
    alone = generate(model, PROMPT, 10, TokenChoice(), [5])
    among = generate(model, PROMPT, 10, TokenChoice(), [1, 5, 2])
    assert among[1] == alone[0] and among[0] != among[2]


def test_the_end_ends_a_sequence():
    model = calibrated("exact")
    free, ended = (generate(model, PROMPT, 25, TokenChoice(), range(6), end=end) for end in (None, 7))
    for whole, cut in zip(free, ended):
        assert cut == whole[:whole.index(7) if 7 in whole else None]
    assert any(7 in row for row in free)


LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


@pytest.mark.parametrize("choice, expected", [
    (TokenChoice(), [0.4, 0.3, 0.2, 0.1]),
    (TokenChoice(temperature=0), [1, 0, 0, 0]),
    (TokenChoice(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    (TokenChoice(top_k=2), [4 / 7, 3 / 7, 0, 0]),
    (TokenChoice(top_k=9), [0.4, 0.3, 0.2, 0.1]),
    (TokenChoice(top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
    (TokenChoice(top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
    (TokenChoice(top_p=1e-9), [1, 0, 0, 0]),
    (TokenChoice(top_p=1.0), [0.4, 0.3, 0.2, 0.1]),
    (TokenChoice(top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
], ids=str)
def test_chances(choice, expected):
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(choice.chances(LOGITS[:, order])[0], torch.tensor(expected).double()[order])


def test_a_symbol_without_a_chance_is_never_drawn():
    uniform = torch.tensor([0.0, 1 - 1e-16])
    logits = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf]]).expand(2, -1)
    assert TokenChoice().draw(logits, uniform).tolist() == [1, 2]


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """The model of a run of task=trembl."""
    task = TrEMBL(**OPTIONS)
    model = task.build(mechanism("favorp"))
    task.export(model, model.state_dict(), tmp_path / "run")
    return tmp_path / "run"


def called(capsys, *arguments):
    code = sample.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_command(run, capsys, tmp_path):
    code, out, err = called(capsys, f"run={run}", "prompt=MK", "n=5", "seed=3", "batch=2", "top_k=5")
    lines = out.splitlines()
    assert code == 0 and err == "" and len(lines) == 5 and len(set(lines)) > 1
    assert all(line.startswith("MK") and len(line) <= 16 and set(line) <= set(VOCABULARY["letters"]) for line in lines)
    assert called(capsys, f"run={run}", "prompt=MK", "seed=4", "top_k=5")[1].splitlines() == lines[1:2]
    assert len(called(capsys, f"run={run}", "length=9", "temperature=0")[1].strip()) <= 9
    path = tmp_path / "out.fasta"
    assert called(capsys, f"run={run}", "n=2", f"output={path}")[:2] == (0, "")
    assert path.read_text().count(">sample-") == 2 and list(tmp_path.glob("*.part")) == []


OWN = """
import torch
from crt_exp.samplers import DenseNoise, iid

def antithetic(m, d, generator=None, batch=(), dtype=torch.float32, scale: float = 1.0):
    half = iid((m + 1) // 2, d, generator, batch, dtype).rows()
    return DenseNoise(torch.stack([half, -half], -2).flatten(-3, -2)[..., :m, :], gaussian=True)
"""


def test_a_run_with_a_sampler_of_ones_own_is_read_where_its_names_are_given(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_samplers.py").write_text(OWN)
    (tmp_path / "conf/sampler").mkdir(parents=True)
    (tmp_path / "conf/sampler/antithetic.yaml").write_text("_target_: own_samplers.antithetic\n_partial_: true\n")
    task = TrEMBL(**OPTIONS)
    with own_names([tmp_path / "conf"]):
        model = task.build(Mechanism.of("favorp", sampler="antithetic", m=8))
    task.export(model, model.state_dict(), tmp_path / "run")
    code, _, err = called(capsys, f"run={tmp_path / 'run'}")
    assert code == 2 and "unknown sampler 'antithetic'" in err and "names=FOLDER" in err
    code, out, err = called(capsys, f"run={tmp_path / 'run'}", f"names={tmp_path / 'conf'}")
    assert (code, err) == (0, "") and out
    assert "it takes a folder" in called(capsys, f"run={tmp_path / 'run'}", "names=nowhere")[2]


@pytest.mark.parametrize("name", ["sampler", "imported", "phi", "m huge", "cells", "deep", "name in a list"])
def test_a_hostile_run_runs_nothing(name, run, capsys, tmp_path, monkeypatch):
    sprung = hostile.set_trap(tmp_path, monkeypatch)
    edit(run, lambda config: dict(hostile.changes(tmp_path))[name](config["attention"]))
    code, out, err = called(capsys, f"run={run}")
    assert code == 2 and out == "" and not sprung.exists()
    hostile.check_one_line(err)


@pytest.mark.parametrize("key, value", [("sizes", {"d": 10**9}), ("sizes", {"layers": 10**12}),
                                        ("sizes", {"d_ff": 2**40}), ("sizes", {"heads": 0}),
                                        ("sizes", {"d": {"_target_": "os.system"}}), (None, {"symbols": 10**12}),
                                        (None, {"length": 10**12}), (None, {"causal": "x"}),
                                        (None, {"sizes": 5}), (None, {"vocabulary": 5}), ("vocabulary", {"letters": 5}),
                                        ("vocabulary", {"begin": 10**6}), ("vocabulary", {"end": -1}),
                                        ("vocabulary", {"letters": "A" * 1000})])
def test_a_run_of_huge_sizes_is_one_line_and_takes_no_memory(key, value, run, capsys):
    edit(run, lambda config: (config if key is None else config[key]).update(value))
    code, _, err = called(capsys, f"run={run}")
    assert code == 2 and "Error:" not in err.replace("ConfigError:", "").replace("DataError:", "")
    hostile.check_one_line(err)


def edit(run, change):
    file = run / "model/config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_a_number_with_an_exponent_is_one(run, capsys):
    assert called(capsys, f"run={run}", "temperature=1e-1")[1] == called(capsys, f"run={run}", "temperature=0.1")[1]


def test_damaged_weights_and_nan_are_refused(run, capsys):
    weights = run / "model/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-9] + bytes([content[-9] ^ 64]) + content[-8:])
    code, _, err = called(capsys, f"run={run}")
    assert code == 2 and "model.safetensors is damaged: it is not what the run wrote" in err
    tensors = load_file(weights)
    tensors["norm.weight"][3] = torch.nan
    save_file(tensors, weights)
    (run / "model/digests.json").unlink()               # as the message says, for a change on purpose
    assert "norm.weight holds NaN" in called(capsys, f"run={run}")[2]


def test_help_names_every_key(capsys):
    _, out, _ = called(capsys, "--help")
    assert all(f"  {key} " in out for key in sample.WORDS)


@pytest.mark.parametrize("arguments, words", [
    (["prompt=MKJ"], ["prompt: 'J', letter 3, is not in the vocabulary"]),
    (["prompt=mk"], ["'m', letter 1"]),
    (["prompt=" + "A" * 16], ["its 16 letters leave none of length = 16"]),
    (["length=17"], ["length = 17: the run has learned positions for 16"]),
    (["top_p=0"], ["top_p = 0: it takes a number above 0"]),
    (["top_k=0"], ["top_k = 0", "at least 1"]),
    (["temperature=-1"], ["temperature = -1", "at least 0"]),
    (["temprature=1"], ["did you mean temperature?"]),
    (["n"], ["'n' is not of the form key=value"]),
    (["run=/nowhere"], ["run=... comes twice"]),
    (["device=foo"], ["device = foo: it takes a device that is there"]),
    (["prompt=M\udcff"], ["prompt = 'M\\udcff': it holds bytes that are no UTF-8"]),
], ids=ascii)
def test_mistakes(arguments, words, run, capsys):
    code, out, err = called(capsys, f"run={run}", *arguments)
    assert code == 2 and out == "" and err.startswith("crt_exp: error: ") and all(word in err for word in words), err


def test_what_draws_nothing(tmp_path, capsys):
    assert called(capsys)[0] == 2 and "there is no such directory" in called(capsys, "run=/nowhere")[2]
    task = TrEMBL(**OPTIONS | {"direction": "bidirectional", "generated": GENERATED})
    model = task.build(mechanism("exact"))
    task.export(model, model.state_dict(), tmp_path / "masked")
    code, _, err = called(capsys, f"run={tmp_path / 'masked'}")
    assert code == 2 and "predicts masked symbols" in err
    kept(tmp_path / "other", "exact")
    code, _, err = called(capsys, f"run={tmp_path / 'other'}")
    assert code == 2 and "other" in err
    assert language.load(tmp_path / "other", "run").symbols == {"kind": "letters"}
