-- The text of an attached file, once for all messages that have it.
CREATE TABLE attached_text (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    -- SHA-256 of the text in UTF-8, in hexadecimal digits.
    digest TEXT NOT NULL UNIQUE,
    text   TEXT NOT NULL
) STRICT;

-- A file that was sent with a question.
CREATE TABLE attachment (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    message  INTEGER NOT NULL REFERENCES message (id) ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED,
    position INTEGER NOT NULL,
    name     TEXT NOT NULL,
    text     INTEGER NOT NULL REFERENCES attached_text (id) DEFERRABLE INITIALLY DEFERRED
) STRICT;

CREATE UNIQUE INDEX attachment_message ON attachment (message, position);
CREATE INDEX attachment_text ON attachment (text);

-- What was typed in the prompt and not sent yet. Conversation 0 is one that has not begun.
CREATE TABLE draft (
    conversation INTEGER PRIMARY KEY,
    text         TEXT NOT NULL,
    -- The folded pastes as a JSON object, by the labels that stand in the text.
    pastes       TEXT NOT NULL DEFAULT ''
) STRICT;

-- Questions are recalled by how they begin.
CREATE INDEX message_question ON message (substr(content, 1, 64), id) WHERE role = 'user' AND deleted = '';
