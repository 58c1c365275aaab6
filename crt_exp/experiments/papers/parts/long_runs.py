"""Runs of the page on long sequences: images as sequences of values, and the Long Range Arena."""

from crt_exp.experiments.report import sweep

SIZES = (
    "+task.sizes.heads=4 +task.sizes.layers=2 +task.sizes.d_ff=128 +task.sizes.d=64 task.positions=rotary "
    "trainer.select=last trainer.save_every=1000000"
)
PIXELS = f"task=pixels task.dataset=cifar10 task.evaluated=16 trainer.eval_batch=2 trainer.warmup=20 {SIZES}"
IMAGES = {
    "16 x 16": "task.size=16 trainer.batch=4 trainer.steps=200 trainer.eval_every=50",
    "32 x 32": "task.size=32 trainer.batch=1 trainer.steps=150 trainer.eval_every=75",
}
REFORMER = "reformer chunk=64 hashes=2 buckets=96"
IMAGE_METHODS = ["exact", "favorp m=32", "favorpp m=32", "relu m=32", "smreg m=32", REFORMER]
IMAGE_METHODS += ["uniform", "identity", "window block=16 first=16"]
TIMED = {seed: f"seed={seed} trainer.steps=10 trainer.log_every=1" for seed in range(5)}
LISTOPS = {
    "ListOps": f"task=lra task.dropout=0 {SIZES} +task.rules.train=20000 +task.rules.test=2000 "
    "+task.rules.arguments=3 +task.rules.shortest=14 +task.rules.longest=40 trainer.batch=128 "
    "trainer.eval_batch=256 trainer.steps=500 trainer.eval_every=100 trainer.lr=4e-3"
}
UNDECIDED = ["favorp m=16", "elu", "linformer length=1024 rank=16"]  # after five seeds
LISTOPS_METHODS = ["exact", "favorp m=16", "favorpp m=16", "relu m=16", *UNDECIDED[1:]]
LISTOPS_METHODS += ["reformer chunk=4 hashes=2 buckets=8", "uniform", "identity"]
LISTOPS_METHODS += ["window block=4 first=4"]
SMALL = {
    "pixels": sweep(PIXELS, dataset=IMAGES, attention=IMAGE_METHODS, seed=range(5)),
    "pixels/speed": sweep(
        PIXELS, alone=True, dataset=IMAGES, attention=["favorp m=32", REFORMER], seed=TIMED
    ),
    "lra": [
        *sweep(dataset=LISTOPS, attention=LISTOPS_METHODS, seed=range(5)),
        *sweep(dataset=LISTOPS, attention=UNDECIDED, seed=range(5, 20)),
    ],
}

IMAGENET = "experiment=performers_imagenet64"
ARENA = "experiment=performers_lra"
ON_IMAGENET = ["exact", "relu", "favorp redraw_every=1000", "smreg redraw_every=1000", "uniform"]
DEEP_REFORMER = "reformer, 12 layers"
DEEP = (
    f"{IMAGENET} trainer.clip=null attention=reformer attention.hashes=2 attention.chunk=128 "
    "attention.buckets=192 +task.sizes.layers=12"
)
ARENA_SETS = {
    "ListOps": "",  # the others: sizes, steps and rates of the Arena's base configurations
    "text": "task.dataset=text task.data_dir=aclImdb task.max_length=4000 +task.sizes.layers=4 +task.sizes.heads=4 "
    "+task.sizes.d=256 +task.sizes.d_ff=1024 trainer.steps=20000 trainer.warmup=8000 trainer.lr=5.59e-4",
    "retrieval": "task.dataset=retrieval task.data_dir=aan task.max_length=4000 +task.sizes.layers=4 "
    "+task.sizes.heads=4 +task.sizes.d=128 +task.sizes.d_ff=512 trainer.warmup=8000 trainer.lr=5.59e-4",
    "image": "task.dataset=image task.max_length=1024 +task.sizes.layers=1 +task.sizes.heads=8 +task.sizes.d=128 "
    "+task.sizes.d_ff=128 task.dropout=0.3 trainer.batch=256 trainer.steps=35000 trainer.warmup=175 "
    "trainer.lr=5e-4 trainer.weight_decay=0 trainer.schedule=cosine",
    "Pathfinder": "task.dataset=pathfinder task.max_length=1024 +task.sizes.layers=4 +task.sizes.heads=8 "
    "+task.sizes.d=32 +task.sizes.d_ff=32 task.dropout=0.2 trainer.batch=512 trainer.steps=62400 "
    "trainer.warmup=312 trainer.lr=1e-3 trainer.weight_decay=0 trainer.schedule=cosine",
}
ON_ARENA = ["exact", "favorp", "relu", "elu", "linformer length=4000 rank=256"]
ON_ARENA += ["reformer chunk=64 buckets=128", "uniform", "identity"]
FULL = {
    "pixels": [
        *sweep(IMAGENET, dataset="ImageNet64", seed=[0], attention=ON_IMAGENET),
        *sweep(DEEP, dataset="ImageNet64", seed=[0], method=DEEP_REFORMER),
    ],
    "lra": sweep(ARENA, dataset=ARENA_SETS, seed=range(4), attention=ON_ARENA),
}
