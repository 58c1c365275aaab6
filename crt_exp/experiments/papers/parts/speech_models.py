"""A small recogniser of spoken digits, which two pages train; FAVOR+ and FAVOR++ by number of projections."""

from crt_exp.experiments.report import sweep

PAIRS = {}  # number of projections -> FAVOR+ and FAVOR++
for m in (8, 16, 64, 256):
    PAIRS[m] = f"favorp m={m}", f"favorpp m={m}"
POSITIVE = [method for pair in PAIRS.values() for method in pair]
UNTRAINED = "without training"
TUNED = "fine-tuned after the swap"
SCRATCH = "from scratch"
DIGITS = (
    "task=librispeech task.corpus=fsdd task.batch_seconds=16 task.strings.validation=100 task.speeds=[1.0] "
    "task.augment.bands=0 task.augment.spans=0 trainer.select=last trainer.log_every=50 +task.sizes.layers=2 "
    "+task.sizes.dim=64 +task.sizes.ffn=256 +task.sizes.channels=8 +task.sizes.predictor=64 "
    "+task.sizes.joiner=64 +task.sizes.heads=8 +task.sizes.kernel=1"
)
SWAP = f"{DIGITS} task.init={{runs}}/models/exact"
FROM_SCRATCH = "trainer.steps=1000 trainer.eval_every=250"
FINE_TUNING = "trainer.steps=150 trainer.lr=3e-4 trainer.eval_every=50"
EXACT = f"{DIGITS} trainer.steps=3000 trainer.eval_every=500 trainer.save_every=500"
MODELS = {"models": sweep(EXACT, attention=["exact"])}
