"""Samplers that Optuna does not have."""
