"""make speed: time and memory of attention against length, alone and in whole models, beside the peers."""

import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from crt_exp.report import bench_attention as alone
from crt_exp.report import palette
from crt_exp.report.writing import Cells, markdown, new_figure, write_report
from crt_exp.studies.speed import attention_steps, interleaved, measure

LENGTHS = {"attention": (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072), "large": (256, 1024, 4096),
           "small": (256, 1024, 4096, 16384), "vit": (196, 784, 3136)}
LONGEST_FORWARD = 16384  # of forward passes alone
BARS = (1024, 4096, 16384)
MEMORY_LENGTHS = (4096, 65536)
MEASURED = ("favor+", "favor++", "favor+ causal", "favor++ causal")
COLOURS = {"floor": "#444444", "favor+": palette.colour("favorp"), "favor++": palette.colour("favorpp"),
           "sdpa": palette.EXACT, "performer-pytorch": "#0072B2"}  # of methods that are no names of conf/attention


def main(size: str) -> None:
    keys = [{"what": w, "length": n, "rounds": rounds(n), "backward": b}
            for w, lengths in LENGTHS.items() for n in lengths for b in ((True, False) if w == "attention" else (True,))
            if b or n <= LONGEST_FORWARD]
    later = [{"what": "later", "length": n, "rounds": rounds(n), "backward": True} for n in BARS]
    sources = ("attention", "features", "studies/speed.py", "models")
    cells = Cells("speed", sources).fill(keys + later, in_new_process, "speed", workers=1)
    memory_keys = [{"length": n, "name": m} for n in MEMORY_LENGTHS for m in MEASURED]
    memory = Cells("speed-memory", ("attention", "features")).fill(memory_keys, alone.peak_memory, "memory", workers=1)
    rows = [{**key, "method": name, "ms": ms, "ratio": ratio}
            for key in keys + later for name, (ms, ratio) in cells[key].items()]
    shown = (("attention", True), ("attention", False), ("large", True), ("small", True), ("vit", True))
    body = "\n".join([targets(keys, cells), crossover(keys, cells), *(table(keys, cells, *what) for what in shown),
                      memory_table(memory_keys, memory)])
    facts = ("Batch 1, float32. Attention: 8 heads, d = 64, m = 256, |x + y|^2 of about 10, the fit of FAVOR++ "
             "included; hybrids have 8, 4 and 64 projections of their bases, 288, 272 and 256 features, and clusters "
             "fitted before; large: (heads, layers, ffn, dim) = (8, 6, 2048, 512); small: (1, 6, 64, 64); vit: timm's "
             "ViT-Ti/16, m = 256. Medians over interleaved rounds; a ratio is the median of the ratios within a round, "
             "to the eager floor exp(Q W^T) (exp(K W^T)^T V) for attention, to exact attention for models. Every "
             "length has a process of its own. There the floor's feature matrices come from pages that the system has "
             "yet to clear; a process that has run shorter sequences before may find them ready, and the floor is then "
             "up to twice as fast: the column `later` has the same ratios after two steps of all methods at all "
             "shorter lengths.")
    path = write_report("speed", "Speed and memory of attention", body, rows, figure(keys, cells), facts,
                        cells.seconds())
    print(f"{targets(keys, cells)}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def in_new_process(what: str, length: int, rounds: int, backward: bool) -> dict[str, tuple[float, float | None]]:
    """`measure` in a process that has done nothing else, or, for `what` = later, has run all methods at
    all shorter lengths."""
    call = (measure_later, length, rounds) if what == "later" else (measure, what, length, rounds, backward)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(*call).result()


def measure_later(length: int, rounds: int) -> dict[str, tuple[float, float | None]]:
    for shorter in LENGTHS["attention"]:
        if shorter < length:
            measure("attention", shorter, 1, True)
    steps = attention_steps("attention", length, True)
    return interleaved({name: steps[name] for name in ("floor", *MEASURED)}, rounds)


def rounds(length: int) -> int:
    """More for the short ones, whose times vary more."""
    return 2 if length > 16384 else max(5, math.ceil(30 * min(1, 2048 / length)))


def of(keys, cells, what: str, backward: bool = True) -> dict[int, dict]:
    return {k["length"]: cells[k] for k in keys if k["what"] == what and k["backward"] == backward}


def targets(keys, cells) -> str:
    """The project's own bars, met or not, in a process for each length and in one that has run shorter ones."""
    found = of(keys, cells, "attention")
    later = {n: cells[{"what": "later", "length": n, "rounds": rounds(n), "backward": True}] for n in BARS}
    over = lambda cell, a, b: cell[a][0] / cell[b][0]
    bars = [(f"FAVOR+ over the floor, L = {n}", bar, n, "favor+", "floor") for n, bar in zip(BARS, (0.70, 0.53, 0.53))]
    bars += [(f"FAVOR++ over FAVOR+, L = {n}", 1.05, n, "favor++", "favor+") for n in BARS[1:]]
    bars += [(f"causal over bidirectional, L = {n}", 1.5, n, "favor+ causal", "favor+") for n in BARS[1:]]
    rows = [[title, bar, over(found[n], a, b), over(later[n], a, b)] for title, bar, n, a, b in bars]
    peer = "performer-pytorch causal"
    if peer in found[BARS[0]]:
        ours = over(found[BARS[0]], "favor+ causal", peer)
        rows.append([f"our causal over performer-pytorch's, L = {BARS[0]}", 1 / 30, ours, None])
    judged = lambda r, bar: ("", "") if r is None else (f"{r:.3f}", "met" if r <= bar else "not met")
    return "Forward and backward against the bars set for this engine (ratios of medians):\n\n" + markdown(
        ["ratio", "at most", "here", "", "later", ""],
        [[title, f"{bar:.3f}", *(x for r in ratios for x in judged(r, bar))]
         for title, bar, *ratios in rows])


def crossover(keys, cells) -> str:
    lengths = [n for n, found in of(keys, cells, "attention").items()
               if "sdpa" in found and found["favor++"][0] < found["sdpa"][0]]
    first = min(lengths) if lengths else "(none measured)"
    return f"FAVOR++ (m = 256) is faster than exact attention from L = {first} on, forward and backward.\n"


def table(keys, cells, what: str, backward: bool) -> str:
    found = of(keys, cells, what, backward)
    names = list(dict.fromkeys(n for f in found.values() for n in f))
    base = "floor" if what == "attention" else "exact"
    cell = lambda f, n: "" if n not in f else f"{f[n][0]:.1f}" + (f" ({f[n][1]:.2f})" if base in f else "")
    title = f"## {what}, {'forward and backward' if backward else 'forward'}, ms (ratio)\n\n"
    rows = [[n, *(cell(f, n) for f in found.values())] for n in names]
    return title + markdown(["method", *(f"L = {n}" for n in found)], rows)


def memory_table(keys, cells) -> str:
    rows = [[m, *(f"{cells[{'length': n, 'name': m}]:.0f}" for n in MEMORY_LENGTHS)] for m in MEASURED]
    return "## Peak memory beyond inputs, output and gradients, MiB\n\n" + markdown(
        ["method", *(f"L = {n}" for n in MEMORY_LENGTHS)], rows)


def colour(name: str) -> str:
    """Of a method, causal or not."""
    name = name.removesuffix(" causal")
    return COLOURS.get(name) or palette.colour(name)


def figure(keys, cells):
    fig, axes = new_figure(1, 4, figsize=(15, 3.8))
    for ax, what in zip(axes, LENGTHS):
        found = of(keys, cells, what)
        for name in dict.fromkeys(n for f in found.values() for n in f):
            points = [(n, f[name][0]) for n, f in found.items() if name in f]
            style = "--" if "causal" in name else "-"
            ax.plot(*zip(*points), marker="o", ms=3, lw=1.4, color=colour(name), ls=style, label=name)
        ax.set(xscale="log", yscale="log", title=f"{what}: ms a step", xlabel="L")
        ax.set_xticks(list(found), [f"{n // 1024}k" if n >= 1024 else n for n in found], fontsize=7)
        ax.minorticks_off()
    handles = {label: handle for ax in axes[:2] for handle, label in zip(*ax.get_legend_handles_labels())}
    fig.legend(handles.values(), handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncol=7, fontsize=8)
    fig.tight_layout()
    return fig
