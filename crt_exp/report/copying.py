"""make copying: a model that copies, whose attention is swapped without training: what it keeps, and at what time.

Passages said twice, by a model trained here to say them again (copying_runs.py). Beside near-far attention with and
without keys that each query reads: uniform attention, a window, random features, and, dense, pages, clusters and the
largest weights at as many keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crt_exp.report import copying_runs
from crt_exp.report.evidence import Claim, Gate, Verdict, check_gates, independent, judged, paired, won_by
from crt_exp.report.writing import Cells, label_ends, markdown, new_figure, write_report
from crt_exp.studies import copying

LENGTH, SEEDS, ROUNDS, KEYS = 2048, 5, 5, 64      # the model's last stage has rows of that length
LEAST, COPIED, PLAIN = 2.0, 0.05, 0.01            # nats: that a copy must be cheaper by; above exact attention
CONTROL, OURS, WINDOW = "uniform", "nearfar", "window block=64 first=16"
EARLY = "nearfar exact_until=64 open"             # exact for 64 tokens alone: what is read does it all
M = 256
TIMED = ("exact", CONTROL, WINDOW, "favorpp", "nearfar preset=bounded", f"{EARLY}=8", f"{EARLY}=16", f"{EARLY}=32",
         f"{EARLY}=64", OURS)
PEERS = (f"pages {KEYS}", f"clusters {KEYS}", "clusters 0", f"largest {KEYS}")
NAMED = {"pages 64": "pages, 64 keys", "clusters 64": "clusters, 64 keys", "clusters 0": "centroids and window",
         "largest 64": "64 largest weights", "favorpp": f"FAVOR++, m = {M}", OURS: "near-far, default",
         "nearfar preset=bounded": "near-far, bounded", WINDOW: "window and first tokens", CONTROL: "uniform attention",
         "exact": "exact"} | {f"{EARLY}={n}": f"near-far, {n} keys" for n in (8, 16, 32, 64)}
Found = dict[str, list[dict[str, float]]]         # attention -> its mean losses, for each seed


def main(size: str) -> None:
    """Raises GateFailed where the model does not copy."""
    trained = copying_runs.train(size)
    start = str(copying_runs.place(copying_runs.stages(size)))
    cells, found = Cells("copying"), {}
    fill(cells, start, ["exact"], found)
    passed = check_gates(gates(found))
    fill(cells, start, [*TIMED[1:], *PEERS], found)
    key = {"start": start, "length": LENGTH, "attentions": [[name, features(name)] for name in TIMED],
           "rounds": ROUNDS}
    spent = Cells("copying-times").fill([key], copying.times, "times", workers=1)[key]
    verdicts = judged(claims(found))
    parts = [first_line(found), "", *map(str, passed), *map(str, verdicts), "", table(found, spent)]
    path = write_report("copying", "What a model that copies keeps", "\n".join(parts), rows(found, spent, verdicts),
                        figure(found, spent), facts(size), cells.seconds() + sum(stage["time_s"] for stage in trained))
    print(f"written: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def features(name: str) -> int | None:
    return M if name.startswith("favor") else None


def fill(cells: Cells, start: str, names: Sequence[str], found: Found) -> None:
    keys = {(name, seed): {"start": start, "length": LENGTH, "seed": seed, "attention": name, "m": features(name)}
            for name in names for seed in range(SEEDS)}
    cells.fill(list(keys.values()), copying.losses, "losses")
    for (name, _), key in keys.items():
        found.setdefault(name, []).append({kind: float(np.mean(each)) for kind, each in cells[key].items()})


def of(found: Found, name: str, kind: str) -> np.ndarray:
    return np.array([seed[kind] for seed in found[name]])


def above(found: Found, name: str, kind: str) -> np.ndarray:
    """(seeds,): nats above exact attention on the same rows."""
    return of(found, name, kind) - of(found, "exact", kind)


def gates(found: Found) -> list[Gate]:
    less = float(np.mean(of(found, "exact", "new") - of(found, "exact", "copied")))
    return [Gate("nats by which exact attention says a passage cheaper the second time", less, least=LEAST)]


def claims(found: Found) -> list[Claim]:
    """The bars that were set, what reading keys gives, and the peers."""
    bar = lambda name, kind, most: independent(most - above(found, name, kind))
    early = f"{EARLY}={KEYS}"                          # the default is exact on all of the new text
    made = [Claim(f"the default costs at most {COPIED} nats on copied text", bar(OURS, "copied", COPIED), "nats"),
            Claim(f"{NAMED[early]} from the 64th token on cost at most {COPIED} nats on copied text",
                  bar(early, "copied", COPIED), "nats"),
            Claim(f"{NAMED[early]} from the 64th token on cost at most {PLAIN} nats on new text",
                  bar(early, "new", PLAIN), "nats")]
    for peer in ("nearfar preset=bounded", WINDOW, "favorpp", f"pages {KEYS}", f"clusters {KEYS}", f"largest {KEYS}"):
        made.append(Claim(f"{NAMED[early]} from the 64th token on lose less of the copy than {NAMED[peer]}",
                          paired(of(found, peer, "copied"), of(found, early, "copied")), "nats"))
    return made


def first_line(found: Found) -> str:
    others = [name for name in found if name not in ("exact", CONTROL)]
    bar = np.mean(of(found, CONTROL, "copied"))
    worse = [NAMED[name] for name in others if np.mean(of(found, name, "copied")) > bar]
    return won_by("uniform attention", {"copied text": worse}, len(others))


def table(found: Found, spent: Mapping[str, Sequence[float]]) -> str:
    lines = [[NAMED[name], f"{independent(above(found, name, 'new')):+.3f}",
              f"{independent(above(found, name, 'copied')):+.3f}", f"{kept(found, name):.1%}",
              f"{np.median(spent[name]):.0f}" if name in spent else "dense"] for name in [*TIMED, *PEERS]]
    return markdown(["attention", "new text, nats above exact", "copied text, nats above exact", "of the copying kept",
                     "ms"], lines)


def kept(found: Found, name: str) -> float:
    """By how much copied text is cheaper than new text, as a share of exact attention's."""
    gain = lambda each: float(np.mean(of(found, each, "new") - of(found, each, "copied")))
    return gain(name) / gain("exact")


def rows(found: Found, spent: Mapping[str, Sequence[float]], verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    each = [{"attention": name, "seed": seed, **losses} for name, seeds in found.items()
            for seed, losses in enumerate(seeds)]
    times = [{"attention": name, "round": i, "ms": ms} for name, all_of_them in spent.items()
             for i, ms in enumerate(all_of_them)]
    return [*each, *times, *(verdict.row() for verdict in verdicts)]


def figure(found: Found, spent: Mapping[str, Sequence[float]]):
    fig, ax = new_figure(figsize=(7, 4.6))
    exact, ends = np.median(spent["exact"]), []
    for i, name in enumerate(TIMED):
        x, y = float(np.median(spent[name]) / exact), kept(found, name)
        ax.plot([x], [y], marker="o", color=f"C{i}")
        ends.append((NAMED[name], x, y, f"C{i}"))
    ax.axhline(1, color="black", lw=0.8, ls=":")
    ax.set(xlabel="time of a forward pass over that of exact attention", ylabel="of exact attention's copying kept",
           title=f"{LENGTH} tokens", xlim=(0.4, 1.35), ylim=(-0.4, 1.3))
    label_ends(ax, ends)
    return fig


def facts(size: str) -> str:
    told = lambda stage, name: next(option.split("=")[1] for option in stage if option.startswith(f"{name}="))
    steps = ", ".join(f"{told(stage, 'task.block')}/{told(stage, 'trainer.steps')}"
                      for stage in copying_runs.stages(size))
    return (f"SIZE={size}. A Llama of {copying_runs.SIZES['num_hidden_layers']} layers, width "
            f"{copying_runs.SIZES['hidden_size']}, {copying_runs.SIZES['num_attention_heads']} heads, "
            f"{copying_runs.VOCABULARY} byte pairs, trained here on WikiText-2 and drawn words, all rows repeated "
            f"(tokens/steps of the stages: {steps}). Losses: the test text, {copying.ROWS} rows of {LENGTH} tokens for "
            f"each of {SEEDS} seeds; copied: the second half of a row but for its first {copying.UNSURE} tokens. "
            f"Clusters are of the whole sequence, whose future they see. Times: the layers of the model, one row, "
            f"median of {ROUNDS} rounds in turn. Mean and 95% Student interval over seeds; p by Holm over all claims.")
