"""The tables of files and batches."""

from __future__ import annotations

from router.stored.schema import Schema, counted_by_owner

FILE_TABLES = f"""
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, created_at, id);
CREATE INDEX IF NOT EXISTS files_by_expiry ON files (state, expires_at);
CREATE TABLE IF NOT EXISTS pieces (
    file TEXT NOT NULL,
    number INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (file, number)
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file TEXT NOT NULL,
    output_file TEXT NOT NULL,
    error_file TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    result_s REAL NOT NULL,
    details BLOB NOT NULL,
    num_total INTEGER NOT NULL DEFAULT 0,
    num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0,
    has_output INTEGER NOT NULL DEFAULT 0,
    has_errors INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    router TEXT NOT NULL,
    lease_until REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, created_at, id);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status, created_at);
{counted_by_owner("files", "file_owners", "num_files")}"""
FILES = Schema(
    "files",
    application_id=0x64707466,
    version=1,
    tables=FILE_TABLES,
    checked=("files", "batches", "file_owners"),  # to read all contents at each start would take minutes
)
