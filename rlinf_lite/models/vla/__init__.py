"""OpenVLA and OpenVLA-OFT, assembled from transformers' own vision towers and language models."""
