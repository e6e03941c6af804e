"""The tables, and the check that a file has them and is whole."""

from __future__ import annotations

import sqlite3

APPLICATION_ID = 0x64707463
"""Marks a SQLite file as one of ours."""
VERSION = 1
TABLES = """
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
CREATE TABLE IF NOT EXISTS owners (
    owner TEXT PRIMARY KEY, num_entries INTEGER NOT NULL, num_bytes INTEGER NOT NULL
);
CREATE TRIGGER IF NOT EXISTS responses_added AFTER INSERT ON responses BEGIN
    INSERT INTO owners VALUES (new.owner, 1, new.num_bytes) ON CONFLICT (owner)
    DO UPDATE SET num_entries = num_entries + 1, num_bytes = num_bytes + new.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS responses_resized AFTER UPDATE OF num_bytes ON responses BEGIN
    UPDATE owners SET num_bytes = num_bytes + new.num_bytes - old.num_bytes WHERE owner = new.owner;
END;
CREATE TRIGGER IF NOT EXISTS responses_deleted AFTER DELETE ON responses BEGIN
    UPDATE owners SET num_entries = num_entries - 1, num_bytes = num_bytes - old.num_bytes WHERE owner = old.owner;
    DELETE FROM owners WHERE owner = old.owner AND num_entries <= 0;
END;
"""


def check_format(connection: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError for a file of another program, of a newer version, or that is damaged."""
    connection.execute("BEGIN")  # one view of the file: another process may be making its tables
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        connection.execute("ROLLBACK")
    if num_tables and application != APPLICATION_ID:
        raise sqlite3.DatabaseError("it is a database of another program")
    if version > VERSION:
        raise sqlite3.DatabaseError(f"it is of version {version}, and this program knows versions up to {VERSION}")
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(f"it is damaged: {' '.join(str(found).split())}")


def create_tables(connection: sqlite3.Connection) -> None:
    """Raises sqlite3.OperationalError for a file that cannot be written."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in _statements(TABLES):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
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
