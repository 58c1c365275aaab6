"""Pretrained models and their swaps: saved and brought back, by the names of transformers and timm, described."""
