"""make demo: every mechanism on real data that comes along, in under a minute."""

import numpy as np
from sklearn.dummy import DummyClassifier

from crt_exp.mechanism import Mechanism
from crt_exp.report import palette
from crt_exp.report.evidence import Interval, overlapping, won_by
from crt_exp.report.writing import Cells, markdown, new_figure, write_report
from crt_exp.studies.uci import UCI

DATASETS = ("wine", "breast_cancer", "digits", "iris")
WITHOUT = palette.APART
MAPS = palette.maps(WITHOUT)
MAJORITY = "majority"
NAMES = ("exact", *MAPS, MAJORITY)
M, REPEATS, SEED = 128, 5, 0
SPLIT = (0.6, 0.15, 0.25)  # a quarter for the test: a tenth of wine and iris is fewer than 20 rows
SIGMAS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0)


class MajorityUCI(UCI):
    """The task for who always says the most frequent class: the control."""

    def estimator(self, mechanism, sigma, seed):
        return DummyClassifier(strategy="most_frequent")


def main(size: str = "small") -> None:
    todo = [{"dataset": data, "name": name} for data in DATASETS for name in NAMES]
    cells = Cells("demo").fill(todo, accuracies, "kernel regression")
    write({(key["dataset"], key["name"]): cells[key] for key in todo}, cells.seconds())


def accuracies(dataset: str, name: str) -> list[float]:
    kind = MajorityUCI if name == MAJORITY else UCI
    task = kind(dataset, "ordinal", "standard", SPLIT, REPEATS, SIGMAS)
    chosen = Mechanism(name, {}) if name == MAJORITY else mechanism(name)
    return [r["accuracy"] for r in task.records(chosen, SEED) if r["split"] == "split"]


def mechanism(name: str, m: int = M, sampler: str = "orthogonal") -> Mechanism:
    return Mechanism.of("exact") if name == "exact" else Mechanism.of(features=name, m=m, sampler=sampler)


def write(results: dict[tuple[str, str], list[float]], seconds: float) -> None:
    accuracies = {place: overlapping(100 * np.array(values), SPLIT[2] / SPLIT[0]) for place, values in results.items()}
    rows = [{"mechanism": name, "dataset": data, "accuracy": each.mean, "ci95": each.half}
            for (data, name), each in accuracies.items()]
    said = f"{controls_that_win(accuracies)}\n\n{table(accuracies)}"
    path = write_report("demo", "Every mechanism on embedded data: test accuracy of kernel regression", said, rows,
                        figure(accuracies), facts(), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def controls_that_win(accuracies: dict[tuple[str, str], Interval]) -> str:
    beaten = {data: [name for name in MAPS if accuracies[data, name].mean < accuracies[data, MAJORITY].mean]
              for data in DATASETS}
    return won_by("the majority class", beaten, len(DATASETS) * len(MAPS))


def ends(interval: Interval) -> tuple[float, float]:
    """Of an interval of percents, which ends at 0 and 100."""
    return max(interval.low, 0.0), min(interval.high, 100.0)


def table(accuracies: dict[tuple[str, str], Interval]) -> str:
    """Accuracy in percent, mean and 95% interval over splits; the last column averages the sets."""
    rows = []
    for name in NAMES:
        cells = ["{:.1f} ({:.1f} to {:.1f})".format(accuracies[data, name].mean, *ends(accuracies[data, name]))
                 for data in DATASETS]
        rows.append([name, *cells, f"{np.mean([accuracies[data, name].mean for data in DATASETS]):.1f}"])
    return markdown(["mechanism", *DATASETS, "average"], rows)


def figure(accuracies: dict[tuple[str, str], Interval]):
    fig, axes = new_figure(1, len(DATASETS), figsize=(11, 3.4), sharey=True)
    for ax, data in zip(axes, DATASETS):
        for i, name in enumerate(NAMES):
            each, (low, high) = accuracies[data, name], ends(accuracies[data, name])
            colour = palette.CONTROL if name == MAJORITY else palette.colour(name)
            ax.errorbar(each.mean, i, xerr=[[each.mean - low], [high - each.mean]], fmt="o", ms=5, color=colour, lw=1.2)
        ax.axvline(accuracies[data, "exact"].mean, color=palette.EXACT, lw=0.8, ls=":")
        ax.axvline(accuracies[data, MAJORITY].mean, color=palette.CONTROL, lw=1.2)
        ax.set(title=data, xlabel="test accuracy, %", xlim=(0, 103))
    axes[0].set_yticks(range(len(NAMES)), NAMES)
    axes[0].invert_yaxis()
    fig.tight_layout()
    return fig


def facts() -> str:
    return (f"Test accuracy in percent, mean and 95% interval of Nadeau and Bengio over {REPEATS} random splits, which "
            f"overlap (60% training, 15% validation, 25% test; seed {SEED}), cut at 0 and 100; Gaussian kernel, m = "
            f"{M} orthogonal projections (trig, gerf and hyp make 2m columns of them), sigma tuned on validation over "
            f"{list(SIGMAS)}, columns standardised; exact: the kernel itself. Data: the sets bundled with "
            f"scikit-learn, unabridged.{palette.left_out(WITHOUT)}")
