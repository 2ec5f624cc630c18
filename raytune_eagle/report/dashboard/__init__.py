"""The live page of a study."""
