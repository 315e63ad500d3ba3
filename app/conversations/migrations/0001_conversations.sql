-- Identifiers are never used twice: the search index and exports refer to them.
CREATE TABLE conversation (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    title    TEXT NOT NULL DEFAULT '',
    system   TEXT NOT NULL DEFAULT '',
    model    TEXT NOT NULL DEFAULT '',
    created  REAL NOT NULL,
    updated  REAL NOT NULL,
    archived INTEGER NOT NULL DEFAULT 0 CHECK (archived IN (0, 1)),
    leaf     INTEGER REFERENCES message (id) ON DELETE SET NULL DEFERRABLE INITIALLY DEFERRED
) STRICT;

CREATE INDEX conversation_updated ON conversation (archived, updated);

CREATE TABLE message (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation  INTEGER NOT NULL REFERENCES conversation (id) DEFERRABLE INITIALLY DEFERRED,
    parent        INTEGER REFERENCES message (id) DEFERRABLE INITIALLY DEFERRED,
    role          TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
    content       TEXT NOT NULL,
    state         TEXT NOT NULL CHECK (state IN ('complete', 'writing', 'stopped', 'failed')),
    created       REAL NOT NULL,
    model         TEXT NOT NULL DEFAULT '',
    tokens        INTEGER NOT NULL DEFAULT 0,
    tokens_per_s  REAL NOT NULL DEFAULT 0,
    finish_reason TEXT NOT NULL DEFAULT '',
    -- Which program is writing this message, while state is 'writing'.
    writer        TEXT NOT NULL DEFAULT '',
    -- Whether the full-text index has this content; the index is derived and can be made again.
    indexed       INTEGER NOT NULL DEFAULT 0 CHECK (indexed IN (0, 1))
) STRICT;

CREATE INDEX message_siblings ON message (conversation, parent, role);
CREATE INDEX message_parent ON message (parent);
CREATE INDEX message_writing ON message (state) WHERE state = 'writing';
CREATE INDEX message_not_indexed ON message (indexed) WHERE indexed = 0;
