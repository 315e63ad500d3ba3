-- Which program deleted this row and can still bring it back; empty: it was not deleted. Nothing else reads such a row.
-- It is removed when that program has ended.
ALTER TABLE conversation ADD COLUMN deleted TEXT NOT NULL DEFAULT '';
ALTER TABLE message ADD COLUMN deleted TEXT NOT NULL DEFAULT '';

-- Alternatives are counted from the index alone: the column comes after the texts in a row.
DROP INDEX message_siblings;
CREATE INDEX message_siblings ON message (conversation, parent, role, deleted);
CREATE INDEX message_deleted ON message (deleted) WHERE deleted <> '';
CREATE INDEX conversation_deleted ON conversation (deleted) WHERE deleted <> '';
