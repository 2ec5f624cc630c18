"""Tunes SGLang EAGLE-3 speculative decoding on clusters of whole GPU nodes."""

__version__ = "0.1.0"
