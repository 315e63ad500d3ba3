-- Pinned conversations stand first. The origin names a conversation wherever it goes, so that an import finds it again.
ALTER TABLE conversation ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0 CHECK (pinned IN (0, 1));
ALTER TABLE conversation ADD COLUMN origin TEXT NOT NULL DEFAULT '';
UPDATE conversation SET origin = 'privatellm:' || lower(hex(randomblob(16)));
CREATE UNIQUE INDEX conversation_origin ON conversation (origin) WHERE origin <> '';
-- How an answer was generated, as JSON; empty if that is not known.
ALTER TABLE message ADD COLUMN generation TEXT NOT NULL DEFAULT '';
