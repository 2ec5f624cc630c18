"""Optuna samplers that Optuna does not have; each works with `optuna.create_study` alone."""
