"""Nodes: machines owned whole, one trial at a time."""
