"""The table and the picture that a run of task=fidelity leaves in its directory."""

from pathlib import Path
from typing import Any

from crt_exp.whole_files import whole, write_rows

NAMES = {"hidden_error": "hidden states", "attention_error": "outputs of attention", "cosine": "cosine",
         "above": "nats above exact"}


def table(records: list[dict]):
    """A DataFrame, a row for each attention and m: means over texts, with half-widths of 95% intervals, and what a pass
    over the longest of the lengths costs."""
    import pandas as pd

    cost = next((r for r in reversed(records) if r["split"] == "cost"), None)
    rows = [{"attention": each["attention"], "m": each["m"] or "",
             **{name: shown(each, key) for key, name in NAMES.items() if key in each},
             **(costs(cost, each["label"]) if cost else {})} for each in records[-1]["attentions"]]
    return pd.DataFrame(rows)


def costs(record: dict[str, Any], label: str) -> dict[str, str]:
    return {f"{unit} of {record['length']} tokens": f"{record[key][label]:.3g}"
            for key, unit in (("ms", "ms"), ("mib", "MiB"))}


def shown(record: dict[str, Any], key: str) -> str:
    return f"{record[key]:.4g} ± {record[f'{key}_ci95']:.2g}"


def write(records: list[dict], directory: Path) -> None:
    """fidelity.csv: a row for each attention, m and draw, and each layer; fidelity.png."""
    rows = [{"attention": r["attention"], "m": r["m"], "draw": r["draw"], "layer": layer, "attention_error": a,
             "hidden_error": h} for r in records if r["split"] == "swap"
            for layer, (a, h) in enumerate(zip(r["attention_error_layers"], r["hidden_error_layers"]))]
    rows += [{"attention": label, "length": r["length"], "ms": ms, "mib": r["mib"][label]}
             for r in records if r["split"] == "cost" for label, ms in r["ms"].items()]
    rows += [{key: value for key, value in each.items() if key != "label"} for each in records[-1]["attentions"]]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    write_rows(directory / "fidelity.csv", [columns, *([row.get(key, "") for key in columns] for row in rows)])
    with whole(directory / "fidelity.png") as part:
        figure(records).savefig(part, format="png", dpi=120)


def figure(records: list[dict]):
    """Hidden error behind each layer, and milliseconds and MiB against the length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure((14, 4.5), layout="constrained")
    FigureCanvasAgg(drawn)
    errors, times, memory = drawn.subplots(1, 3)
    for each in records[-1]["attentions"]:
        layers = [r["hidden_error_layers"] for r in records if r["split"] == "swap"
                  and (r["attention"], r["m"]) == (each["attention"], each["m"])]
        mean = [sum(column) / len(layers) for column in zip(*layers)]
        errors.plot(range(1, len(mean) + 1), mean, marker="o", ms=3, label=each["label"])
    errors.set(xlabel="layer", title="relative error of the hidden states behind it", yscale="log")
    costs = [r for r in records if r["split"] == "cost"]
    for axes, key, title in ((times, "ms", "milliseconds a pass"), (memory, "mib", "MiB at the peak")):
        for label in costs[0][key] if costs else ():
            axes.plot([r["length"] for r in costs], [r[key][label] for r in costs], marker="o", ms=3, label=label)
        axes.set(xlabel="tokens", title=title)
    errors.legend(fontsize=7)
    return drawn
