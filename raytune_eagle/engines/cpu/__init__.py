"""The real SGLang on a CPU, for machines without a GPU."""
