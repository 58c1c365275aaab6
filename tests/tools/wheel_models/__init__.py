"""Weights of other formats as folders of transformers and timm."""
