"""Engines: what serves a configuration over HTTP."""
