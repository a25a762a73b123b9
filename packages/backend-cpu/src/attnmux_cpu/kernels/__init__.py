"""Attention in plain PyTorch: tiles of float32 scores over pages gathered from the cache.

Functions here check nothing; `attnmux_cpu.impl` checks once and then calls them.
"""
