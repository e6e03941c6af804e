"""The tables, and the check that a file has them and is whole."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a SQLite file with the things of this `name`, which `application_id` marks as ours.

    `checked` names the tables whose pages are read at each start, to find damage; without names all are.
    """

    name: str
    application_id: int
    version: int
    tables: str
    checked: tuple[str, ...] = ()


def counted_by_owner(table: str, counts: str, number: str) -> str:
    """The table `counts`, in which triggers keep the `number` of each owner's rows of `table`, and their bytes."""
    return f"""CREATE TABLE IF NOT EXISTS {counts} (
    owner TEXT PRIMARY KEY, {number} INTEGER NOT NULL, num_bytes INTEGER NOT NULL
);
CREATE TRIGGER IF NOT EXISTS {table}_added AFTER INSERT ON {table} BEGIN
    INSERT INTO {counts} VALUES (new.owner, 1, new.num_bytes) ON CONFLICT (owner)
    DO UPDATE SET {number} = {number} + 1, num_bytes = num_bytes + new.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS {table}_resized AFTER UPDATE OF num_bytes ON {table} BEGIN
    UPDATE {counts} SET num_bytes = num_bytes + new.num_bytes - old.num_bytes WHERE owner = new.owner;
END;
CREATE TRIGGER IF NOT EXISTS {table}_deleted AFTER DELETE ON {table} BEGIN
    UPDATE {counts} SET {number} = {number} - 1, num_bytes = num_bytes - old.num_bytes WHERE owner = old.owner;
    DELETE FROM {counts} WHERE owner = old.owner AND {number} <= 0;
END;
"""


RESPONSE_TABLES = f"""
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    previous TEXT,
    status TEXT NOT NULL,
    background INTEGER NOT NULL,
    used_at REAL NOT NULL,
    router TEXT NOT NULL,
    lease_until REAL NOT NULL,
    cancel INTEGER NOT NULL DEFAULT 0,
    input BLOB NOT NULL,
    head BLOB NOT NULL,
    output BLOB NOT NULL,
    num_bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_at);
CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (owner, used_at);
CREATE INDEX IF NOT EXISTS responses_by_router ON responses (router) WHERE router != '';
{counted_by_owner("responses", "owners", "num_entries")}"""
RESPONSES = Schema("responses", application_id=0x64707463, version=1, tables=RESPONSE_TABLES)


def check_format(connection: sqlite3.Connection, schema: Schema) -> None:
    """Raises sqlite3.DatabaseError for a file of another program, of a newer version, or that is damaged."""
    connection.execute("BEGIN")  # one view of the file: another process may be making its tables
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        if connection.in_transaction:  # SQLite has already ended it if the disk is full
            connection.execute("ROLLBACK")
    if num_tables and application != schema.application_id:
        raise sqlite3.DatabaseError("it is a database of another program")
    if version > schema.version:
        known = f"this program knows versions up to {schema.version}"
        raise sqlite3.DatabaseError(f"it is of version {version}, and {known}")
    for what in schema.checked if num_tables and schema.checked else ("1",):
        (found,) = connection.execute(f"PRAGMA quick_check({what})").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(f"it is damaged: {' '.join(str(found).split())}")


def create_tables(connection: sqlite3.Connection, schema: Schema) -> None:
    """Raises sqlite3.OperationalError for a file that cannot be written."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in _statements(schema.tables):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {schema.application_id}")
        connection.execute(f"PRAGMA user_version = {schema.version}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> list[str]:
    """The statements of a script; those of a trigger belong together."""
    statements, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return statements
