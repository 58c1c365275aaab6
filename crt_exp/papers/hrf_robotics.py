"""HRF Section 4.4, Figure 4: robots whose policies have implicit attention."""

from crt_exp.report import Claim, Page, Rows, dot_plot, mean_ci, mean_table, sweep
from crt_exp.report.plots import panels

WORLDS = {"locomotion": "task=locomotion", "sweep": "task=sweep"}
EACH = {"exact": "attention=exact", **{f"{name} m={m}": f"attention={name} features.m={m}" for name, m in (
    ("favorp", 256), ("favorp", 8), ("favor", 256), ("hrf_angular", 8))}}
BASELINES = {"untrained": "attention=exact task.strategy.generations=0", "uniform": "attention=uniform",
             "average": "task.looks=average", "random": "task.looks=random"}
LABELS = {"exact": "exact", "favorp m=256": "FAVOR+, m = 256", "favorp m=8": "FAVOR+, m = 8",
          "favor m=256": "trigonometric, m = 256", "hrf_angular m=8": "angular hybrid, 8 x 8",
          "untrained": "exact, before training", "uniform": "uniform attention",
          "average": "no attention, mean of all patches", "random": "random actions"}
METHODS = {name: LABELS[name] for name in EACH}
SHORT = "task.strategy.generations=20 task.strategy.evaluate_every=5"
LONG = ("task.strategy.generations=1000 task.strategy.population=128 task.strategy.rollouts=4 "
        "task.strategy.evaluate_every=20 task.strategy.tested=256 task.size=64 task.policy.d=8 task.policy.top=32")
TWELVE = {name: each for name, each in (EACH | BASELINES).items() if name in ("exact", "untrained")}
COST = sweep(f'task=ranking_cost "task.methods={[*EACH]}"', alone=True, **{"task.d": [4, 8, 64]})

page = Page(
    "hrf_robotics",
    title="Hybrid Random Features 4.4, Figure 4: robots whose policies have implicit attention",
    finding="Five training runs cannot tell policies with the angular hybrid from those with FAVOR+. Ranking 64 "
            "patches with the hybrid takes 0.41 of the FLOPs of FAVOR+ and four times those of exact attention.",
    small={"hrf-robotics": [*sweep(SHORT, world=WORLDS, method=EACH | BASELINES, seed=range(5)),
                            *sweep(SHORT, world={"sweep": "task=sweep"}, method=TWELVE, seed=range(5, 12))],
           "hrf-robotics/cost": COST},
    full={"hrf-robotics": sweep(LONG, world=WORLDS, method=EACH | BASELINES, seed=range(10)), "hrf-robotics/cost": COST},
    columns=["world", "method", "split", "step", "d", "patches"], metrics=["return", "flops", "ms"],
    measured=[
        "locomotion: the body of gymnasium's Ant, on a fixed trot, is led over stones with gaps around them, by a "
        "height map of the ground ahead. The return is the way in metres before it falls, within 14 seconds.",
        "sweep: two arms with brushes sweep 12 particles into a bowl, by a picture from above. The return is the share "
        "within the bowl, the mean over 3 strokes of both arms.",
        "The paper's robots and images are others (a Laikago that plans where its feet go, arms with 12 coordinates, "
        "500 x 500 pixels), and its budget larger.",
        "Policies rank the 64 patches of an image by the attention that they get, one head of 4 numbers, unit queries "
        "and keys, and keep the first 8 (locomotion) or 2 (sweep). They begin with keys opposite to the queries, which "
        "attend to what is unlike the rest, and with a controller that goes there (sweep) or away (locomotion).",
        "Evolution strategies: 20 generations of 32 members with one rollout each, the same for all. The last "
        "parameters are tested in 64 rollouts, none of which was dropped.",
        "A sample is a seed: of the first parameters, directions, rollouts and random projections, the same for all "
        "methods; 5, in sweep 12 of exact attention and of it before training.",
        "FLOPs of ranking patches from their queries and keys, exact attention by its matrix. ms: of the processor, "
        "one image, one thread, rounds in turns.",
        "Worlds, sizes, first controller, sigma and learning rate were chosen with exact and uniform attention and "
        "seeds 100 to 104. Eleven such choices followed after returns had been seen, the controller twice; two earlier "
        "worlds of sweep were given up after runs with seeds 0 and 1. P-values do not correct for these choices.",
        "In locomotion three seeds of FAVOR+ with 256 projections and two of the hybrid were seen before the methods "
        "of the page were settled; the twelve seeds of sweep came after five had left open whether training helps."])


def claims(rows: Rows) -> list[Claim]:
    def gain(world: str, better: str, worse: str):
        """As a share of the mean return of exact attention, of the seeds that all methods have."""
        of_all = rows.values("return", "uniform", world=world, split="test").index
        exact = rows.values("return", "exact", world=world, split="test").reindex(of_all).mean()
        return rows.paired(better, worse, "return", world=world, split="test").reindex(of_all) / exact
    lost = {world: gain(world, "exact", "uniform").mean() for world in WORLDS}
    flops = [rows.values("flops", method, d=4, patches=64).item() for method in ("hrf_angular m=8", "favorp m=256")]
    return [
        Claim("the angular hybrid with 8 x 8 projections returns as much as FAVOR+ with 256, less at most 10% of exact "
              "attention's return", {world: gain(world, "hrf_angular m=8", "favorp m=256") for world in WORLDS},
              above=-0.1, unit="of exact", paper="performs as well as the softmax kernel with 256 random projections",
              fails={world: f"what uniform attention loses: {each:.3f} of the return (at least 0.2 needed)"
                     for world, each in lost.items() if each < 0.2}),
        Claim("ranking 64 patches, d = 4: the hybrid needs at most a third of the FLOPs of FAVOR+ with 256",
              {"": flops[0] / flops[1]}, below=1 / 3, unit="times",
              paper="3x fewer FLOPs to obtain same quality policies")]


def tables(rows: Rows):
    returned = {f"{world}: return": {"metric": "return", "world": world, "split": "test"} for world in WORLDS}
    costs = {d: {"metric": "flops", "d": d, "patches": 64} for d in (4, 8, 64)}
    main = mean_table(rows, returned, METHODS).join(mean_table(
        rows, {"FLOPs, 64 patches": costs[4]}, METHODS, spec=",.0f"))
    ranked = {f"{name}, {n} patches, d = {d}": {"metric": metric, "d": d, "patches": n}
              for d in costs for n in (64, 1024) for metric, name in (("flops", "FLOPs"), ("ms", "ms"))}
    less = mean_table(rows, returned, LABELS)
    for world in WORLDS:
        gains = [rows.paired(method, "exact", "return", world=world, split="test") for method in LABELS]
        less[f"{world}: more than exact"] = ["", *(f"{mean_ci(gain):+.3f}" for gain in gains[1:])]
    return {"Return on test, and FLOPs of ranking the patches of an image (d = 4)": main,
            "Return on test, with baselines": less,
            "Ranking the patches of an image": mean_table(rows, ranked, METHODS).T.rename_axis("")}


def figure(rows: Rows):
    fig, axes = panels(2, 2)
    for ax, world, unit in zip(axes, WORLDS, ["way in metres", "share of the particles in the bowl"]):
        dot_plot(ax, {method: rows.values("return", method, world=world, split="test") for method in LABELS},
                 labels=LABELS)
        ax.set(title=world, xlabel=f"return on test: {unit}")
    axes[1].set_yticklabels([])
    fig.tight_layout()
    return fig
