"""make fig3: Figure 3 of Chefs' Random Tables, word error rates of a Conformer transducer with linear attention.

An exact model is trained first; arms are swapped into it, tested as they are, and trained on. The same arms are trained
from new weights. Before arms are trained, gates say whether this setting can tell them apart.
"""

from typing import Any

from crt_exp.report import speech_text as text
from crt_exp.report.evidence import Gate, check_gates
from crt_exp.report.speech_runs import (
    SOURCES,
    Arm,
    Setting,
    after_swap,
    checkpoints,
    diagnosis,
    encoder_memory,
    encoder_times,
    exact_models,
    looking,
    other_looks,
    other_swaps,
    pace,
    pacing,
    sampling,
    swapping,
    train,
    training,
)
from crt_exp.report.writing import Cells, write_report
from crt_exp.studies.encoder_steps import LAYERS, METHODS, SIZES

ENCODER_SOURCES = ("attention", "features", "swap", "models/conformer_transducer.py", "studies/encoder_steps.py")
SECONDS = (10, 30, 60, 120, 300, 600)  # of audio, on which the encoder is timed
PAPER = ("The paper (17 layers, LibriSpeech 960 h): FAVOR++ is better than FAVOR+ by 2.49 points of WER at m = 8 and "
         "by 3.05 at m = 16.")

NEAR_FAR = (("block", 8), ("heavy", 8), ("cells", 8), ("exact_until", 0))  # of audio whose strings have some 60 frames
LAST = ("trainer.select=last", "trainer.log_every=50")  # the curve's split chooses nothing
PIECES = ("task.preset=paper", "task.symbols=pieces", "trainer.precision=bf16", "trainer.save_minutes=5")
# What is near tells digits apart: with convolutions of 5 frames, uniform attention costs 0.1 nats. With those of one
# frame attention alone joins frames, and costs are 1 nat. Heads of 8 put mean |x + y|^2 at 4 to 20. CHOSEN says how.
DIGITS = {"layers": 2, "dim": 64, "ffn": 256, "heads": 8, "kernel": 1, "channels": 8, "predictor": 64, "joiner": 64}
PLAIN = ("task.speeds=[1.0]", "task.augment.bands=0", "task.augment.spans=0")
CHOSEN = {"small": "The model (convolutions of one frame, heads of 8) is one of about five that were tried: chosen "
                   "because attention matters in it, with the losses of both maps after the swap on the screen. "}
SETTINGS = {
    "small": Setting(
        data=("task.corpus=fsdd", "task.batch_seconds=16", "task.strings.validation=100", *PLAIN, *LAST,
              *(f"+task.sizes.{key}={value}" for key, value in DIGITS.items())),
        exact=("trainer.steps=3000", "trainer.eval_every=500", "trainer.save_every=500"),
        uptrained=("trainer.steps=150", "trainer.lr=3e-4", "trainer.eval_every=50"),
        scratch=("trainer.steps=1000", "trainer.eval_every=250"),
        speaker="theo", options=(("nearfar", NEAR_FAR),), others=(
            ("4 heads of 16", ("++task.sizes.heads=4",)),
            ("convolutions of 15 frames", ("++task.sizes.kernel=15",))),
        sample=("trainer.steps=20", "trainer.eval_every=20", "trainer.log_every=5")),
    "gpu": Setting(  # train-clean-100; a run that is stopped goes on where it stood
        data=(*PIECES, "+task.sizes.layers=8", "task.pieces=256", "task.batch_seconds=240", *LAST),
        exact=("trainer.steps=30000", "trainer.eval_every=5000"),
        uptrained=("trainer.steps=2000", "trainer.lr=2e-4", "trainer.eval_every=500"),
        scratch=("trainer.steps=10000", "trainer.eval_every=2500"),
        seeds=3, scratch_seeds=2, kept=True, workers=2),
    "full": Setting(
        data=(*PIECES, "task.subsets.train=[train-clean-100,train-clean-360,train-other-500]", "task.batch_seconds=400",
              "trainer.accumulate=8", *LAST),
        exact=("trainer.steps=120000", "trainer.warmup=10000", "trainer.eval_every=5000"),
        uptrained=("trainer.steps=10000", "trainer.lr=2e-4", "trainer.eval_every=1000"),
        scratch=("trainer.steps=120000", "trainer.warmup=10000", "trainer.eval_every=5000"),
        seeds=3, scratch_seeds=2, kept=True, workers=1),
}


def main(size: str) -> None:
    report("fig3", "CRT Figure 3: speech recognition with linear attention", SETTINGS[size], size)


def report(name: str, title: str, setting: Setting, size: str) -> None:
    """Raises GateFailed, before arms are trained, where the setting cannot tell them apart."""
    cells = Cells("fig3", SOURCES)  # of all reports on speech: what one has computed the others take
    passed = gated(cells, setting)
    arms(cells, setting)
    timed = encoder()
    write(name, title, size, found_of(cells, timed, setting), passed, cells.seconds() + timed.seconds())


def gated(cells: Cells, setting: Setting) -> list[Gate]:
    """Trains the exact models, looks at their attention, and returns the gates that were passed."""
    looked, swapped = looking(setting), swapping(setting)
    plain = {(arm, seed): key for (arm, seed), key in swapped.items() if arm.m is None}
    cells.fill(checkpoints(setting), train, "exact models", setting.workers)
    cells.fill([*looked.values(), *other_looks(setting).values()], diagnosis, "errors by layer", setting.workers)
    cells.fill(list(plain.values()), after_swap, "controls after the swap", setting.workers)
    return check_gates(text.gates(setting, values(cells, looked), values(cells, plain)))


def arms(cells: Cells, setting: Setting) -> None:
    swaps = [*swapping(setting).values(), *other_swaps(setting).values()]
    cells.fill(swaps, after_swap, "after the swap", setting.workers)
    cells.fill(list(training(setting).values()), train, "arms", setting.workers)
    cells.fill(list(sampling(setting).values()), train, "the real subset", setting.workers)
    cells.fill(list(pacing(setting).values()), pace, "speed of recognition", workers=1)


def encoder() -> Cells:
    cells = Cells("fig3-encoder", ENCODER_SOURCES)
    cells.fill(list(timing().values()), encoder_times, "encoder", workers=1)
    return cells.fill(list(weighing().values()), encoder_memory, "memory of the encoder", workers=1)


def timing() -> dict[int, dict[str, Any]]:
    return {n: {"seconds": n, "rounds": rounds(n)} for n in SECONDS}


def weighing() -> dict[tuple[int, str], dict[str, Any]]:
    return {(n, method): {"seconds": n, "method": method} for n in SECONDS for method in METHODS}


def values(cells: Cells, keys: dict[Any, dict[str, Any]]) -> dict[Any, Any]:
    return {name: cells[key] for name, key in keys.items()}


def found_of(cells: Cells, timed: Cells, setting: Setting) -> text.Found:
    parts = (exact_models, looking, swapping, other_looks, other_swaps, training, pacing, sampling)
    return text.Found(setting, *(values(cells, part(setting)) for part in parts),
                      values(timed, timing()), values(timed, weighing()))


def rounds(seconds: int) -> int:
    """At least 3; more for short audio, whose times vary more."""
    return max(3, 600 // seconds // 4)


def write(name: str, title: str, size: str, found: text.Found, passed: list, seconds: float) -> None:
    verdicts = text.verdicts(found)
    said = "\n".join([text.control_text(found), "", *map(str, verdicts), "", text.reach(found), "", text.reason(found)])
    parts = [said, "", text.resolution(found), "", PAPER, "", "## Word error rates\n", text.results(found),
             "## Gates\n", "Asked of the exact model, before arms were trained:\n", *map(str, passed), "",
             "Asked wherever something is claimed, on the test split:\n",
             *map(str, text.cost_gates(found).values()), "", "## Attention layer by layer\n", text.layers(found),
             "## Other exact models, directly after the swap\n", text.temperatures(found),
             "## The encoder against the length of audio\n",
             f"Seconds: median [quartiles]; then peak memory in MiB. {text.faster(found)}\n", text.encoder(found),
             "## Seconds of work for a second of audio\n", text.paces(found)]
    parts += ["## Real LibriSpeech\n", text.sample_text(found)] if found.sample else []
    path = write_report(name, title, "\n".join(parts), text.rows(found, verdicts), text.figure(found),
                        facts(size, found), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def facts(size: str, found: text.Found) -> str:
    setting = found.setting
    common, kinds = " ".join(setting.data), ("exact", "uptrained", "scratch")
    options = "; ".join(f"{kind}: `{' '.join(getattr(setting, kind))}`" for kind in kinds)
    return (f"SIZE={size}. WER and losses of the test split, mean and 95% Student interval over seeds (order of the "
            f"data, masks, noise; from scratch new weights too): {setting.swaps} noises after the swap "
            f"({setting.pair_swaps} for what is judged), {setting.seeds} runs uptrained, {setting.scratch_seeds} from "
            f"scratch, {setting.speaker_seeds} for the speaker; the exact model is one, and the intervals leave that "
            f"out. {CHOSEN.get(size, '')}Verdicts: differences paired by seed, p by Holm over all. hyp and "
            "FAVOR# have 2m columns: beside them stand the others with twice their m. "
            f"{own_options(setting)}"
            f"`task=librispeech {common}`; {options}; otherwise "
            "conf/task/librispeech.yaml. Orthogonal projections, never redrawn. The encoder that is timed: "
            f"{LAYERS} layers of width {SIZES['dim']}, {SIZES['heads']} heads, kernel {SIZES['kernel']}, noise for "
            "audio at 16 kHz, batch 1, without gradient; all methods take their turn in every round, every length "
            "has a process of its own, and every peak of memory too.")


def own_options(setting: Setting) -> str:
    """Of arms that have some, a sentence each."""
    told = [f"{text.label(Arm(name))}: {', '.join(f'{key} {value}' for key, value in given)}. "
            for name, given in setting.options]
    return "".join(told)
