"""make proteins, kernels and redraw: their arms are command lines and pairs, and their verdicts follow the records."""

from dataclasses import replace

import numpy as np
import pytest
from test_protein_data import name, sequences

from crt_exp.report import (
    kernels,
    protein_page,
    protein_runs,
    proteins,
    redraw,
    redraw_page,
    redraw_runs,
    redraw_verdicts,
    writing,
)
from crt_exp.report.evidence import Unjudged, Verdict
from crt_exp.report.protein_runs import DIRECTIONS, GENERATED, REAL, B, U
from crt_exp.report.redraw_runs import Arm, Bounds
from crt_exp.runner.command_line import check_command_line

SMALL = protein_runs.SETTINGS["small"]
SPLITS = ("train", "validation", "test", "ood")


def words(verdicts):
    return {verdict.claim.text: verdict.word for verdict in verdicts}


# ---- what they share


@pytest.mark.parametrize("size", ["small", *(pytest.param(size, marks=pytest.mark.slow) for size in ("gpu", "full"))])
def test_every_run_is_a_command_line(size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setting, moved = protein_runs.SETTINGS[size], redraw_runs.SETTINGS[size]
    keys = [protein_runs.training("reformer", U, 0, setting),
            kernels.run_of(kernels.LINEAR_TRANSFORMER, B, 0, setting, REAL),
            redraw_runs.run_of(moved.main, Arm("favorpp", 100), 0, moved)]
    for key in keys:
        check_command_line([*key["overrides"], "logger=none", "hydra.run.dir=run"])


def test_arms_of_a_seed_differ_in_their_attention_alone():
    keys = proteins.runs_of(SMALL, REAL)
    of = lambda name: set(keys[B, name, 2]["overrides"]) - {f"attention={name}", f"features.m={SMALL.m}",
                                                            *SMALL.options.get(name, ())}
    assert len({frozenset(of(name)) for name in protein_runs.NAMES}) == 1
    assert not any(name == "linformer" for way, name, _ in keys if way == U)
    moved = redraw_runs.SETTINGS["small"]
    a, b = (redraw_runs.uptraining(moved.main, moved)[Arm(name), 4]["overrides"] for name in ("favorp", "favorpp"))
    assert set(a) ^ set(b) == {"attention=favorp", "attention=favorpp"}
    assert f"task.init={moved.start(moved.main, 1)}" in a  # the second of three exact models
    assert len({key.split("=")[0] for key in a}) == len(a)


def test_an_exact_model_that_was_trained_is_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(protein_runs.runs.Home, "kept", lambda home, overrides: asked.append(overrides))
    place = protein_runs.exact(B, 1)
    assert len(asked) == 1 and "seed=1" in asked[0] and place.name.startswith("exact-")
    assert place == protein_runs.place(B, 1, SMALL) != protein_runs.exact(B, 1, dataset="generated")
    assert place != replace(protein_runs.HOME, sources=("data/protein.py",)).place(asked[0])  # other code, another run
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text('{"step": 1, "final": true}\n')
    assert protein_runs.exact(B, 1) == place and len(asked) == 2


# ---- proteins


def ended(loss, seed):
    """A run whose losses are `loss` and a little of its seed's."""
    rng = np.random.default_rng(seed)
    loss += 0.01 * seed + 1e-4 * rng.normal()
    metrics = {"loss": loss, "accuracy": 0.4 - 0.1 * loss, "perplexity": np.exp(loss), "letters": 100,
               "unigram_accuracy": 0.09, "unigram_perplexity": 18.0}
    return {"curve": [{"step": step, "loss": loss + 1 / step, "accuracy": metrics["accuracy"]} for step in (5, 10)],
            "last": metrics | {f"{key}_ood": value for key, value in metrics.items()}
            | {f"{split}_{key}": 3.0 for split in SPLITS for key in protein_page.STATISTICS}}


def found(better=0.1, uniform=1.0, diverged=()):
    """Runs in which what the papers put first is `better`, in nats, and uniform attention costs `uniform`."""
    above = {"exact": 0.0, "relu": -better, "favorpp": 0.01 * uniform - better, "favorp": 0.01 * uniform,
             "reformer": better, "linformer": better}
    return {(way, name, seed): {"diverged": "step 3"} if (way, name) in diverged
            else ended(2 + above.get(name, uniform), seed)
            for way in DIRECTIONS for name in protein_runs.arms(way) for seed in range(4)}


def verdicts(**results):
    return protein_page.verdicts_of(results, {dataset: protein_page.gates(each) for dataset, each in results.items()})


@pytest.mark.parametrize("better, word", [(0.2, "holds"), (-0.2, "fails")])
def test_verdicts_on_proteins_follow_the_records(better, word):
    told = words(verdicts(generated=found(better)))
    paper = {text: w for text, w in told.items() if "uniform" not in text and "held-out" not in text}
    assert len(told) == 2 * 7 + 1 and len(paper) == 2 * 4 + 1 and set(paper.values()) == {word}
    assert all(w == "holds" for text, w in told.items() if "FAVOR+ keeps" in text)


def test_nothing_is_judged_where_uniform_attention_costs_little():
    told = verdicts(generated=found(0.2), uniprot=found(0.2, uniform=0.3))
    left = [verdict for verdict in told if isinstance(verdict, Unjudged)]
    assert len(left) == len(told) - len(left) == 2 * 7 + 1
    assert all(verdict.claim.text.startswith("proteomes, ") and verdict.word == "cannot tell here" for verdict in left)
    assert "what uniform attention costs (U), in nats is 0.3" in str(left[0])


def test_held_out_sequences_have_a_gate_and_a_first_line_of_their_own():
    runs = found(0.2)
    for (way, other, _), run in runs.items():
        if (way, other) == (B, "uniform"):
            run["last"]["perplexity_ood"] = 5.0
    left = [verdict for verdict in verdicts(generated=runs) if isinstance(verdict, Unjudged)]
    assert len(left) == 1 and "generated families, B: on the held-out families exact" in left[0].claim.text
    assert "what uniform attention costs on the held-out families (B), in nats" in str(left[0])
    told = protein_page.controls_that_win({"generated": runs})
    assert [line for line in told if "B, held-out families: uniform attention, a control" in line]


def test_page_of_proteins_tells_controls_that_win_and_runs_that_diverged():
    results = {REAL: found(0.1, uniform=0.0, diverged=[(U, "reformer")])}
    first = protein_page.controls_that_win(results)[0]
    assert first.startswith("**proteomes, U: uniform attention, a control, ends no worse than")
    text = protein_page.body(results, {REAL: protein_page.gates(results[REAL])}, "")
    assert "| U | reformer | diverged |" in text and "4 of 4" in text and "**failed**: what uniform attention" in text
    assert "30.80, 9.37; 19.70, 13.20" in text and "104,863,744" in text
    rows = protein_page.csv_rows(results)
    assert sum(row["what"] == "diverged" for row in rows) == 4


# ---- kernels


def kernel_runs(diverged=(), exact=2.4):
    loss = {"exact": exact, "relu": 2.0, "abs": 2.2, "uniform": 2.5}
    made = lambda arm, seed: ended(loss.get(arm.kernel, 2.4), seed)
    return {(way, arm, seed): {"diverged": "step 7: loss nan"} if arm in diverged else made(arm, seed)
            for way, arms in kernels.ARMS.items() for arm in arms for seed in range(3)}


def test_kernels_that_diverge_are_named_and_counted():
    cosine = kernels.Arm("cos", normalize=False)
    text = kernels.stopped(kernel_runs({cosine, kernels.LINEAR_TRANSFORMER}))
    assert "9 of 69 runs diverged" in text and "Of the Linear Transformer 6 of 6 did" in text
    assert "- cos without denominators (unidirectional), seed 2: step 7: loss nan" in text
    row = next(line for line in kernels.table(kernel_runs({cosine})).splitlines() if line.startswith("| cos |"))
    assert row.endswith("| 0 of 3 | diverged | diverged | 3 of 3 | 0 of 3 |")


def test_the_first_line_names_arms_without_denominators_and_those_that_never_end():
    runs = kernel_runs({kernels.Arm("cos", normalize=False)})
    runs |= {(U, kernels.Arm("abs", normalize=False), seed): ended(2.95, seed) for seed in range(3)}
    text = kernels.controls_that_win({GENERATED: runs})
    beaten = "beats 2 of 21 arms.** generated families: abs without denominators, cos without denominators."
    assert text == (f"**Uniform attention, a control, {beaten}\n\n"
                    f"**The law of letters, by frequency, a control, {beaten}")


def test_the_kernel_beside_relu_is_chosen_on_validation():
    results = kernel_runs()
    assert kernels.best_other(results) == kernels.Arm("abs")
    told = words(kernels.judged(kernels.claims(results)))
    assert told["ReLU ends more accurate than abs, on validation the best of the others"] == "holds"


def test_kernels_are_not_judged_where_uniform_attention_costs_little():
    results = {GENERATED: kernel_runs(exact=1.9), REAL: kernel_runs()}
    told = {type(verdict): verdict.claim.text for verdict in kernels.verdicts_of(results)}
    assert told[Unjudged].startswith("proteomes: ") and told[Verdict].startswith("generated families: ")
    text = kernels.summary(results, kernels.verdicts_of(results))
    assert text.startswith("None of 42 arms is worse than uniform attention, a control.")
    assert "- **failed**: what uniform attention costs" in kernels.section(REAL, results[REAL])
    assert not kernels.gate(kernel_runs({kernels.Arm("uniform")})).passed


# ---- redraw

MOVED = replace(redraw_runs.SETTINGS["small"], base=replace(SMALL, seeds=2), swaps=4, other_swaps=4, seeds=4,
                other_seeds=4, ms=(32,))
WORLD = MOVED.main


def moved(setting=MOVED, world=WORLD, better=0.05, uniform=1.0, back=0.95):
    """FAVOR++ loses `better` less than FAVOR+ from the swap on; a share `back` of the accuracy lost is back at once."""
    loss = {"exact": 0.0, "uniform": uniform, "favorp": 0.2, "favorpp": 0.2 - better}
    noise = lambda *key: 1e-3 * np.random.default_rng([len(str(key)), *map(ord, str(key))]).normal()
    point = lambda above, *key: {"loss": 2 + above + noise(key), "accuracy": 0.5 - 0.1 * above + 0.01 * noise(key)}
    swaps = {key: {split: point(0, key[2] % 2) if key[0] == "exact" else point(loss.get(key[0], 0.5), key)
                   for split in ("validation", "test")} for key in redraw_runs.swapping(world, setting)}
    trained = {(arm, seed): {"curve": [{"step": step, **point((1 - back) * loss.get(arm.name, 0.5), arm, seed, step)}
                                       for step in setting.steps(world)]}
               for arm, seed in redraw_runs.uptraining(world, setting)}
    layer = {"S": [8.0, 9.0], "predicted": {"favorp": 1.5, "favorpp": 1.0}, "measured": {"favorp": 1.0, "favorpp": 0.9},
             "uniform": 1.0}
    return redraw_runs.Found(swaps, {seed: [layer, layer] for seed in range(setting.base.seeds)}, trained)


@pytest.mark.parametrize("better, word", [(0.15, "holds"), (-0.15, "fails")])
def test_verdicts_on_the_swap_follow_the_records(better, word):
    results = moved(better=better, back=0.5)
    told = words(redraw_verdicts.verdicts_of(MOVED, {WORLD: results}, {WORLD: redraw_verdicts.gates(MOVED, results)}))
    swap = {text: w for text, w in told.items() if "FAVOR++ loses less" in text}
    assert len(swap) == 1 + 3 and set(swap.values()) == {word}


@pytest.mark.parametrize("back, word", [(1.0, "holds"), (0.6, "fails")])
def test_recovery_is_that_of_the_accuracy_lost(back, word):
    results = moved(back=back, better=-0.8)  # FAVOR++ loses 1 nat, and so 10 points of accuracy
    beyond = redraw_verdicts.recovery(results, Arm("favorpp"), MOVED, MOVED.limit(WORLD))
    np.testing.assert_allclose(beyond, 0.1 * (back - 0.9), atol=1e-3)
    told = words(redraw_verdicts.verdicts_of(MOVED, {WORLD: results}, {WORLD: redraw_verdicts.gates(MOVED, results)}))
    assert [w for text, w in told.items() if "FAVOR++ has 90%" in text] == [word]
    first = set(redraw_verdicts.steps_to_recover(results, Arm("favorpp"), MOVED).values())
    assert first == {MOVED.steps(WORLD)[0] if back > 0.9 else np.inf}


def test_a_world_whose_gate_fails_is_shown_and_its_recovery_not_judged():
    other = MOVED.others[0]
    setting = replace(MOVED, others=(other,))
    results = {WORLD: moved(setting), other: moved(setting, other, uniform=0.1)}
    asked = {world: redraw_verdicts.gates(setting, each) for world, each in results.items()}
    assert all(gate.passed for gate in asked[WORLD])
    assert [gate.passed for gate in asked[other]] == [False, True, True]
    told = redraw_page.summary(setting, results, redraw_verdicts.verdicts_of(setting, results, asked))
    assert "**cannot tell here**, a gate failed: proteomes, U: FAVOR++ has 90%" in told
    main, real = ("\n".join(redraw_page.section(setting, world, results[world], asked[world])) for world in results)
    assert "A gate failed, so this world says little" in real and "A gate failed" not in main
    assert "| FAVOR+, every 100 steps |" in main


# ---- all of them, tiny

SIZES = ("+task.sizes.heads=2", "+task.sizes.layers=1", "+task.sizes.d_ff=16", "+task.sizes.d=16")
RUN = ("task.max_length=24", *SIZES, "trainer.batch=4", "trainer.eval_every=2", "task.validation_share=0.2",
       "task.test_share=0.2", "task.cache_dir=null")
FEW = ("task.generated.sequences=60", "task.generated.shortest=8", "task.generated.longest=24")
TINY = protein_runs.Setting(
    real=RUN, generated=(*RUN, *FEW), steps={REAL: 4, GENERATED: 20}, m=4, seeds=2, workers=1,
    options={"linformer": ("attention.length=24", "attention.rank=4"), "window": ("attention.block=4",),
             "nearfar": ("attention.block=4", "attention.heavy=2", "attention.cells=2"),
             "reformer": ("attention.chunk=4", "attention.buckets=4", "attention.hashes=1")})


@pytest.fixture
def proteomes(tmp_path, monkeypatch, one_thread):
    """Two small files, the second of them held out; reports are written beside them."""
    (tmp_path / "data/protein").mkdir(parents=True)
    for file in range(2):
        lines = [f">tr|{name(100 * file + i)}|X_Y Protein OS=Escherichia coli OX=83333 PE=3 SV=1\n{letters}\n"
                 for i, letters in enumerate(sequences(40, seed=file))]
        (tmp_path / f"data/protein/{file}.fasta").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    monkeypatch.setitem(protein_runs.SETTINGS, "small", TINY)
    return tmp_path


@pytest.mark.slow
def test_reports_on_proteins_at_a_tiny_size(proteomes, monkeypatch, capsys):
    """All three, and again without computing anything; redraw takes the exact models of proteins."""
    monkeypatch.setitem(kernels.STEPS, "small", {GENERATED: 4, REAL: 4})
    monkeypatch.setattr(kernels, "KERNELS", kernels.KERNELS[::5])
    monkeypatch.setitem(kernels.ARMS, U, [*kernels.CONTROLS, *kernels.KERNELS, kernels.LINEAR_TRANSFORMER])
    tiny = replace(redraw_runs.SETTINGS["small"], base=TINY, ms=(4,), swaps=2, other_swaps=2, seeds=2, other_seeds=2,
                   evaluations=1, arms=(Arm("exact"), Arm("uniform"), Arm("favorp"), Arm("favorpp"), Arm("favorpp", 1)),
                   least=Bounds(*3 * [-np.inf]))
    monkeypatch.setitem(redraw.SETTINGS, "small", tiny)
    for report in (proteins, kernels, redraw):
        report.main("small")
        target = report.__name__.split(".")[-1]
        assert "written:" in capsys.readouterr().out
        assert (proteomes / f"report/{target}.png").stat().st_size > 20_000
        cells = proteomes / f"outputs/{target}/cells.jsonl"
        computed = cells.read_text()
        report.main("small")
        assert cells.read_text() == computed
    exact = [path for path in (proteomes / "outputs/proteins").iterdir() if path.name.startswith("exact-")]
    assert len(exact) == 2 * 2 * 2  # seeds, directions and sources
    assert not [path for path in (proteomes / "outputs/proteins").iterdir() if path.name.startswith("run-")]
