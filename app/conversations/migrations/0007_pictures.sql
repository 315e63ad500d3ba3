-- An attached picture's file, once for all messages that have it.
CREATE TABLE picture (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    digest TEXT NOT NULL UNIQUE,
    width  INTEGER NOT NULL,
    height INTEGER NOT NULL,
    data   BLOB NOT NULL
) STRICT;

-- A picture that was sent with a question. Its position counts the attached texts, too.
CREATE TABLE attached_picture (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    message  INTEGER NOT NULL REFERENCES message (id) ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED,
    position INTEGER NOT NULL,
    name     TEXT NOT NULL,
    picture  INTEGER NOT NULL REFERENCES picture (id) DEFERRABLE INITIALLY DEFERRED
) STRICT;

CREATE UNIQUE INDEX attached_picture_message ON attached_picture (message, position);
CREATE INDEX attached_picture_picture ON attached_picture (picture);
