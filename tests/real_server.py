"""The real SGLang 0.5.20 on the CPU with the bundled pair, as the tests start it."""

from raytune_eagle.model.config import Config

REAL = Config(
    model="builtin:tiny",
    launcher=("python3", "-m", "raytune_eagle.engines.cpu"),
    args={
        "device": "cpu",
        "dtype": "float32",
        "max-total-tokens": 16384,
        "max-running-requests": 8,
        "mem-fraction-static": 0.5,
        "skip-server-warmup": True,
        "sleep-on-idle": True,
    },
)
"""Plain decoding; `Config.model_copy` gives it a draft."""
