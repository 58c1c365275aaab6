"""The picture of an advice: what each attention costs in nats, and in time against the length."""

from crt_exp.advice.arms import EXACT, FLOOR
from crt_exp.drawing import CONTROL, EXACT as BLACK, colour, label_ends, new_figure, plain_ticks

SHADES = {"cheap": "#56B4E9", "default": "#0072B2", "quality": "#003D66", "bounded": "#009E73"}
WINDOW = "#AA4499"   # the floor is grey


def figure(advice):
    drawn, (costs, times) = new_figure(1, 2, figsize=(11, 3.8), gridspec_kw={"wspace": 0.35})
    others = [row for row in advice.rows if row.arm.name != EXACT][::-1]
    for place, row in enumerate(others):
        costs.errorbar(row.above, place, xerr=row.above_ci95, fmt="o", ms=5, color=shade(row))
        if advice.uses_memory:
            costs.errorbar(row.again, place, xerr=row.again_ci95, fmt="D", ms=6, mfc="white", color=shade(row))
    costs.set_yticks(range(len(others)), [row.arm.label for row in others])
    least = min(-advice.tolerance, *(row.above - row.above_ci95 for row in others))
    costs.set_xscale("symlog", linthresh=advice.tolerance)
    most = max(advice.tolerance, *(max(row.worst, row.again + row.again_ci95 if advice.uses_memory else 0)
                                   for row in others))
    costs.set_xlim(1.2 * least, 2 * most)
    costs.axvspan(1.2 * least, advice.tolerance, color="#000000", alpha=0.06, lw=0)
    repeated = ""
    if advice.uses_memory:
        costs.axvline(advice.allowed_again, color="0.4", lw=1, ls="--")
        repeated = "\nopen: repeated text, allowed up to the dashes"
    costs.set(title="nats above the model's own attention",
              xlabel=f"{advice.texts} {advice.noun} of {advice.length} tokens; grey: allowed{repeated}")
    for row in advice.rows:
        times.plot(list(row.ms), list(row.ms.values()), marker="o", ms=3, color=shade(row),
                   lw=2.2 if row is advice.chosen or row.arm.name == EXACT else 1)
    times.set(xscale="log", yscale="log", title="milliseconds of a pass", xlabel="tokens")
    plain_ticks(times.xaxis), plain_ticks(times.yaxis)
    label_ends(times, [(row.arm.label.replace("nearfar preset=", "near-far "), max(row.ms), row.ms[max(row.ms)],
                        shade(row)) for row in advice.rows])
    return drawn


def shade(row) -> str:
    if row.arm.name in (EXACT, FLOOR):
        return BLACK if row.arm.name == EXACT else CONTROL
    if row.arm.name == "window":
        return WINDOW
    return SHADES.get(str(row.arm.options.get("preset"))) or colour(row.arm.name)
