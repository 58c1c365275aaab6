"""The page families: outcomes of every model type, counted, and named with their reasons."""

from collections import Counter

from crt_exp.drawing import markdown, new_figure
from crt_exp.report.page import Page
from crt_exp.report.tables import Table

OUTCOMES = {"exact": "#0072B2", "refused": "#E69F00", "wrong": "#D55E00", "no attention": "#888888",
            "not tried": "#CCCCCC"}


def sections(page: Page) -> list[Table | str]:
    return [summary(page), table(page, "Wrong", "wrong"), table(page, "Refused at the swap", "refused"),
            f"## Exact\n\n{by_reason(page)}", f"## No attention\n\n{', '.join(models(page, 'no attention'))}.",
            table(page, "Not tried", "not tried")]


def of(page: Page, metric: str) -> dict[tuple[str, str], str]:
    """(library, model) -> value."""
    frame = page.select(metric)
    return dict(zip(zip(frame["setting"], frame["arm"]), frame["value"]))


def models(page: Page, outcome: str) -> dict[str, str]:
    """Model -> library, of those with the outcome."""
    return {model: library for (library, model), value in of(page, "outcome").items() if value == outcome}


def counts(page: Page) -> dict[str, Counter]:
    result = {library: Counter() for library in page.settings}
    for (library, _), outcome in of(page, "outcome").items():
        result[library][outcome] += 1
    return result


def summary(page: Page) -> str:
    lines = [(library, *(count[outcome] for outcome in OUTCOMES)) for library, count in counts(page).items()]
    total = [sum(line[i] for line in lines) for i in range(1, len(OUTCOMES) + 1)]
    versions = {library: " and ".join(sorted({*page.select("outcome", library)["unit"]})) for library in page.settings}
    return (markdown(("library", *OUTCOMES), [*lines, ("all", *total)]) + "\nVersions: "
            + ", ".join(f"{library} {version}" for library, version in versions.items()) + ".")


def table(page: Page, title: str, outcome: str) -> Table | str:
    reasons = of(page, "why")
    rows = [(f"{library} {model}", reasons.get((library, model), "").replace("|", "/")[:300])
            for model, library in models(page, outcome).items()]
    return Table(title, "", ("model", "reason"), rows, title) if rows else f"## {title}\n\nNone."


def by_reason(page: Page) -> str:
    """Names of the exact ones, grouped by what is said of them."""
    reasons, groups = of(page, "why"), {}
    for model, library in models(page, "exact").items():
        groups.setdefault(reasons.get((library, model), ""), []).append(model)
    return "\n\n".join(f"{(reason or 'bidirectional, or not a sequence of tokens').capitalize()}: {', '.join(names)}."
                       for reason, names in groups.items())


def figure(page: Page):
    counted, (fig, ax) = counts(page), new_figure(figsize=(7, 1.9))
    left = [0.0] * len(counted)
    for outcome, colour in OUTCOMES.items():
        share = [count[outcome] / max(count.total(), 1) for count in counted.values()]
        ax.barh(list(counted), share, left=left, color=colour, label=outcome)
        for y, (count, start, width) in enumerate(zip(counted.values(), left, share)):
            if width > 0.03:
                ax.text(start + width / 2, y, count[outcome], ha="center", va="center", color="white", fontsize=8)
        left = [a + b for a, b in zip(left, share)]
    ax.invert_yaxis()
    ax.set_xlabel("share of the models of a library; the numbers count them")
    ax.grid(False)
    ax.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    return fig
