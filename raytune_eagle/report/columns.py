"""The text of results/README.md, made from the table in `raytune_eagle.schema` so that the two cannot disagree."""

from __future__ import annotations

from raytune_eagle.schema import SCHEMA_VERSION, TABLES, Column

_ABOUT = {
    "trials": "One row per trial and concurrency (key: study, number, concurrency).",
    "requests": "One row per request as the client saw it, the warm-up included (repeat -1).",
    "events": "One row for each thing that happened to a study, a node or a trial.",
    "probes": "One row per timed all-reduce: node, step and NCCL environment.",
}
_HEAD = """# Results

Every measurement, as Parquet; there is no other record. Schema version SCHEMA_VERSION (`raytune_eagle.schema` in the
metadata of each file). This page is generated: `python -m raytune_eagle.report.columns > results/README.md`.

    study=NAME/trials/00003-UID.parquet     one file per trial, written once
    study=NAME/requests/00003-UID.parquet   its requests
    study=NAME/logs/00003-UID.log.gz        its server's log
    study=NAME/events/, probes/             one file per write
    study=NAME/*/compact-00000-04999.parquet   many trials in one file, after `raytune-eagle results compact`

A trial's file appears when its requests and log are there, whole or not at all. Names with a dot in front are locks,
files being written and what a running study tells its live page. Nothing of this project is needed to read the rest:

```python
pandas.read_parquet("results/study=NAME/trials")
duckdb.sql("select * from read_parquet('results/study=*/trials/*.parquet', union_by_name=true)")
pyarrow.dataset.dataset("results/study=NAME/trials", format="parquet")
pandas.read_parquet(list_of_files, partitioning=None)  # a list of paths needs this, a folder or one file does not
```

Studies have different searched parameters, hence `union_by_name` over several of them. Times of day are UTC. A searched
parameter is a column of its own in trials (after `log_tail`), null where it was left unset and in baselines; one that
takes values of several kinds is text.
"""


def results_readme() -> str:
    """Whole text of results/README.md."""
    return "\n".join(
        [
            _HEAD.replace("SCHEMA_VERSION", str(SCHEMA_VERSION)),
            *(_section(table, columns) for table, columns in TABLES.items()),
        ]
    )


def _section(table: str, columns: tuple[Column, ...]) -> str:
    rows = [f"| {column.name} | {column.type} | {column.unit} | {column.meaning} |" for column in columns]
    return "\n".join(
        [f"## {table}", _ABOUT[table], "", "| column | type | unit | meaning |", "|---|---|---|---|", *rows, ""]
    )


if __name__ == "__main__":
    print(results_readme(), end="")  # noqa: T201 - the output is the page
