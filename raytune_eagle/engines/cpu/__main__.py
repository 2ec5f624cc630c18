"""``python -m raytune_eagle.engines.cpu FLAGS``: the real SGLang server on the CPU."""

from __future__ import annotations

import sys

from raytune_eagle.engines.cpu import server

if __name__ == "__main__":
    # Spawned children import the parent's main module again, as ``__mp_main__``, but multiprocessing leaves out modules
    # named ``….__main__``. To be found as `server` is what gives the schedulers the shim.
    sys.modules["__main__"] = server
    sys.exit(server.main(sys.argv[1:]))
