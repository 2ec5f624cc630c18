"""``python -m raytune_eagle``."""

from raytune_eagle.cli import main

if __name__ == "__main__":
    main(prog_name="raytune-eagle")
