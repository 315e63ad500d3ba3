-- The persona of a conversation and the values that it sets differently from the settings, as a JSON object.
ALTER TABLE conversation ADD COLUMN own_values TEXT NOT NULL DEFAULT '';
