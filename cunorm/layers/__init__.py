"""Norms as objects with forward and backward that hold what a training loop must keep."""
