"""SQL over the results: what it may and may not do, and what it says when it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_records import figures, trial
from pyarrow import fs

from raytune_eagle.errors import SpecError, StoreError
from raytune_eagle.model.config import Config
from raytune_eagle.model.measurement import Request
from raytune_eagle.model.trial import Completed, Event, TrialRecord
from raytune_eagle.report.columns import results_readme
from raytune_eagle.report.query import Query
from raytune_eagle.report.render import render
from raytune_eagle.schema import TABLES, VERSION_KEY
from raytune_eagle.store import ParquetStore
from raytune_eagle.store.files import Files


def record(study: str, number: int, throughput: float, **params: object) -> TrialRecord:
    """A completed trial with one request."""
    request = Request(concurrency=1, repeat=0, prompt_id="p", category="code", started_s=0.0, latency_s=number + 1.0)
    outcome = Completed(measurements=(figures(throughput, 1.0),), requests=(request,))
    config = Config(model="m")
    return trial(number, None, study=study, config=config, ended_at=1.5, params=params, outcome=outcome)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """Two studies with different parameters, one of them typed differently in each."""
    folder = tmp_path_factory.mktemp("results")
    store = ParquetStore(str(folder))
    store.append(record("a", 0, 10.0, num_steps=3, width=1))
    store.append(record("a", 1, 20.0, num_steps=5, width=2))
    store.append(record("b", 0, 40.0, eagle_topk=4, width="auto"))
    store.append_events("a", [Event(at=1.25, study="a", name="ready")])
    return folder


@pytest.fixture
def results(kept, tmp_path) -> Path:
    """A copy of them, for tests that spoil it or must find nothing beside it."""
    return Path(shutil.copytree(kept, tmp_path / "results"))


def rows(results: Path, sql: str) -> list[dict]:
    """Answer as plain rows."""
    return Query(str(results)).run(sql).to_pylist()


def test_views_join_all_studies(results):
    """Parameters of every study are columns, null where a study has none; kinds that disagree meet as text."""
    found = rows(results, "select study, num_steps, eagle_topk, width from trials order by study, number")
    assert [tuple(row.values()) for row in found] == [("a", 3, None, "1"), ("a", 5, None, "2"), ("b", None, 4, "auto")]


def test_views_join_each_other(results):
    """Trials and requests meet on study and number."""
    sql = "select sum(latency_s) as s from trials t join requests r on r.study = t.study and r.trial = t.number"
    assert rows(results, sql) == [{"s": 4.0}]


def test_times_json_and_maps_work(results):
    """Timestamps, JSON texts and lists can be taken apart although extensions are shut."""
    sql = "select year(happened_at) as y, happened_unix_s from events"
    assert rows(results, sql) == [{"y": 1970, "happened_unix_s": 1.25}]
    sql = "select config_json->>'$.model' as m, len(gates) as g, epoch(ended_at) as e from trials limit 1"
    assert rows(results, sql) == [{"m": "m", "g": 0, "e": 1.5}]


@pytest.mark.parametrize("view", TABLES)
def test_no_column_needs_quotes(results, view):
    """No column has the name of a word that SQL keeps for itself."""
    names = [column.name for column in TABLES[view]]
    assert Query(str(results)).run(f"select {', '.join(names)} from {view}").column_names == names


@pytest.mark.parametrize(
    "sql",
    [
        "from trials",
        "with t as (select * from trials) select * from t",
        "describe trials",
        "summarize trials",
        "pivot trials on study using max(output_throughput) group by number",
        "explain select * from trials",
        "values (1)",
        "select 1;",
    ],
)
def test_reading_statements_pass(results, sql):
    """Each kind of reading statement gives rows."""
    assert rows(results, sql)


def test_nothing_there_gives_empty_views(tmp_path):
    """Before the first study all views are there with their columns, and no rows."""
    assert {row["name"] for row in rows(tmp_path / "none", "show tables")} == set(TABLES)
    assert rows(tmp_path / "none", "select count(concurrency) as n, any_value(env) as e from trials") == [
        {"n": 0, "e": None}
    ]


@pytest.mark.parametrize(
    "sql",
    [
        "copy (select 1) to '{out}'",
        "create table x as select 1",
        "insert into trials select * from trials",
        "with x as (select 1) insert into trials select * from trials",
        "drop view trials",
        "attach '{out}'",
        "install httpfs",
        "load httpfs",
        "set threads = 1",
        "set enable_external_access = true",
        "pragma database_list",
        "call pragma_version()",
        "export database '{out}'",
        "select 1; select 2",
        "select 1; copy (select 1) to '{out}'",
        "",
        "-- nothing",
    ],
)
def test_other_statements_are_refused(results, tmp_path, sql):
    """Whatever writes, configures, loads or is more than one statement is refused, and leaves nothing."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SpecError, match="query: "):
        rows(results, sql.format(out=tmp_path / "out"))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "source",
    [
        "read_csv('{secret}')",
        "read_text('{secret}')",
        "read_blob('{secret}')",
        "'{secret}'",
        "glob('/*')",
        "sniff_csv('{secret}')",
        "read_json('{secret}')",
        "read_text('/proc/self/environ')",
        "query('select * from read_text(''{secret}'')')",
        "query_table('{secret}')",
        "parquet_metadata('{results}/study=a/trials/*.parquet')",
        "read_duckdb('{secret}')",
        "duckdb_secrets()",
        "arrow_scan(1, 2, 3)",
        "read_parquet('{results}/study=a/trials/*.parquet')",
        "read_parquet('http://127.0.0.1:1/x.parquet')",
        "secret_table",
    ],
)
def test_sql_reaches_no_file_network_or_variable(results, tmp_path, source):
    """Functions that would read from elsewhere fail, and so do names of this program's own variables."""
    secret_table = pa.table({"secret": ["s3cret"]})
    assert secret_table.num_rows == 1
    (tmp_path / "secret.csv").write_text("secret\ns3cret\n")
    text = source.format(secret=tmp_path / "secret.csv", results=results)
    with pytest.raises(SpecError) as raised:
        rows(results, f"select * from {text}")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select num_stps from trials", "query: no column 'num_stps'; did you mean num_steps"),
        ("select t.num_stps from trials t", "query: no column 'num_stps'; did you mean num_steps"),
        (
            "select zzzzzzzz from trials",
            "query: no column 'zzzzzzzz'; DESCRIBE trials lists them; a text is in single quotes",
        ),
        ("select * from trial", "Table with name trial does not exist; there are trials, requests, events, probes"),
        ("selec 1", 'syntax error at or near "selec"'),
        ("select study + 1 from trials", "query: "),
    ],
)
def test_mistakes_are_told_in_one_line(results, sql, message):
    """A wrong statement gives one line, with the columns or views that may have been meant."""
    with pytest.raises(SpecError) as raised:
        rows(results, sql)
    (line,) = raised.value.problems
    assert message in line
    assert "\n" not in line


def test_torn_and_foreign_files_are_skipped_and_named(results):
    """Queries go on without files that cannot be used, and each has its warning."""
    folder = results / "study=a/trials"
    (folder / "00008-aaaaaaaaaaaa.parquet").write_bytes(b"")
    pq.write_table(pa.table({"x": [1]}), folder / "theirs.parquet")
    (folder / ".00009-aaaaaaaaaaaa.parquet.1-a.tmp").write_bytes(b"half")
    query = Query(str(results))
    assert query.run("select count(*) as n from trials").to_pylist() == [{"n": 3}]
    assert sorted(line.split(": ")[0].rsplit("/", 1)[1] for line in query.warnings) == [
        "00008-aaaaaaaaaaaa.parquet",
        "theirs.parquet",
    ]
    query.run("select count(*) from requests")
    assert query.warnings == []


def test_names_that_are_no_files_are_skipped_and_named(results):
    """A link in a circle, a dangling one, a folder and a pipe stop no query, and each has its warning."""
    folder = results / "study=a/trials"
    (folder / "loop.parquet").symlink_to("loop.parquet")
    (folder / "dangling.parquet").symlink_to("/no/such/file")
    (folder / "folder.parquet").mkdir()
    os.mkfifo(folder / "pipe.parquet")
    query = Query(str(results))
    assert query.run("select count(*) as n from trials").to_pylist() == [{"n": 3}]
    named = [line.split(": ")[0].rsplit("/", 1)[1] for line in query.warnings]
    assert sorted(named) == ["dangling.parquet", "folder.parquet", "loop.parquet", "pipe.parquet"]


def test_rotten_bytes_inside_a_file_are_an_error(results):
    """A file with a sound end and a changed middle is named as unreadable, not answered from."""
    path = next((results / "study=b/trials").iterdir())
    data = bytearray(path.read_bytes())
    place = data.index(b"auto")
    data[place : place + 4] = b"otua"
    path.write_bytes(data)
    with pytest.raises(StoreError, match=path.name):
        rows(results, "select width from trials")


def test_a_newer_file_asks_for_an_upgrade(results):
    """Results of a later version are not answered from in part."""
    path = next((results / "study=b/trials").iterdir())
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, VERSION_KEY: b"7"}), path)
    with pytest.raises(StoreError, match="upgrade raytune_eagle"):
        rows(results, "select * from trials")


def test_any_filesystem_can_be_queried(results):
    """A URI works like a path, and the many-threads way of remote filesystems gives the same answer."""
    assert Query(results.as_uri()).run("select count(*) as n from trials").to_pylist() == [{"n": 3}]
    query = Query(str(results))
    query._files = Files(fs.SubTreeFileSystem(str(results), fs.LocalFileSystem()), "")
    assert query.run("select sum(output_throughput) as s from trials").to_pylist() == [{"s": 70.0}]


def test_queries_of_several_threads_do_not_meet(results, tmp_path):
    """All queries of a process share a database; each sees the views of its own folder, however many run at once."""
    store = ParquetStore(str(tmp_path / "more"))
    store.append(record("c", 0, 5.0))
    folders = [results, tmp_path / "more"] * 8
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda folder: rows(folder, "select sum(output_throughput) as s from trials"), folders))
    assert found == [[{"s": 70.0}], [{"s": 5.0}]] * 8


@pytest.mark.slow
def test_a_forked_process_can_ask(results):
    """A child of a process that has asked before gets its answer: it does not wait for its parent's threads."""
    sql = "select count(*) as n from trials"
    assert rows(results, sql) == [{"n": 3}]
    code = (
        "import os, sys; from raytune_eagle.report.query import Query\n"
        "asked = Query(sys.argv[1]); asked.run(sys.argv[2])\n"
        "child = os.fork()\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "print(asked.run(sys.argv[2]).to_pylist()); sys.stdout.flush(); os._exit(0)"
    )
    command = [sys.executable, "-c", code, str(results), sql]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[{'n': 3}]\n", done.stderr


def test_schema_lists_every_column_with_its_meaning(results):
    """The schema names type, unit and meaning of all fixed columns and of the parameters found."""
    found = {(row["view"], row["column"]): row for row in Query(str(results)).schema().to_pylist()}
    assert {(view, column.name) for view, columns in TABLES.items() for column in columns} < found.keys()
    assert found["trials", "output_throughput"]["unit"] == "tokens/s"
    assert found["trials", "num_steps"]["meaning"] == "searched parameter"
    assert all(row["type"] and row["meaning"] for row in found.values())


def test_readme_agrees_with_the_schema():
    """The kept page is what the schema gives; `python -m raytune_eagle.report.columns` prints it anew."""
    page = (Path(__file__).parents[1] / "results/README.md").read_text()
    assert page == results_readme()
    assert all(f"| {column.name} | {column.type} |" in page for columns in TABLES.values() for column in columns)


@pytest.mark.parametrize("width", [30, 60, 100])
def test_a_table_fits_the_terminal(results, width):
    """No line is wider than the terminal, however many columns there are, and each value is there."""
    for sql in ("select study, output_throughput from trials", "select * from trials"):
        text = render(Query(str(results)).run(sql), "table", width).decode()
        assert max(len(line) for line in text.splitlines()) <= width
        assert "40" in text
