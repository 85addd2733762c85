"""Slow, clear implementations written from published descriptions only: what the kernels and codecs are tested against.

Nothing here imports kvzip, and kvzip imports nothing from here: an error would have to be made twice to go unseen.
"""
