"""Norms as functions: checks, a geometry, one call of a backend."""
