"""Seconds, bytes and memory of a piece of model on a piece of cluster."""
