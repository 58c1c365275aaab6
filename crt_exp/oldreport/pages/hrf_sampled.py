"""The first lines of hrf-sampled: how far the models that were trained with features are from the unigram model."""

from crt_exp.oldreport.evidence import won_by
from crt_exp.oldreport.page import Page

FEATURES = ("favor", "favorp", "favorpp", "hrf_angular", "hrf_gaussian")
LAWS = ("uniform", "log_uniform", "unigram")  # they know no query


def first_lines(page: Page) -> list[str]:
    setting, = page.settings
    loss = {arm: page.values("loss", setting, arm, "test").mean() for arm in page.arms}
    above = [loss[arm] - loss["unigram model"] for arm in FEATURES]
    worse = sum(value > 0 for value in above)
    lines = [f"**{worse} of {len(above)} models trained with features are worse than the unigram model**, by "
             f"{min(above):.2f} to {max(above):.2f} nats: with so few features and steps none of them says what "
             "features are worth."]
    for law in LAWS:
        beaten = [page.label(arm) for arm in FEATURES if loss[law] <= loss[arm]]
        lines.append(won_by(f"the {page.label(law)} law of negatives", {setting: beaten}, len(FEATURES)))
    return lines
