"""SGLang without a GPU: ``python -m raytune_eagle.engines.cpu`` takes the flags of ``sglang.launch_server``."""
