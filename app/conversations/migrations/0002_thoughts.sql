-- A model's thoughts before its answer, which are no part of the content.
ALTER TABLE message ADD COLUMN reasoning TEXT NOT NULL DEFAULT '';
ALTER TABLE message ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE message ADD COLUMN reasoning_s REAL NOT NULL DEFAULT 0;
